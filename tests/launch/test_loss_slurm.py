"""Nodes of a run that are lost, on a real Slurm of four nodes: a cell's, the core's, a service's, the batch host."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre_hpc.controller.journal.entries import StepTaken
from gyre_hpc.controller.journal.journal import read_journal
from gyre_hpc.launch.nodes.bad_nodes import read_bad_nodes
from gyre_hpc.layout import RunLayout
from gyre_hpc.report.metrics import Restored, read_metrics
from tests.launch.cluster import PATIENCE_S, dev_cluster, running_cluster, squeue
from tests.launch.slurm_runs import gyre, state, until

pytestmark = [pytest.mark.slurm, pytest.mark.root, pytest.mark.timeout(1200)]

SMALL = (
    "experiment=quickstart",
    "cluster=devcluster",
    "schedule.batch_groups=2",
    "schedule.executions_per_group=4",
    "tasks.heldout=0",
    "trust_tasks=true",
    "cluster.lost_after_s=5",
)
NODES = 4


@pytest.fixture(scope="module")
def site() -> Iterator[None]:
    with running_cluster("loss", nodes=NODES, cpus=4, gpus=2, port=18100):
        yield


@pytest.fixture
def cluster(site: None) -> Iterator[None]:
    """Every node up, whatever the test before has lost."""
    dev_cluster("up")
    yield
    subprocess.run(["scancel", "-u", "root"], check=True)


class Run:
    """A run that was submitted, as a person sees it. All waits are bounded."""

    def __init__(self, *arguments: str) -> None:
        told = dict(line.split(maxsplit=1) for line in gyre("submit", *SMALL, *arguments).splitlines()[:4])
        self.job, self.root = told["job"], Path(told["run"])
        self.layout = RunLayout(self.root)

    @property
    def told(self) -> str:
        log = self.root / "jobs" / f"{self.job}.log"
        return log.read_text() if log.exists() else ""

    @property
    def state(self) -> str:
        return state(self.job)

    def step(self) -> int:
        return max(map(int, re.findall(r"^step +(\d+)/", self.told, re.MULTILINE)), default=0)

    def nodes(self, process: str, attempt: int = 1) -> list[str]:
        """Where the process was started, first to last."""
        log = (self.layout.logs(attempt) / "controller.log").read_text()
        return re.findall(rf"launch\.slurm: {process}: srun .*?--nodelist=(\w+)", log)

    def batch_host(self) -> str:
        return squeue(self.job, "%B").split()[0]

    def until_step(self, step: int) -> None:
        until(f"step {step}", lambda: self.step() >= step or self.failed())

    def until_told(self, words: str) -> None:
        until(f"'{words}'", lambda: words in self.told or self.failed())

    def failed(self) -> bool:
        assert self.state not in ("FAILED", "NODE_FAIL", "TIMEOUT", "CANCELLED"), self.told
        return False

    def until_completed(self) -> None:
        until("the end of the job", lambda: self.failed() or self.state == "COMPLETED")

    def steps_taken(self) -> int:
        return int(json.loads(self.layout.summary.read_text())["steps"])


def test_a_run_goes_on_with_fewer_cells_when_a_node_is_lost_and_does_not_get_it_again(
    cluster: None, tmp_path: Path
) -> None:
    """No restart is spent on it. The gateway is on it, so no step is taken until it is started elsewhere."""
    run = Run(f"root={tmp_path}", "schedule.steps=4", "cluster.restarts=0")
    run.until_step(1)
    (lost,) = run.nodes("gateway-0")
    assert lost != run.batch_host()
    cell = next(cell for cell in ("cell-0", "cell-1") if run.nodes(cell) == [lost])
    dev_cluster("kill-node", lost)
    run.until_told(f"{cell}: lost on {lost}; no node left has room for it: the run goes on with 1 of 2 cells")
    run.until_completed()
    assert run.steps_taken() == 4 and run.nodes(cell) == [lost]
    assert "no node left has room for it: the run goes on with 1 of 2" in run.layout.report.read_text()
    assert [bad.node for bad in read_bad_nodes(run.layout, time.time())] == [lost]
    assert f"--exclude={lost}\n" in gyre("submit", f"resume={run.root}", "--dry-run")
    log = (run.layout.logs(1) / f"{cell}.log").read_text()
    assert re.search(rf"{cell} node={lost} pid=\d+ job={run.job} step=\d+", log)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["flat", "het"])
def test_a_lost_batch_host_frees_the_job_which_starts_again_elsewhere_and_goes_on(
    cluster: None, tmp_path: Path, layout: str
) -> None:
    """Slurm would leave it running without its controller for ever. Bound: orphan_grace_s or Slurm's own notice."""
    size = ["cluster.cells=1"] if layout == "het" else []
    run = Run(
        f"root={tmp_path}",
        "schedule.steps=4",
        "cluster.orphan_grace_s=10",
        f"cluster.layout={layout}",
        *size,
    )
    run.until_step(1)
    lost = run.batch_host()
    dev_cluster("kill-node", lost)
    until("the second start", lambda: (run.root / "owner.2").exists(), 3 * PATIENCE_S)
    run.until_completed()
    assert run.steps_taken() == 4
    orphans = "".join(path.read_text() for path in run.layout.logs(1).glob("orphan-*.log"))
    assert f"Slurm has lost the batch host {lost}" in orphans and f"job {run.job} is requeued" in orphans
    assert lost not in run.nodes("cell-0", attempt=2)


