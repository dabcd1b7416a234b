"""A sweep on a real Slurm: one point runs to its end, the job of the other fails and is submitted again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch.cluster import running_cluster
from tests.launch.slurm_runs import gyre, until

pytestmark = [pytest.mark.slurm, pytest.mark.root, pytest.mark.full, pytest.mark.timeout(900)]

SWEEP = (
    "train",
    "--multirun",
    "hydra/launcher=gyre_slurm",
    "experiment=quickstart",
    "cluster=devcluster",
    "schedule.steps=1",
    "schedule.batch_groups=2",
    "schedule.executions_per_group=4",
    "tasks.heldout=0",
    "trust_tasks=true",
    "cluster.job.setup=['true'],['exit 3']",
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with running_cluster("sweep", nodes=4, cpus=4, gpus=2, port=17720):
        yield


def points(what: str, folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gyre("sweep", what, str(folder), "--json").splitlines()]


def states(folder: Path) -> list[str]:
    return [point["state"] for point in points("status", folder)]


def test_a_point_that_fails_holds_up_no_other_and_is_submitted_again_when_asked(
    cluster: None, tmp_path: Path
) -> None:
    folder = tmp_path / "sweep"
    command = [*SWEEP, f"root={tmp_path}/runs", f"hydra.sweep.dir={folder}"]
    assert "2 of 2 points have a job" in gyre(*command)
    until("the failure", lambda: states(folder)[1] == "FAILED")
    failed = points("status", folder)[1]["job"]
    gyre(*command, "hydra.launcher.retry_failed=true")
    good, again = points("status", folder)
    assert again["job"] != failed and good["state"] in ("PENDING", "RUNNING", "COMPLETED")
    until("the end of both", lambda: states(folder) == ["COMPLETED", "FAILED"])
    good, bad = points("collect", folder)
    assert good["summary"]["steps"] == good["steps_asked"] == 1
    assert bad["summary"] is None and "no summary.json" in bad["missing"]
    assert len(list((tmp_path / "runs").iterdir())) == 2
