"""The watchdog of a job without its controller: when it waits, when it leaves, when it hands the job back."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_hpc.config import ModelConfig, RunConfig, save_run_config
from gyre_hpc.config_cluster import ClusterConfig
from gyre_hpc.launch.nodes import bad_nodes, watchdog
from gyre_hpc.launch.nodes.watchdog import ALIVE, JobNow, Verdict, judge, outlive, outlive_host
from gyre_hpc.launch.owner import acquire
from gyre_hpc.layout import RunLayout

hosts = st.sampled_from(["n0", "n1", "n2", "n/a"])
jobs = st.builds(
    JobNow,
    st.sampled_from(["RUNNING", "PENDING", "COMPLETING", "FAILED", "forgotten by Slurm"]),
    st.integers(0, 3),
    hosts,
    st.frozensets(hosts, max_size=3),
)


@given(st.none() | jobs, st.integers(0, 3), st.booleans(), st.booleans())
def test_a_job_is_freed_only_when_slurm_itself_has_lost_its_batch_host(
    job: JobNow | None, restarts: int, over: bool, superseded: bool
) -> None:
    verdict, why = judge(job, restarts, over=over, superseded=superseded)
    assert why
    orphaned = (
        job is not None
        and job.state in ALIVE
        and job.restarts <= restarts
        and job.batch_host not in job.nodes
    )
    assert (verdict is Verdict.FREE) == (orphaned and over and not superseded)
    assert (verdict is Verdict.LEAVE) >= superseded
    if job is None and not superseded:
        assert verdict is Verdict.WAIT, "what Slurm does not say is no end"


class Site:
    """A run whose controller was batch process of job 77, and commands that say and do what the test wants."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bin, self.layout = tmp_path / "bin", RunLayout(tmp_path / "run")
        self.layout.logs(1).mkdir(parents=True)
        self.bin.mkdir()
        self.cluster = ClusterConfig(kind="slurm", orphan_grace_s=0.0)
        save_run_config(RunConfig(model=ModelConfig(path="m"), cluster=self.cluster), self.layout.root)
        monkeypatch.setenv("PATH", f"{self.bin}:/usr/bin:/bin")
        monkeypatch.setenv("SLURM_JOB_ID", "77")
        monkeypatch.setattr(watchdog, "LOOK_S", 0.01)
        acquire(self.layout.root)
        self.says("RUNNING 0 n0 n[1-2]")
        self.command(
            "scontrol", 'if [ "$1" = show ]; then printf "n1\\nn2\\n"; else echo "scontrol $*" >> did; fi'
        )
        self.command("scancel", 'echo "scancel $*" >> did')
        monkeypatch.chdir(tmp_path)
        self.did_path = tmp_path / "did"

    def says(self, line: str) -> None:
        self.command("squeue", f'echo "{line}"')

    def command(self, name: str, body: str) -> None:
        (self.bin / name).write_text(f"#!/bin/bash\n{body}\n")
        (self.bin / name).chmod(0o755)

    def did(self) -> list[str]:
        return self.did_path.read_text().splitlines() if self.did_path.exists() else []

    def outlive(self) -> None:
        outlive(self.layout, self.cluster, 1)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """What `outlive` changes in its process, which ends soon after, is put back."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before, handlers = [signal.getsignal(number) for number in numbers], logging.getLogger().handlers[:]
    yield Site(tmp_path, monkeypatch)
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
    logging.getLogger().handlers[:] = handlers


def test_an_orphan_requeues_its_job_and_says_so_beside_the_log_that_is_gone(site: Site) -> None:
    site.outlive()
    assert site.did() == ["scontrol requeue 77", "scontrol update JobId=77 ExcNodeList=n0"]
    (log,) = site.layout.logs(1).glob("orphan-*.log")
    assert "lost the batch host n0" in log.read_text() and "job 77 is requeued" in log.read_text()


def test_bad_nodes_are_excluded_as_soon_as_slurm_takes_it(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bad_nodes, "AGAIN_S", 0.01)
    site.command(
        "scontrol",
        'if [ "$1" = show ]; then printf "n1\\nn2\\n"; exit; fi\n'
        'echo "$1" >> did; [ "$1" = requeue ] || [ "$(grep -c update did)" = 3 ] || { echo "try again in a bit" >&2; exit 1; }',
    )
    site.outlive()
    assert site.did() == ["requeue", "update", "update", "update"]
    assert [bad.node for bad in bad_nodes.read_bad_nodes(site.layout, time.time())] == ["n0"]


def test_a_job_that_may_not_be_requeued_is_cancelled(site: Site) -> None:
    site.cluster.job.requeue = False
    site.outlive()
    assert site.did() == ["scancel 77"]


def test_a_job_whose_requeue_is_refused_is_cancelled_unless_another_orphan_was_faster(site: Site) -> None:
    refused = 'if [ "$1" = show ]; then printf "n1\\nn2\\n"; else exit 1; fi'
    site.command("scontrol", refused)
    site.outlive()
    assert site.did() == ["scancel 77"]
    site.did_path.unlink()
    site.command(
        "squeue", 'if [ -e asked ]; then echo "PENDING 1 n/a"; else touch asked; echo "RUNNING 0 n0 x"; fi'
    )
    site.outlive()
    assert site.did() == []


@pytest.mark.parametrize("line", ["PENDING 1 n/a", "RUNNING 1 n1 n[1-2]", "COMPLETING 0 n0 n[1-2]", ""])
def test_a_job_that_has_ended_or_started_again_is_left(site: Site, line: str) -> None:
    site.says(line)
    site.outlive()
    assert site.did() == []


def test_a_run_with_a_newer_controller_or_one_that_is_done_is_left(site: Site) -> None:
    acquire(site.layout.root, force=True)
    site.outlive()
    outlive(site.layout, site.cluster, 2, waited_s=1.0)
    site.layout.summary.write_text("{}")
    os.utime(site.layout.summary, (time.time() + 5,) * 2)
    before = site.did()
    outlive(site.layout, site.cluster, 2)
    assert before[0] == "scontrol requeue 77" and site.did() == before


def test_a_controller_that_takes_the_run_over_during_the_grace_keeps_its_job(site: Site) -> None:
    site.cluster.orphan_grace_s = 0.5
    threading.Timer(0.1, acquire, (site.layout.root,), {"force": True}).start()
    site.outlive()
    assert site.did() == []


def test_outside_the_controllers_job_and_outside_slurm_nobody_is_freed(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "78")
    site.outlive()
    monkeypatch.setenv("SLURM_HET_JOB_ID", "77")
    outlive(site.layout, ClusterConfig(kind="local"), 1)
    assert site.did() == []
    site.outlive()
    assert site.did()[0] == "scontrol requeue 77"


@pytest.mark.parametrize("requeue", [True, False])
def test_a_guest_frees_the_job_it_is_a_step_of_whoever_owns_the_run(
    site: Site, monkeypatch: pytest.MonkeyPatch, requeue: bool
) -> None:
    """Asked of Slurm: that job may have been submitted with --requeue or without, whatever the run's own was."""
    monkeypatch.setenv("SLURM_JOB_ID", "78")
    acquire(site.layout.root, force=True)
    site.says("RUNNING 2 n0 n[1-2]")
    shown = f"JobId=78 JobState=RUNNING Requeue={int(requeue)} Restarts=2"
    site.command(
        "scontrol",
        f'if [ "$2" = job ]; then echo "{shown}"; elif [ "$1" = show ]; then echo n1; else echo "scontrol $*" >> did; fi',
    )
    outlive_host(site.layout, site.cluster, 1)
    assert site.did() == ["scontrol requeue 78" if requeue else "scancel 78"]
    assert [bad.node for bad in bad_nodes.read_bad_nodes(site.layout, time.time())] == ["n0"]


