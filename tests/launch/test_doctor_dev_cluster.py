"""The acceptance job and the doctor on a real Slurm of two nodes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from gyre_hpc.launch.doctor.site import Finding, Site, State, read_site
from tests.launch.cluster import PATIENCE_S, SCRIPT, running_cluster, squeue

pytestmark = [pytest.mark.slurm, pytest.mark.root]

REPO = SCRIPT.parents[1]
LOCAL = {"python", "packages", "torch", "run root", "disk", "files", "sandbox", "open files", "/dev/shm"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with running_cluster("doctor", nodes=2, cpus=2, gpus=0, port=17960):
        yield


def accepted(folder: Path) -> Site:
    """What slurm/accept.sbatch found."""
    log = folder / "job.log"
    command = ["sbatch", "--parsable", "-N2", f"--output={log}", f"--chdir={REPO}"]
    env = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPO),
    }
    script = str(REPO / "slurm" / "accept.sbatch")
    job = subprocess.check_output([*command, script, str(folder)], text=True, env=env).strip()
    deadline = time.monotonic() + PATIENCE_S
    while squeue(job, "%T", "--states=all") in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    site = read_site(folder)
    assert site is not None, log.read_text()
    return site


def test_a_site_is_accepted_and_the_doctor_shows_it(cluster: None, tmp_path: Path) -> None:
    site = accepted(tmp_path)
    local = {each.name for each in site.findings if each.node in ("every node", "cell0", "cell1")}
    assert local == LOCAL
    between = {each.name: each for each in site.findings if not each.node}
    assert between.keys() == {
        "shared folder",
        "network",
        "clocks",
        "region tcp",
        "region nixl",
        "region mpi",
        "mpi world",
    }
    assert {each.state for each in between.values()} <= {State.OK}, between
    assert "2 ways" in between["network"].found
    assert "GB/s" in between["region tcp"].found
    assert "no RDMA device" in between["region nixl"].found and "GB/s" in between["region nixl"].found
    assert "steps joined" in between["region mpi"].found and "GB/s" in between["region mpi"].found
    assert site.transport == "mpi"
    assert {file.name for file in tmp_path.iterdir()} == {"job.log", "site.json"}
    findings = doctors(tmp_path)
    assert findings["slurm"].found.endswith("cluster gyre") and findings["slurm"].state is State.OK
    assert findings["partition debug"].found.startswith("2 nodes x 2 CPUs, 4096 MiB")
    assert findings["accounting"].state is State.WARNING
    assert f"{len(site.findings)} findings" in findings["accepted"].found


def doctors(folder: Path) -> dict[str, Finding]:
    command = [
        sys.executable,
        "-m",
        "gyre_hpc.cli",
        "doctor",
        "--json",
        "--root",
        folder,
        "--accepted",
        folder,
    ]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    findings = msgspec.json.decode(done.stdout, type=Site).findings
    return {finding.name: finding for finding in findings if not finding.node}