@pytest.mark.full
def test_a_job_that_may_not_be_requeued_is_cancelled_by_its_orphans(cluster: None, tmp_path: Path) -> None:
    run = Run(
        f"root={tmp_path}", "schedule.steps=500", "cluster.orphan_grace_s=10", "cluster.job.requeue=false"
    )
    run.until_step(1)
    dev_cluster("kill-node", run.batch_host())
    until("its end", lambda: run.state == "CANCELLED", 3 * PATIENCE_S)


@pytest.mark.full
def test_without_the_node_of_its_core_a_run_goes_on_from_the_checkpoint_and_versions_upward(
    cluster: None, tmp_path: Path
) -> None:
    """Steps since the checkpoint are void: their numbers are not used again, and the run makes up for them."""
    run = Run(f"root={tmp_path}", "schedule.steps=10", "cluster.cells=3", "trainer.checkpoint_every=8")
    run.until_step(2)
    (lost,) = run.nodes("cell-0")
    assert lost != run.batch_host()
    dev_cluster("kill-node", lost)
    run.until_told("the run goes on with 2 of 3 cells")
    run.until_completed()
    assert run.nodes("cell-0") == [lost]
    restored = [line.version for line in read_metrics(run.layout.metrics) if isinstance(line, Restored)]
    assert restored == [0]
    versions = [entry.version for entry in read_journal(run.layout.journal) if isinstance(entry, StepTaken)]
    assert versions == list(range(1, len(versions) + 1)) and len(versions) >= 12
    assert run.steps_taken() == 10


@pytest.mark.full
def test_a_cell_whose_step_is_cancelled_joins_again(cluster: None, tmp_path: Path) -> None:
    run = Run(f"root={tmp_path}", "schedule.steps=500")
    run.until_step(1)
    (step,) = re.findall(r"(\S+) cell-1\.", squeue(run.job, "%i %j", "-s"))
    subprocess.run(["scancel", step], check=True)
    until("its second start", lambda: len(run.nodes("cell-1")) == 2)
    log = run.layout.logs(1) / "controller.log"
    again = "cell-1: lost -> starting"
    until(
        "its return",
        lambda: "cell-1: loading -> rollout" in log.read_text().partition(again)[2] or run.failed(),
    )
    run.until_step(run.step() + 2)
    assert not read_bad_nodes(run.layout, 0.0)


@pytest.mark.full
def test_heartbeats_notice_a_dead_node_before_slurm_does(cluster: None, tmp_path: Path) -> None:
    """Slurm waits 300 s at many sites: srun hangs, and the node looks well."""
    conf = Path(os.environ["SLURM_CONF"])
    conf.write_text(conf.read_text().replace("SlurmdTimeout=10", "SlurmdTimeout=300"))
    subprocess.run(["scontrol", "reconfigure"], check=True)
    try:
        run = Run(f"root={tmp_path}", "schedule.steps=500", "cluster.restarts=0")
        run.until_step(1)
        batch = run.batch_host()
        lost = next(node for cell in ("cell-0", "cell-1") for node in run.nodes(cell) if node != batch)
        dev_cluster("kill-node", lost)
        run.until_told(f"lost on {lost}; no node left has room for it")
        assert lost in squeue(run.job, "%N") or "[" in squeue(run.job, "%N"), "Slurm does not know yet"
        reached = run.step()
        run.until_step(reached + 2)
    finally:
        conf.write_text(conf.read_text().replace("SlurmdTimeout=300", "SlurmdTimeout=10"))
        subprocess.run(["scontrol", "reconfigure"], check=True)


@pytest.mark.full
def test_a_het_run_moves_its_services_off_a_lost_service_node(cluster: None, tmp_path: Path) -> None:
    """Calls under way there are lost, their executions repeated."""
    run = Run(f"root={tmp_path}", "schedule.steps=8", "cluster.layout=het", "cluster.cells=2")
    run.until_step(1)
    batch = run.batch_host()
    (lost,) = {*run.nodes("gateway-0"), *run.nodes("runner-0"), *run.nodes("processor-0")} - {batch}
    dev_cluster("kill-node", lost)
    run.until_told(f"node {lost}: bad: lost")
    run.until_completed()
    assert run.steps_taken() == 8
    moved = [name for name in ("gateway-0", "runner-0", "processor-0") if run.nodes(name)[0] == lost]
    assert moved and all(run.nodes(name)[-1] == batch for name in moved)
