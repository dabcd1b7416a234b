"""Real runs on real SGLang engines (CPU): roles switch, an engine is killed under its calls, no call is lost."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil
import pytest

from gyre_hpc.report import metrics as m
from tests.conftest import sglang_python
from tests.end_to_end import runs
from tests.end_to_end.agreement import check_agreement
from tests.end_to_end.conftest import Start
from tests.end_to_end.runs import Plan, Run, all_gone, children
from tests.end_to_end.test_kills import until_calls, until_rerouted

pytestmark = [pytest.mark.sglang, pytest.mark.full, pytest.mark.timeout(3400)]

LONG_S = 1500.0
"""Servers take a minute of CPU time each to start."""


def sglang() -> list[str]:
    return [
        "engine=sglang",
        "engine.sglang.device=cpu",
        f"engine.sglang.python={sglang_python()}",
        "engine.page_tokens=16",
        "engine.pool_tokens=8192",
        f"engine.start_timeout_s={LONG_S:g}",
        f"cluster.start_timeout_s={LONG_S:g}",
        "cluster.restarts=20",
    ]


def server(run: Run, cell: int) -> psutil.Process:
    """The main process of a cell's SGLang."""
    leader = run.cell(cell)
    return run.until(
        f"SGLang of cell {cell}", lambda: next(iter(children(leader, "gyre_hpc.engines.sglang.server")), None)
    )


def roles(run: Run, cell: int) -> list[str]:
    return [line.role for line in run.metrics(m.RoleChange) if line.cell == cell]


def test_a_whole_run_on_sglang_switches_roles_and_leaves_no_pages_behind(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smallest there is: two steps of one group of two executions, pages in a folder that both cells share."""
    monkeypatch.setattr(runs, "LIMIT_S", LONG_S)
    shared = tmp_path / "shared"
    small = ["schedule.batch_groups=1", "schedule.executions_per_group=2", "engine.capacity=2"]
    run = start(
        *Plan(tmp_path / "plan", calls=2, max_tokens=16).overrides,
        *sglang(),
        *small,
        f"engine.sglang.kv_folder={shared}",
    )
    run.until("a page in the shared folder", lambda: list(shared.glob("*/*.page")))
    run.until("the first step", run.versions)
    everyone = run.family()
    run.finish()
    assert all_gone(everyone) == []
    assert list(shared.iterdir()) == [], "the run took its pages with it"
    assert run.versions() == [1, 2]
    assert run.outcomes().keys() == {0, 1, 2, 3}
    assert run.summary()["calls_lost"] == 0 and run.summary()["faults"] == 0
    assert all({"training", "rollout"} <= set(roles(run, cell)) for cell in (0, 1))
    check_agreement(run)


def test_cells_with_sglang_switch_roles_and_outlive_a_killed_engine(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "LIMIT_S", LONG_S)
    run = start(*Plan(tmp_path / "plan", calls=3, max_tokens=48).overrides, *sglang())
    until_calls(run)
    dying = server(run, 1)
    family = [dying, *dying.children(recursive=True)]
    assert len(family) >= 2
    dying.kill()
    assert all_gone(family) == []
    until_rerouted(run)
    run.until("the first step", run.versions)
    everyone = run.family()
    run.finish()
    assert all_gone(everyone) == []
    assert run.versions() == [1, 2]
    assert sorted(run.outcomes()) == list(range(16))
    assert run.summary()["calls_lost"] == 0
    assert all({"training", "rollout"} <= set(roles(run, cell)) for cell in (0, 1))
    check_agreement(run)
    shutil.rmtree(run.root)
