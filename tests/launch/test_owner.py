"""Ownership of a run folder: one controller at a time, taken over only from the provably dead."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from gyre_hpc.errors import CorruptRecord, RunOwned
from gyre_hpc.launch.owner import (
    Owner,
    acquire,
    current_owner,
    owner_path,
    read_owner,
    release,
    run_of_job,
)


def own_as(run: Path, **changes: object) -> None:
    owner = msgspec.structs.replace(current_owner(1), **changes)
    owner_path(run, 1).write_bytes(msgspec.json.encode(owner))


def test_a_live_owner_is_respected(tmp_path: Path) -> None:
    acquire(tmp_path)
    with pytest.raises(RunOwned, match="that process is alive"):
        acquire(tmp_path)


def test_a_dead_owner_on_this_host_is_succeeded(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    own_as(tmp_path, pid=child.pid)
    assert acquire(tmp_path).epoch == 2
    latest = read_owner(tmp_path)
    assert latest is not None and latest.epoch == 2


def test_an_owner_that_nobody_has_reaped_is_gone(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    process = psutil.Process(child.pid)
    own_as(tmp_path, pid=child.pid, process_start=process.create_time())
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert acquire(tmp_path).epoch == 2
    child.wait()


def test_a_reused_pid_is_not_the_owner(tmp_path: Path) -> None:
    own_as(tmp_path, process_start=1.0)
    assert acquire(tmp_path).epoch == 2


def test_another_host_needs_force(tmp_path: Path) -> None:
    own_as(tmp_path, host="elsewhere")
    with pytest.raises(RunOwned, match="resume_force=true"):
        acquire(tmp_path)
    assert acquire(tmp_path, force=True).epoch == 2


def test_a_later_restart_of_the_same_job_takes_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_as(tmp_path, host="elsewhere", job="77", restart_count=0)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert acquire(tmp_path).restart_count == 1


def test_an_unreadable_owner_record_is_named(tmp_path: Path) -> None:
    owner_path(tmp_path, 1).write_text("{")
    with pytest.raises(CorruptRecord, match="owner"):
        acquire(tmp_path)


def test_owner_round_trip() -> None:
    owner = current_owner(3)
    assert msgspec.json.decode(msgspec.json.encode(owner), type=Owner) == owner


def test_a_run_whose_controller_ended_in_order_is_free_wherever_that_was(tmp_path: Path) -> None:
    """As for the successor of a job that Slurm has forgotten."""
    own_as(tmp_path, host="elsewhere", job="77")
    release(tmp_path, msgspec.structs.replace(current_owner(1), epoch=1))
    assert acquire(tmp_path).epoch == 2
    with pytest.raises(RunOwned):
        acquire(tmp_path)


def test_a_job_finds_the_run_it_began(tmp_path: Path) -> None:
    for name, job in (("a", "76"), ("b", "77")):
        (tmp_path / name).mkdir()
        own_as(tmp_path / name, job=job)
    assert run_of_job(tmp_path, "77") == tmp_path / "b"
    assert run_of_job(tmp_path, "78") is None and run_of_job(tmp_path / "none", "77") is None