def test_a_guest_whose_batch_host_is_well_waits_for_it_and_one_without_a_job_ends(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.says("RUNNING 0 n1 n[1-2]")
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    began = time.monotonic()
    outlive_host(site.layout, site.cluster, 1)
    assert time.monotonic() - began >= 0.25
    monkeypatch.delenv("SLURM_JOB_ID")
    outlive_host(site.layout, site.cluster, 1)
    assert site.did() == []


def test_a_signal_ends_the_wait_for_a_batch_host_that_slurm_calls_well(site: Site) -> None:
    site.says("RUNNING 0 n1 n[1-2]")
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    site.outlive()
    assert site.did() == []


def test_a_process_that_alone_is_cut_off_ends_and_leaves_the_job_to_its_controller(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "WELL_S", 0.2)
    site.says("RUNNING 0 n1 n[1-2]")
    site.outlive()
    assert site.did() == []


def test_processes_of_a_large_job_ask_seldom(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    class Ending(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            return len(waits) > 20

    monkeypatch.setattr(watchdog, "LOOK_S", 5.0)
    monkeypatch.setattr(watchdog.threading, "Event", Ending)
    nodes = frozenset(f"n{index}" for index in range(512))
    monkeypatch.setattr(watchdog, "job_now", lambda job: JobNow("RUNNING", 0, "n1", nodes))
    site.outlive()
    assert waits[0] <= 5.0 and min(waits[1:]) >= 30.0 and len(set(waits[1:])) > 1


def test_where_slurms_commands_are_absent_nothing_is_done(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("squeue", "scontrol", "scancel"):
        (site.bin / name).unlink()
    monkeypatch.setenv("PATH", str(site.bin))
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    site.outlive()
    assert site.did() == []
