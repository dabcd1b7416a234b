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
from tests.end_to_end.talker import write_talker
from tests.end_to_end.test_kills import recent_calls, until_rerouted

pytestmark = [pytest.mark.sglang, pytest.mark.full, pytest.mark.timeout(3400)]

LONG = 200
"""Tokens of a call that is to be met under way."""
CAPACITY = 4
"""Calls a cell takes (runs.SMALL)."""
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


def until_both_serve(run: Run) -> None:
    """A server may be up long before the other; calls go to whichever serves."""
    run.until("both cells", lambda: all(roles(run, cell)[-1:] == ["rollout"] for cell in (0, 1)))


def until_calls_on_both(run: Run) -> None:
    """More calls have tokens than one cell takes."""

    def sampling() -> bool:
        return sum(call.finished is None and bool(call.ids) for call in recent_calls(run)) > CAPACITY

    run.until("calls on both cells", sampling)


def talking(plan: Plan, folder: Path) -> list[str]:
    """Calls have as many tokens as they ask for, and a batch is trained for so long that both cells have a part in it."""
    lengths = [f"gateway.max_output_tokens={LONG}", "gateway.max_sampled_tokens=0"]
    paced = "trainer.tokens_per_s=150"
    return [*plan.overrides, *sglang(), *lengths, paced, f"model.path={write_talker(folder)}"]


def test_a_whole_run_on_sglang_switches_roles_and_leaves_no_pages_behind(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smallest there is: two steps of one group of two executions, pages in a folder that both cells share."""
    monkeypatch.setattr(runs, "LIMIT_S", LONG_S)
    shared, plan = tmp_path / "shared", Plan(tmp_path / "plan", max_tokens=24, hold=range(2))
    run = start(
        *talking(plan, tmp_path / "model"),
        "schedule.batch_groups=1",
        "schedule.executions_per_group=2",
        f"engine.sglang.kv_folder={shared}",
    )
    until_both_serve(run)
    plan.release()
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


def test_calls_outlive_an_engine_of_sglang_that_is_killed_under_them(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "LIMIT_S", LONG_S)
    plan = Plan(tmp_path / "plan", hold=range(16), max_tokens=24, first=dict.fromkeys(range(8), LONG))
    run = start(*talking(plan, tmp_path / "model"), "gateway.engine_silence_s=600")
    until_both_serve(run)
    plan.release(*range(8))
    until_calls_on_both(run)
    dying = server(run, 1)
    family = [dying, *dying.children(recursive=True)]
    assert len(family) >= 2
    dying.kill()
    assert all_gone(family) == []
    until_rerouted(run)
    run.until("the first step", run.versions)
    until_both_serve(run)
    plan.release()
    everyone = run.family()
    run.finish()
    assert all_gone(everyone) == []
    assert run.versions() == [1, 2]
    assert sorted(run.outcomes()) == list(range(16))
    assert run.summary()["calls_lost"] == 0
    assert all({"training", "rollout"} <= set(roles(run, cell)) for cell in (0, 1))
    check_agreement(run)
    shutil.rmtree(run.root)
