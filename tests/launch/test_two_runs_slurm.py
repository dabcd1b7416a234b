"""Two runs side by side on one node of a real Slurm: neither meets the other, and nothing of either is left behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre_hpc.layout import RunLayout
from gyre_hpc.transport.region_files import run_folder
from gyre_hpc.transport.regions import run_key
from gyre_hpc.transport.rendezvous import read_secret
from tests.launch.cluster import running_cluster
from tests.launch.slurm_runs import SMALL, completed, state, steps_taken, submitted, until

pytestmark = [pytest.mark.slurm, pytest.mark.root, pytest.mark.full, pytest.mark.timeout(1200)]
NODE = "cluster.job.sbatch=['--nodelist=cell0']"


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with running_cluster("two", nodes=1, cpus=8, gpus=0, port=18136):
        yield


def test_two_runs_on_one_node_leave_each_other_alone_and_nothing_behind(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "node"
    scratch.mkdir()
    keys = [*SMALL, NODE, "cluster.cells=1", "cluster.cell.mem=1G", "cluster.job.service_mem=1G"]
    keys += [f"cluster.service.{name}.mem=256M" for name in ("controller", "gateway", "runner", "processor")]
    keys += [f"root={tmp_path}/runs", f"cluster.scratch={scratch}"]
    jobs = [submitted(*keys, f"name={name}") for name in ("one", "two")]
    until("both at once", lambda: [state(job) for job, _ in jobs] == ["RUNNING"] * 2)
    until("folders of both", lambda: len(list(scratch.iterdir())) == 2)
    for job, run in jobs:
        until(f"the end of {run.name}", lambda job=job, run=run: completed(job, run))  # type: ignore[misc]
        assert steps_taken(run) == 2
        assert not run_folder(run_key(read_secret(RunLayout(run)))).exists()
    assert list(scratch.iterdir()) == []
