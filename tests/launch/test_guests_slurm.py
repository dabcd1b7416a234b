"""Cells of a second, preemptible job in a run on a real Slurm: they join, are preempted, cancelled, or asked back."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre_hpc.controller.journal.entries import GuestsJoined, Happened
from gyre_hpc.controller.journal.journal import read_journal
from gyre_hpc.layout import RunLayout
from gyre_hpc.schedule.protocol import CellAdded, CellKind, CellLost
from tests.end_to_end.runs import SMALL, Plan
from tests.launch.cluster import PATIENCE_S, dev_cluster, running_cluster, squeue
from tests.launch.slurm_runs import completed, gyre, state, submitted, until

pytestmark = [pytest.mark.slurm, pytest.mark.root, pytest.mark.timeout(1200)]

HELD = range(4, 8)
"""Executions of the second group: the run goes on until they are released."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with running_cluster("guests", nodes=4, cpus=4, gpus=0, port=18040):
        yield


class LiveRun:
    """A run of two cells that goes on until its plan is released."""

    def __init__(self, folder: Path, *more: str) -> None:
        self.plan = Plan(folder / "plan", hold=HELD)
        keys = [*SMALL, "cluster=devcluster", f"root={folder}/runs", "trainer.tokens_per_s=40", *more]
        self.job, self.run = submitted(*keys, *self.plan.overrides)
        self.layout = RunLayout(self.run)
        until("the controller", lambda: self.layout.rendezvous.exists())

    def add(self, *arguments: str) -> str:
        """The job of the guests."""
        told = gyre("cells", "add", str(self.run), "--partition=preempt", "--time=00:20:00", *arguments)
        return told.split()[1]

    def events(self) -> list[object]:
        return [it.event for it in read_journal(self.layout.journal) if isinstance(it, Happened)]

    def cells_of(self, job: str) -> list[tuple[int, ...]]:
        """Ids given to the hosts of this job, one tuple for each."""
        entries = read_journal(self.layout.journal)
        return [entry.cells for entry in entries if isinstance(entry, GuestsJoined) and entry.job == job]

    def until_they_serve(self, job: str, hosts: int = 1) -> tuple[int, ...]:
        until(f"host {hosts} of job {job}", lambda: len(self.cells_of(job)) == hosts)
        cells = self.cells_of(job)[-1]
        until(f"cells {cells} to serve", lambda: set(cells) <= self.of(CellAdded))
        return cells

    def until_lost(self, cells: tuple[int, ...]) -> None:
        until(f"the loss of cells {cells}", lambda: set(cells) <= self.of(CellLost))

    def of(self, kind: type) -> set[int]:
        return {event.cell for event in self.events() if isinstance(event, kind)}  # type: ignore[attr-defined]

    def finish(self) -> None:
        self.plan.release()
        until("the end of the job", lambda: completed(self.job, self.run))
        summary = json.loads(self.layout.summary.read_text())
        assert (summary["steps"], summary["calls_lost"]) == (2, 0)


def test_guests_of_a_preempted_job_are_lost_and_the_run_goes_on(cluster: None, tmp_path: Path) -> None:
    live = LiveRun(tmp_path)
    job = live.add("--cells=2")
    cells = live.until_they_serve(job)
    assert cells == (2, 3)
    listed = gyre("cells", "list", str(live.run)).splitlines()
    assert len(listed) == 4 and f"job {job} on " in listed[3] and "satellite" in listed[3]
    urgent = subprocess.check_output(
        ["sbatch", "--parsable", "-p", "debug", "-N2", "--exclusive", "-o", "/dev/null", "--wrap=sleep 600"],
        text=True,
    ).strip()
    until("the urgent job", lambda: state(urgent) == "RUNNING", PATIENCE_S)
    live.until_lost(cells)
    subprocess.run(["scancel", urgent], check=True)
    live.finish()
    assert len(live.cells_of(job)) == 1 and state(job) not in ("PENDING", "RUNNING"), "it is not queued again"


@pytest.mark.full
def test_a_host_comes_back_when_asked_to_and_a_cancelled_one_does_not(cluster: None, tmp_path: Path) -> None:
    """The first serves only and is given back to the queue at a signal; the second is cancelled while its cell trains."""
    live = LiveRun(tmp_path)
    serving = live.add("--cells=1", "--rollout-only", "--requeue")
    first = live.until_they_serve(serving)
    training = live.add("--cells=1")
    guest = live.until_they_serve(training)
    subprocess.run(["scancel", "--batch", "--signal=USR2", serving], check=True)
    live.until_lost(first)
    again = live.until_they_serve(serving, hosts=2)
    assert not set(again) & {*first, *guest}
    subprocess.run(["scancel", training], check=True)
    live.until_lost(guest)
    live.finish()
    kinds = {event.cell: event.kind for event in live.events() if isinstance(event, CellAdded)}
    assert kinds == {first[0]: CellKind.ROLLOUT, again[0]: CellKind.ROLLOUT, guest[0]: CellKind.SATELLITE}
    until("the end of the host", lambda: state(serving) == "COMPLETED", PATIENCE_S)


@pytest.mark.full
@pytest.mark.parametrize("again", [False, True])
def test_a_guest_job_that_loses_its_batch_host_is_freed_by_its_other_cells(
    cluster: None, tmp_path: Path, again: bool
) -> None:
    """Slurm would leave it with its nodes and without a process until its time limit."""
    live = LiveRun(
        tmp_path, "cluster.orphan_grace_s=10", "cluster.suspect_after_s=5", "cluster.lost_after_s=5"
    )
    job = live.add("--cells=2", *["--requeue"] * again)
    cells = live.until_they_serve(job)
    lost = squeue(job, "%B").split()[0]
    assert squeue(job, "%D") == "2"
    dev_cluster("kill-node", lost)
    live.until_lost(cells)
    if again:
        until("its requeue", lambda: state(job) == "PENDING", 3 * PATIENCE_S)
        dev_cluster("up")
        assert not set(live.until_they_serve(job, hosts=2)) & set(cells)
        orphans = "".join(path.read_text() for path in live.layout.logs(1).glob("orphan-*.log"))
        assert f"lost the batch host {lost}" in orphans and f"job {job} is requeued" in orphans
    else:
        until("the end of the guests' job", lambda: state(job) == "CANCELLED", 3 * PATIENCE_S)
        dev_cluster("up")
    live.finish()
