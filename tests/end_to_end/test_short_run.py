"""A short run from the command line to its report: the mechanism is sound and its records agree."""

from __future__ import annotations

from pathlib import Path

from gyre_hpc.shards.stats import stats
from tests.end_to_end.agreement import check_agreement
from tests.end_to_end.conftest import Start
from tests.end_to_end.runs import Plan, all_gone, gyre
from tools.check_run import complaints


def test_a_short_run_finishes_and_its_records_agree(start: Start, tmp_path: Path) -> None:
    plan = Plan(tmp_path / "plan")
    run = start(
        *plan.overrides,
        "cluster.cells=3",
        "engine.capacity=3",
        "tasks.heldout=2",
        "tasks.evaluation_repeats=1",
    )
    run.until("all processes", lambda: len(run.family()) >= 7)
    family = run.family()
    run.finish()
    assert complaints(run.folder) == []
    assert all_gone(family) == []
    assert sorted(run.outcomes()) == list(range(2 * 8 + 2 * 2))
    assert run.versions() == [1, 2]
    check_agreement(run)
    assert stats(run.folder).forks_by_reason == {}
    top, _ = gyre("top", str(run.folder)).communicate(timeout=120)
    assert all(words in top.decode() for words in ("step 2/2", "ended", "cell-2", "completed 20"))
    verified = gyre("shards", "verify", str(run.folder))
    assert verified.wait(120) == 0
