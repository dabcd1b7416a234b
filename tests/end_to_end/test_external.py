"""Gateway and runner that belong to nobody's job: they serve one controller after another, and end with the run."""

from __future__ import annotations

from pathlib import Path

from gyre_hpc.controller.journal.entries import Resumed
from tests.end_to_end.conftest import Start
from tests.end_to_end.runs import LIMIT_S, Plan, all_gone, gyre, lives
from tests.end_to_end.test_adoption import BUSY, check_undisturbed, open_calls


def test_services_of_their_own_hold_calls_until_the_next_controller_and_end_with_the_run(
    start: Start, tmp_path: Path
) -> None:
    plan = Plan(tmp_path / "plan", calls=3, max_tokens=24)
    run = start(*plan.overrides, *BUSY, "cluster.runners=external", "cluster.orphan_grace_s=0.1")
    with (tmp_path / "services.out").open("wb") as out:
        services = gyre("services", str(run.folder), out=out)
    try:
        run.until("calls under way", lambda: len(open_calls(run)) >= 2)
        processes, cells = run.survivors(), run.processes("gyre_hpc.cells.leader")
        run.kill()
        assert all_gone(cells) == []
        assert len(processes) == 2 and all(map(lives, processes))
        run.resume().finish()
        assert services.wait(LIMIT_S) == 0 and all_gone(processes) == []
    finally:
        if services.poll() is None:
            services.terminate()
            services.wait(LIMIT_S)
    assert run.versions() == [1, 2] and len(run.entries(Resumed)) == 1
    check_undisturbed(run)
