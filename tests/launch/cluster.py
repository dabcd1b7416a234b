"""A real Slurm of a few nodes on this machine for the length of a test module (slurm/dev_cluster.sh)."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "slurm" / "dev_cluster.sh"
PATIENCE_S = 90.0


def dev_cluster(*verb: str) -> str:
    """A verb of the script, with the settings of the running cluster."""
    done = subprocess.run(["bash", SCRIPT, *verb], capture_output=True, text=True)
    assert done.returncode == 0, f"dev_cluster.sh {verb} ended with {done.returncode}: {done.stderr}"
    return done.stdout


@contextlib.contextmanager
def running_cluster(
    name: str, *, nodes: int, cpus: int, gpus: int, port: int, acct: bool = False
) -> Iterator[None]:
    """The cluster, with SLURM_CONF of this process pointing at it. Each module has its own `name` and port range.

    `acct`: with accounting; then it has one port more, and needs slurmdbd and MariaDB.
    """
    if os.geteuid() != 0 or shutil.which("slurmctld") is None:
        pytest.skip("needs root and Slurm; enable: sudo bash slurm/dev_cluster.sh up")
    if acct and shutil.which("slurmdbd") is None:
        pytest.skip("needs slurmdbd; enable: sudo bash slurm/dev_cluster.sh install --acct")
    with pytest.MonkeyPatch.context() as patch:
        root = Path("/tmp") / f"gyre-slurm-{name}-{os.getpid()}"
        settings = {"ROOT": root, "NODES": nodes, "CPUS": cpus, "GPUS": gpus, "PORT": port}
        for key, value in settings.items():
            patch.setenv(f"GYRE_SLURM_{key}", str(value))
        try:
            dev_cluster("up", *(["--acct"] if acct else []))
            patch.setenv("SLURM_CONF", dev_cluster("env").strip().partition("=")[2])
            yield
        finally:
            dev_cluster("down", "--purge")


def reconfigure(pattern: str, replacement: str) -> None:
    """Change a line of slurm.conf while the cluster runs.

    slurmctld takes up its saved state when it reads its configuration again: ids given since would be given twice. It saves
    what has changed, so something has to.
    """
    subprocess.run(["sbatch", "-o", "/dev/null", "--mem=64", "--wrap=true"], check=True, capture_output=True)
    state, now = Path(os.environ["GYRE_SLURM_ROOT"]) / "state" / "job_state", time.time()
    deadline = time.monotonic() + PATIENCE_S
    while not state.exists() or state.stat().st_mtime <= now:
        assert time.monotonic() < deadline, "slurmctld does not save its state"
        time.sleep(0.3)
    file = Path(os.environ["SLURM_CONF"])
    file.write_text(re.sub(pattern, replacement, file.read_text()))
    subprocess.run(["scontrol", "reconfigure"], check=True)


def squeue(job: str, form: str, *flags: str) -> str:
    """What squeue says of a job; "" once it is gone."""
    command = ["squeue", "-h", "-j", job, "-o", form, *flags]
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip()
