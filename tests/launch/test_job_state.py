"""The state of a job: squeue's word, else the newest record of sacct, else unknown, which is never an end."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from gyre_hpc.errors import RunOwned
from gyre_hpc.launch.job.state import FAILED, job_state, job_states, read_state
from gyre_hpc.launch.owner import acquire, current_owner, owner_path
from tests.sweep.fake_slurm import FakeSlurm


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm(tmp_path / "slurm", tmp_path / "none", monkeypatch)


def test_slurm_is_asked_for_what_it_knows_and_accounting_for_the_rest(slurm: FakeSlurm) -> None:
    slurm.say(
        squeue="77|RUNNING\n78+0|PENDING\n78+1|RUNNING",
        sacct="77|FAILED\n79+0|CANCELLED by 1000\n79+1|COMPLETED",
    )
    assert job_states(["77", "78", "79", "80"]) == {"77": "RUNNING", "78": "PENDING", "79": "CANCELLED"}
    assert "CANCELLED" in FAILED and "COMPLETED" not in FAILED


def test_without_slurms_commands_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert job_states(["77"]) == {} and job_states([]) == {}


@pytest.mark.parametrize(
    ("line", "read"),
    [
        ("59|COMPLETED", ("59", "COMPLETED")),
        ("59+0|CANCELLED by 0", ("59", "CANCELLED")),
        ("59+1|FAILED", ("59+1", "FAILED")),
        ("59|CANCELLED+", ("59", "CANCELLED")),
        ("59|", ("59", "")),
    ],
)
def test_a_line_of_squeue_or_sacct_is_read(line: str, read: tuple[str, str]) -> None:
    assert read_state(line) == read


def test_a_record_is_not_believed_while_slurm_does_not_answer(slurm: FakeSlurm) -> None:
    """The job may have been requeued since: slurmctld alone knows."""
    slurm.say(sacct="77|PREEMPTED\n78|COMPLETED")
    assert job_states(["77", "78"]) == {"77": "PREEMPTED", "78": "COMPLETED"}
    slurm.fail("squeue", "slurm_load_jobs error: Unable to contact slurm controller")
    assert job_states(["77", "78"]) == {}
    slurm.fail("squeue", "slurm_load_jobs error: Invalid job id specified")
    assert job_state("77") == "PREEMPTED"


@pytest.mark.parametrize(
    ("squeue", "sacct", "gone"),
    [
        ("77|FAILED", "", True),
        ("77|PENDING", "77|PREEMPTED", False),
        ("77|COMPLETING", "77|COMPLETED", False),
        ("", "77+0|CANCELLED by 0", True),
        ("", "77|RUNNING", False),
        ("", "77|REQUEUED", False),
        ("", "", False),
    ],
)
def test_a_run_is_taken_over_from_a_job_on_another_host_only_after_its_end(
    slurm: FakeSlurm, tmp_path: Path, squeue: str, sacct: str, gone: bool
) -> None:
    slurm.say(squeue=squeue, sacct=sacct)
    run = tmp_path / "run"
    run.mkdir()
    owner = msgspec.structs.replace(current_owner(1), host="elsewhere", job="77")
    owner_path(run, 1).write_bytes(msgspec.json.encode(owner))
    if gone:
        assert acquire(run).epoch == 2
    else:
        with pytest.raises(RunOwned, match="Slurm job 77 is"):
            acquire(run)
