"""slurm/dev_cluster.sh: each verb may be called again at any time, with accounting and without."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.cluster import SCRIPT, dev_cluster, running_cluster

pytestmark = [pytest.mark.slurm, pytest.mark.root, pytest.mark.timeout(300)]


def daemons() -> dict[str, int]:
    """Process of each pid file."""
    files = (Path(os.environ["GYRE_SLURM_ROOT"]) / "run").glob("*.pid")
    return {file.name: int(file.read_text()) for file in files}


def idle_nodes() -> int:
    said = subprocess.run(
        ["sinfo", "-h", "-N", "-p", "debug", "-o", "%T"], capture_output=True, text=True, check=True
    )
    return said.stdout.split().count("idle")


def crash() -> None:
    for pid in daemons().values():
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def cluster() -> Iterator[None]:
    with running_cluster("again", nodes=2, cpus=2, gpus=0, port=18128):
        yield


@pytest.fixture
def accounted() -> Iterator[None]:
    with running_cluster("again-acct", nodes=2, cpus=2, gpus=0, port=18132, acct=True):
        yield


def test_up_again_starts_nothing_and_down_again_stops_nothing(cluster: None) -> None:
    first = daemons()
    assert first.keys() == {"munged.pid", "slurmctld.pid", "slurmd.cell0.pid", "slurmd.cell1.pid"}
    dev_cluster("up")
    assert daemons() == first and idle_nodes() == 2
    for _ in range(2):
        dev_cluster("down")
        assert daemons() == {}
    dev_cluster("up")
    assert daemons().keys() == first.keys() and idle_nodes() == 2


@pytest.mark.parametrize("daemon", ["munged", "slurmctld", "slurmd"])
def test_a_daemon_whose_start_was_cut_off_is_started_again(
    daemon: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As happens on a loaded machine."""
    real, mark, stand_in = shutil.which(daemon), tmp_path / "mark", tmp_path / daemon
    stand_in.write_text(f'#!/bin/sh\n[ -e {mark} ] || {{ touch {mark}; kill -PIPE $$; }}\nexec {real} "$@"\n')
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with running_cluster("again", nodes=1, cpus=2, gpus=0, port=18128):
        assert mark.exists() and idle_nodes() == 1


def test_up_mends_what_a_crash_left_and_touches_no_stranger(cluster: None) -> None:
    """One pid file names a process that has nothing to do with Slurm, as after a restart of the machine."""
    crashed = daemons()
    crash()
    with subprocess.Popen(["sleep", "600"]) as stranger:
        file = Path(os.environ["GYRE_SLURM_ROOT"]) / "run" / "slurmd.cell1.pid"
        file.write_text(str(stranger.pid))
        dev_cluster("up")
        assert idle_nodes() == 2 and not set(daemons().values()) & {*crashed.values(), stranger.pid}
        os.kill(int(file.read_text()), signal.SIGKILL)
        file.write_text(str(stranger.pid))
        dev_cluster("down")
        assert stranger.poll() is None
        stranger.kill()


@pytest.mark.full
def test_accounts_outlive_a_crash_and_go_with_the_folder(accounted: None) -> None:
    first = daemons()
    assert {"slurmdbd.pid", "mariadb.pid"} < first.keys()
    job = subprocess.check_output(
        ["sbatch", "--parsable", "-o", "/dev/null", "--wrap=true"], text=True
    ).strip()
    subprocess.run(["srun", "--dependency", f"afterany:{job}", "true"], check=True)
    dev_cluster("up", "--acct")
    assert daemons() == first
    crash()
    dev_cluster("up", "--acct")
    assert daemons().keys() == first.keys() and idle_nodes() == 2
    told = subprocess.check_output(["sacct", "-n", "-X", "-P", "-j", job, "-o", "State"], text=True)
    assert told.strip() == "COMPLETED"
    dev_cluster("down", "--purge")
    assert not Path(os.environ["GYRE_SLURM_ROOT"]).exists()
    dev_cluster("down", "--purge")


def test_a_cluster_that_runs_without_accounting_does_not_get_it_on_the_way(cluster: None) -> None:
    done = subprocess.run(["bash", SCRIPT, "up", "--acct"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "runs without accounting" in done.stderr
