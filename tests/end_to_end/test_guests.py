"""Cells of a host that comes to a live run, serves, trains and vanishes; real processes, no Slurm."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gyre_hpc.controller.journal.entries import GuestsJoined
from gyre_hpc.report import metrics as m
from gyre_hpc.schedule import protocol as p
from tests.end_to_end.agreement import check_agreement
from tests.end_to_end.conftest import Start
from tests.end_to_end.runs import LIMIT_S, Plan, Run, gyre, refused
from tests.end_to_end.test_kills import phase, recent_calls

Host = subprocess.Popen[bytes]
Welcome = Callable[..., Host]
HELD = range(4, 8)
"""Executions of the second group: they keep the first burst open."""


@pytest.fixture
def welcome(tmp_path: Path) -> Iterator[Welcome]:
    """Start `gyre cells host` with these arguments for a run whose controller is up."""
    hosts: list[Host] = []

    def begin(run: Run, *arguments: str) -> Host:
        run.until("a controller", lambda: run.layout.rendezvous.exists())
        with (tmp_path / f"host-{len(hosts)}.log").open("ab") as out:
            hosts.append(gyre("cells", "host", str(run.folder), *arguments, out=out))
        return hosts[-1]

    yield begin
    for host in hosts:
        host.kill()
        host.wait()


def joined(run: Run, kind: p.CellKind) -> tuple[int, ...]:
    """Cells of this kind that joined last."""
    of_kind = run.until(f"{kind} guests", lambda: [it for it in run.entries(GuestsJoined) if it.kind is kind])
    return of_kind[-1].cells


def until_it_serves(run: Run, cell: int) -> None:
    run.until(f"cell {cell} to serve", lambda: any(it.cell == cell for it in run.events(p.CellAdded)))


def until_lost(run: Run, cell: int) -> None:
    run.until(f"the loss of cell {cell}", lambda: any(it.cell == cell for it in run.events(p.CellLost)))


def check_finished(run: Run) -> None:
    assert sorted(run.outcomes()) == list(range(16)) and run.versions() == [1, 2]
    assert run.summary()["steps"] == 2 and run.summary()["calls_lost"] == 0
    assert run.summary()["executions"] == {"completed": 16}
    check_agreement(run)


def test_guests_serve_and_train_and_the_run_goes_on_when_they_vanish(
    start: Start, welcome: Welcome, tmp_path: Path
) -> None:
    """One host is killed while its cell trains, the other is told to end while its cell serves; no restart is spent."""
    plan = Plan(tmp_path / "plan", hold=HELD)
    run = start(*plan.overrides, "cluster.restarts=0", "trainer.tokens_per_s=40")
    trains, serves = welcome(run, "--cells=1"), welcome(run, "--cells=1", "--rollout-only")
    (satellite,), (server,) = joined(run, p.CellKind.SATELLITE), joined(run, p.CellKind.ROLLOUT)
    assert {satellite, server} == {2, 3}
    run.until_metric(m.Join, lambda line: line.cell == satellite)
    run.until("the guest at work", lambda: phase(run, satellite) == "training")
    trains.kill()
    until_lost(run, satellite)
    until_it_serves(run, server)
    serves.send_signal(signal.SIGTERM)
    assert serves.wait(LIMIT_S) == 0
    until_lost(run, server)
    plan.release()
    run.finish()
    check_finished(run)
    assert {line.cell for line in run.metrics(m.Join)} == {0, 1, satellite}
    gone = {line.cell for line in run.metrics(m.RoleChange) if line.role == m.GONE}
    assert gone == {satellite, server}


def test_a_guest_that_leaves_has_its_calls_moved_and_is_never_trained_again(
    start: Start, welcome: Welcome, tmp_path: Path
) -> None:
    plan = Plan(tmp_path / "plan", calls=3, max_tokens=24, hold=[7])
    run = start(*plan.overrides, "engine.tokens_per_s=30", "gateway.drain_s=0.2", "cluster.restarts=0")
    host = welcome(run, "--cells=2")
    cells = joined(run, p.CellKind.SATELLITE)
    for cell in cells:
        until_it_serves(run, cell)
    run.until("calls under way", lambda: sum(call.finished is None for call in recent_calls(run)) >= 4)
    host.send_signal(signal.SIGUSR2)
    assert host.wait(LIMIT_S) == 0
    for cell in cells:
        until_lost(run, cell)
    plan.release()
    run.finish()
    check_finished(run)
    assert not [line for line in run.metrics(m.Fault) if "cell" in line.who]


def test_a_host_outlives_a_controller_and_gives_fresh_cells_to_the_next(
    start: Start, welcome: Welcome, tmp_path: Path
) -> None:
    plan = Plan(tmp_path / "plan", hold=HELD)
    run = start(*plan.overrides)
    host = welcome(run, "--cells=1")
    until_it_serves(run, 2)
    run.kill()
    run.resume()
    until_it_serves(run, 3)
    assert host.poll() is None
    assert [entry.cells for entry in run.entries(GuestsJoined)] == [(2,), (3,)]
    plan.release()
    run.finish()
    check_finished(run)
    assert host.wait(LIMIT_S) == 0, "it ends with the run"
    log = (run.layout.logs(2) / "controller.log").read_text()
    assert "does not say that it has ended" not in log


def test_what_cannot_join_is_refused_with_what_to_do(start: Start, tmp_path: Path) -> None:
    plan = Plan(tmp_path / "plan", hold=[0])
    run = start(*plan.overrides, "cluster.orphan_grace_s=2")
    run.until("a controller", lambda: run.layout.rendezvous.exists())
    add, host = ["cells", "add", str(run.folder)], ["cells", "host", str(run.folder)]
    assert "--cells=0: nothing would join" in refused(*host, "--cells=0")[1]
    assert "gyre cells host RUN" in refused(*add, "--cells=1", "--partition=preempt")[1]
    assert "not a run folder" in refused("cells", "list", str(tmp_path))[1]
    copy = tmp_path / "copy"
    shutil.copytree(run.folder, copy, ignore=shutil.ignore_patterns("executions", "logs"))
    (copy / "secret").write_text("00" * 32)
    assert "does not know the run's secret" in refused("cells", "host", str(copy), "--cells=1")[1]
    rendezvous = json.loads(run.layout.rendezvous.read_text()) | {"port": 1}
    (copy / "controller.json").write_text(json.dumps(rendezvous))
    assert "no controller welcomed" in refused("cells", "host", str(copy), "--cells=1")[1]
    run.end()
    assert "no controller of this run is alive" in refused(*host, "--cells=1")[1]
