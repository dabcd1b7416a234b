"""One submitting command at a time; how many jobs are queued; what a wait waits for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from gyre_hpc.errors import RunOwned
from gyre_hpc.launch.owner import current_owner
from gyre_hpc.sweep.lock import FILE_NAME, held
from gyre_hpc.sweep.manifest import Manifest
from gyre_hpc.sweep.pace import TOO_MANY, Pace, wait_for_all
from gyre_hpc.sweep.submission import submit_points
from tests.sweep.fake_slurm import FakeSlurm
from tests.sweep.sweeps import FIRST, NOON, SECOND, THIRD, a_run
from tests.sweep.test_submission import points

HOLDER = "import sys; from pathlib import Path; from gyre_hpc.sweep.lock import held\nwith held(Path(sys.argv[1])): print('holds', flush=True); sys.stdin.read()"
NAMES = ("schedule=gyre", "schedule=colocate", "schedule=async")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "sweep"


@pytest.fixture
def slurm(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm(tmp_path / "slurm", folder / "manifest.jsonl", monkeypatch)


def submitted(folder: Path, tmp_path: Path, pace: Pace) -> tuple[list[str | None], list[str]]:
    told: list[str] = []
    entries = submit_points(points(tmp_path, *NAMES), Manifest.opened(folder), pace=pace, tell=told.append)
    return [entry.job for entry in entries], told


def test_of_two_shells_the_second_is_refused_with_who_holds_the_sweep(folder: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "holds\n"
        with pytest.raises(RunOwned, match=f"pid {other.pid} on "), held(folder):
            pass
        other.kill()
    with held(folder), pytest.raises(RunOwned), held(folder):
        pass
    with held(folder):
        pass
    assert list(folder.iterdir()) == []


def test_a_holder_on_another_host_is_never_judged(folder: Path) -> None:
    folder.mkdir()
    elsewhere = msgspec.structs.replace(current_owner(1), host="login2", pid=7)
    (folder / FILE_NAME).write_bytes(msgspec.json.encode(elsewhere))
    with pytest.raises(RunOwned, match="pid 7 on login2") as refused, held(folder):
        pass
    assert str(folder / FILE_NAME) in refused.value.fix


def test_of_many_that_find_a_dead_holder_one_succeeds_it(folder: Path) -> None:
    folder.mkdir()
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    dead = msgspec.structs.replace(current_owner(1), pid=child.pid)
    (folder / FILE_NAME).write_bytes(msgspec.json.encode(dead))
    shells = [
        subprocess.Popen(
            [sys.executable, "-c", HOLDER, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for _ in range(6)
    ]
    said = [shell.stdout.readline() for shell in shells if shell.stdout is not None]
    assert sorted(said) == [""] * 5 + ["holds\n"]
    for shell in shells:
        shell.communicate("")


def test_no_more_jobs_than_allowed_are_queued_and_the_rest_is_left(
    slurm: FakeSlurm, folder: Path, tmp_path: Path
) -> None:
    slurm.say(squeue="77|PENDING\n78|RUNNING\n79|PENDING")
    jobs, told = submitted(folder, tmp_path, Pace(max_jobs=2))
    assert jobs == ["77", "78", None] and "max_jobs=2" in told[2]
    slurm.say(squeue="77|COMPLETED\n78|RUNNING\n79|PENDING")
    assert submitted(folder, tmp_path, Pace(max_jobs=2))[0] == ["77", "78", "79"]


def test_a_wait_submits_the_next_when_one_ends(slurm: FakeSlurm, folder: Path, tmp_path: Path) -> None:
    slurm.say(squeue="77|RUNNING\n78|RUNNING\n79|RUNNING")
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            slurm.say(squeue="77|FAILED\n78|RUNNING\n79|RUNNING")

    assert submitted(folder, tmp_path, Pace(2, wait=True, poll_s=5, sleep=sleep))[0] == ["77", "78", "79"]
    assert slept == [5, 5]


@pytest.mark.parametrize("wait", [True, False])
def test_a_site_that_takes_no_more_jobs_is_asked_again_by_a_wait_only(
    slurm: FakeSlurm, folder: Path, tmp_path: Path, wait: bool
) -> None:
    slurm.refuse("schedule_async", why="Job violates accounting/QOS policy (job submit limit, user's size)")
    jobs, told = submitted(folder, tmp_path, Pace(wait=wait, sleep=lambda seconds: slurm.refuse()))
    assert jobs == ["77", "78", "79" if wait else None]
    assert len(told) == 3 and len(list((tmp_path / "runs").iterdir())) == 3
    assert wait or "job submit limit" in told[2]


@pytest.mark.parametrize("words", ["AssocMaxSubmitJobLimit", "QOSMaxSubmitJobPerUserLimit"])
def test_slurms_words_for_too_many_jobs(words: str) -> None:
    assert TOO_MANY.search(f"sbatch: error: {words}") and not TOO_MANY.search("Invalid qos specification")


def test_a_wait_ends_when_every_job_has_ended_and_never_by_a_job_that_is_not_known(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    manifest = Manifest.opened(tmp_path / "sweep")
    for number, point in enumerate((FIRST, SECOND), start=1):
        manifest.record(point, run=a_run(tmp_path, f"run-{number}"), job=str(76 + number), time=NOON)
    manifest.record(THIRD, error="model.path=/x: no such folder", time=NOON)
    says: list[Callable[[], None]] = [
        lambda: slurm.say(squeue="77|COMPLETED\n78|RUNNING"),
        lambda: slurm.say(squeue=""),  # both forgotten: the first has been seen to end
        lambda: slurm.say(squeue="", sacct="78|TIMEOUT"),
    ]
    slurm.say(squeue="77|RUNNING\n78|PENDING")
    wait_for_all(manifest, Pace(wait=True, sleep=lambda seconds: says.pop(0)()))
    assert says == []
