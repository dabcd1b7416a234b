"""What a person gets wrong, and what a machine does to files: a clear error that says what to do, and nothing lost."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre_hpc.config import RunConfig
from gyre_hpc.config_keys import reference
from gyre_hpc.gateway.call_log import call_logs
from gyre_hpc.records import ClosingReason
from gyre_hpc.shards.manifest import read_manifest
from tests.end_to_end.agreement import check_agreement
from tests.end_to_end.conftest import Start
from tests.end_to_end.runs import SMALL, Plan, refused
from tests.end_to_end.test_resume import until_one_is_missing

HELD = 15


@pytest.mark.parametrize(
    ("override", "code", "said"),
    [
        ("schedule.stepz=3", 2, "schedule.steps"),
        ("model.path=/no/such/model", 2, "/no/such/model"),
        ("harness.command=[no-such-harness]", 2, "no-such-harness"),
        ("tasks.family=patchkid", 2, "patchkit"),
        ("resume=/tmp", 2, "/tmp/config.yaml"),
    ],
)
def test_what_cannot_run_is_refused_and_leaves_no_run_behind(
    override: str, code: int, said: str, tmp_path: Path
) -> None:
    given, output = refused("train", *SMALL, f"root={tmp_path / 'runs'}", override)
    assert given == code and said in output
    assert not list((tmp_path / "runs").glob("*"))


def test_an_address_of_another_machine_is_named(tmp_path: Path) -> None:
    code, output = refused("train", *SMALL, f"root={tmp_path / 'runs'}", "cluster.host=203.0.113.1")
    assert code == 2 and "cluster.host=203.0.113.1" in output


def test_no_port_is_configured_so_none_can_be_in_use() -> None:
    assert not [key for key, _, _ in reference(RunConfig) if "port" in key.rpartition(".")[2].split("_")]


def flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def test_damaged_files_are_named_and_can_be_cured(start: Start, tmp_path: Path) -> None:
    plan = Plan(tmp_path / "plan", hold=[HELD])
    run = start(*plan.overrides)
    until_one_is_missing(run)
    run.signal(signal.SIGTERM)
    assert run.wait() == 143
    [calls] = call_logs(run.layout)
    shutil.copy(calls, tmp_path / "copy")
    flip_byte(calls)
    code, output = refused("train", f"resume={run.folder}")
    assert code == 4 and str(calls) in output and "at byte" in output
    shutil.copy(tmp_path / "copy", calls)
    plan.release()
    run.resume().finish()
    check_agreement(run)

    name = read_manifest(run.layout)[0].file
    shard = run.layout.shards / name
    os.truncate(shard, shard.stat().st_size // 2)
    code, output = refused("shards", "verify", str(run.folder))
    assert code == 4 and name in output
    shard.unlink()
    lines = run.layout.manifest.read_text().splitlines(keepends=True)
    run.layout.manifest.write_text("".join(lines[1:]))
    run.resume().finish()
    check_agreement(run)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128m", "gyre-test", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("root may not mount here; enable: run with CAP_SYS_ADMIN")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """Leave no byte free."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        block = bytes(1 << 20)
        try:
            while file.write(block) == len(block):
                pass
            while file.write(b"\0"):
                pass
        except OSError:
            return ballast
    return ballast


@pytest.mark.root
def test_a_full_disk_ends_the_run_and_nothing_finished_is_lost(
    start: Start, small_disk: Path, tmp_path: Path
) -> None:
    plan = Plan(tmp_path / "plan", hold=[HELD])
    run = start(*plan.overrides, f"root={small_disk / 'runs'}")
    run.root = small_disk / "runs"
    until_one_is_missing(run)
    before = run.outcomes()
    ballast = fill(small_disk)
    plan.release()
    assert run.wait() == 5, run.tail()
    assert "No space left" in run.tail() and f"gyre train resume={run.folder}" in run.tail()
    assert "Traceback" not in run.tail()
    ballast.unlink()
    run.resume().finish()
    after = run.outcomes()
    assert sorted(after) == list(range(HELD + 1)) and {id: after[id] for id in before} == before
    assert run.versions() == [1, 2]
    judged = {after[HELD].outcome.reason} - {ClosingReason.COMPLETED, ClosingReason.INFRASTRUCTURE}
    assert not judged, "a full disk says nothing about the policy"
    check_agreement(run)
