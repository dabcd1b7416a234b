"""Any process may die or hang at any moment, the controller included: the run takes its steps and its records agree."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import psutil
import pytest

from gyre_hpc.report import metrics as m
from tests.end_to_end.agreement import check_agreement
from tests.end_to_end.conftest import Start
from tests.end_to_end.runs import Plan, Run, all_gone, quietly

pytestmark = pytest.mark.full
BLOWS = 12
SERVICES = ("gateway.process", "executions.runner", "controller.processor")


def strike(run: Run, dice: random.Random) -> str:
    """Kill something; returns what."""
    victim = dice.choice(["engine", "cell", "worker", "controller", "interrupt", *SERVICES])
    family = run.family()
    if victim == "controller":
        run.kill()
    elif victim == "interrupt":
        run.signal(signal.SIGTERM)
        assert run.wait() in (0, 143), run.tail()
    else:
        found = [process for process in family if is_a(victim, process)]
        if found:
            quietly(dice.choice(found).kill)
        return victim
    if victim == "interrupt" or dice.random() < 0.5:
        assert all_gone(family) == []
    run.resume()
    return victim


def is_a(victim: str, process: psutil.Process) -> bool:
    words = " ".join(quietly(process.cmdline) or [])
    if victim == "worker":
        return "gyre_hpc.gateway.process" in words and "--socket" in words
    module = {"engine": "engines.torch.server", "cell": "cells.leader"}.get(victim, victim)
    return f"gyre_hpc.{module}" in words and "--socket" not in words


WAYS = {
    "gyre": (),
    "gyre, bursts of two": ("schedule.steps_per_burst=2",),
    "gyre, ahead": ("schedule.extra_dispatch=1",),
    "colocate": ("schedule=colocate",),
    "async": ("schedule=async", "schedule.extra_dispatch=1"),
    "oversampling": ("schedule.oversample=1",),
}


@pytest.mark.parametrize(("seed", "way"), list(enumerate(WAYS)))
def test_a_run_survives_blow_after_blow(seed: int, way: str, start: Start, tmp_path: Path) -> None:
    dice = random.Random(seed)
    plan = Plan(tmp_path / "plan", calls=3, max_tokens=16)
    run = start(
        *plan.overrides,
        "cluster.cells=3",
        "cluster.restarts=100",
        "cluster.orphan_grace_s=5",
        "schedule.steps=4",
        "engine.tokens_per_s=100",
        "trainer.tokens_per_s=100",
        "trainer.checkpoint_every=2",
        *WAYS[way],
    )
    blows = []
    for _ in range(BLOWS):
        entries = len(run.journal()) + dice.randrange(1, 40)
        run.until("the journal to grow", lambda entries=entries: len(run.journal()) >= entries)
        blows.append(strike(run, dice))
    run.finish()
    assert run.versions() == list(range(1, len(run.versions()) + 1)), blows
    assert run.summary()["steps"] == 4, blows
    run.outcomes()
    check_agreement(run)


@pytest.mark.parametrize("victim", ["cell", "engine", "worker", *SERVICES[1:]])
def test_a_process_that_hangs_is_replaced(victim: str, start: Start, tmp_path: Path) -> None:
    plan = Plan(tmp_path / "plan", hold=[7])
    run = start(
        *plan.overrides,
        "cluster.suspect_after_s=6",
        "cluster.lost_after_s=4",
        "gateway.engine_silence_s=10",
        "schedule.steps=1",
    )
    run.until("most outcomes", lambda: len(run.outcomes()) >= 4)
    next(process for process in run.family() if is_a(victim, process)).suspend()
    plan.release()
    if victim != "engine":
        run.until_metric(m.Fault, lambda line: "exited with -9" in line.what)
    run.finish()
    assert sorted(run.outcomes()) == list(range(8)) and run.versions() == [1]
    check_agreement(run)
