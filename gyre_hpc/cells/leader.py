"""`python -m gyre_hpc.cells.leader --run RUN --cell I --incarnation K`: the leader process of one cell.

It joins the controller's link to the cell's engine process, trainer thread and region server. Heartbeats come from the
link's own thread. The process ends on Shutdown, on a signal (`notice`), when its link breaks (a successor of the controller starts
cells of its own), or on an error, which it reports with Goodbye; its engine ends with it in every case. After a broken link
nothing of it is left but the watchdog of its job (`launch.nodes.watchdog`).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from pathlib import Path

from gyre_hpc.cells.cell import Cell, EngineDied
from gyre_hpc.cells.engine_host import EngineHost, page_store
from gyre_hpc.cells.trainer_host import TrainerHost
from gyre_hpc.config import RunConfig, load_run_config
from gyre_hpc.errors import ConfigError, GyreError, PeerLost
from gyre_hpc.kv.port import PagePort
from gyre_hpc.kv.shared import shared_folder
from gyre_hpc.launch.address import settle_host
from gyre_hpc.launch.nodes import leftovers
from gyre_hpc.launch.nodes.health import check_node
from gyre_hpc.launch.nodes.scratch import process_scratch
from gyre_hpc.launch.nodes.watchdog import outlive, outlive_host
from gyre_hpc.layout import RunLayout
from gyre_hpc.records import CellId
from gyre_hpc.schedule.settings import standalone_cells
from gyre_hpc.transport.backends import region_server
from gyre_hpc.transport.hosts import node_name, whereabouts
from gyre_hpc.transport.links import Link, read_secret
from gyre_hpc.transport.messages import FromController, Goodbye, Hello, PeerKind, Shutdown
from gyre_hpc.transport.mpi.backend import MpiBackend
from gyre_hpc.transport.mpi.peer_side import make_peer_side
from gyre_hpc.transport.notice import heed_signals
from gyre_hpc.transport.region_files import make_owner_folder, remove_owner_folder
from gyre_hpc.transport.regions import run_key
from gyre_hpc.transport.rendezvous import engine_token

log = logging.getLogger("gyre_hpc.cells.leader")

Queue = asyncio.Queue[FromController | EngineDied]
ORPHANED = "the link to the controller is broken"


class Orphaned(PeerLost):
    """The link to the controller of `epoch` broke, and what this process owned is given up."""

    def __init__(self, epoch: int) -> None:
        super().__init__(ORPHANED)
        self.epoch = epoch


class Leader:
    """Everything one cell owns, from hello to goodbye."""

    def __init__(
        self,
        config: RunConfig,
        layout: RunLayout,
        cell: CellId,
        incarnation: int,
        link: Link,
        *,
        trains: bool = True,
    ) -> None:
        secret = read_secret(layout)
        self._link, self._cluster = link, config.cluster
        self._queue: Queue = asyncio.Queue()
        self._stop = asyncio.Event()
        run = run_key(secret)
        self._scratch = make_owner_folder(run, f"engine-{cell}", keep=0)
        store = page_store(config.engine, self._scratch, run)
        if store is not None and store.folder == shared_folder(config.engine, run):
            self._pages_held = leftovers.hold(store.folder, layout, anew=False)
        self._engine = EngineHost(
            config,
            layout,
            cell,
            incarnation,
            layout.logs(link.epoch),
            self._scratch,
            store=store,
        )
        self._engine.on_death = self._engine_died
        self._trainer, self._trains = TrainerHost(config, layout), trains
        self._mpi = make_peer_side(config, f"cell-{cell}", incarnation, link, secret)
        others = [] if self._mpi is None else [MpiBackend(f"cell-{cell}", self._mpi)]
        self._regions = region_server(config, f"cell-{cell}", secret, others=others)
        self.exit_code = 0
        """1 after an error, or the exit code of an error that a restart would only repeat."""
        self._cell = Cell(config, layout, link.send, self._engine, self._trainer, self._regions, cell)
        self._port: PagePort | None = None
        if store is not None:
            token = engine_token(secret)
            host, owner = config.cluster.host, f"cell-{cell}"
            self._port = PagePort(host, owner, token, store, self._regions, self._engine)

    async def run(self) -> str:
        """Serve until told to end ("") or unable to go on (the reason)."""
        heed_signals(self._cluster, lambda: self._link, self._stop.set)
        if self._mpi is not None:
            await self._mpi.start()
        await self._regions.start()
        if self._port is not None:
            await self._port.start()
            self._cell.port = self._port.address
        made = self._trainer.begin() if self._trains else None
        self._engine.begin(made if self._engine.shares_device else None)
        try:
            return await self._serve()
        finally:
            self._cell.end()
            self._trainer.close()
            await self._engine.stop()
            if self._mpi is not None:
                self._mpi.close()
            if self._port is not None:
                await self._port.close()
            self._regions.close()
            remove_owner_folder(self._scratch)

    async def _serve(self) -> str:
        tasks = [asyncio.create_task(work()) for work in (self._read, self._work, self._stopped)]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.wait(pending)
        reason = "; ".join(sorted(filter(None, (task.result() for task in done))))
        self.exit_code = self.exit_code or bool(reason)
        return reason

    async def _read(self) -> str:
        """Queue what the controller sends; ends with Shutdown or the link."""
        while (message := await self._link.receive()) is not None:
            if isinstance(message, Shutdown):
                log.info("shutdown: %s", message.reason)
                return ""
            if self._mpi is None or not self._mpi.told(message):
                self._queue.put_nowait(message)
        return ORPHANED

    async def _work(self) -> str:
        """Carry out one message after another; the process border of the cell's work."""
        while True:
            message = await self._queue.get()
            try:
                await self._cell.handle(message)
            except GyreError as error:
                log.error("%s in %s: %s", type(message).__name__, self._cell.role, error)
                self.exit_code = error.exit_code
                return str(error)
            except Exception as error:
                log.exception("%s in %s", type(message).__name__, self._cell.role)
                return f"{type(message).__name__}: {error}"

    async def _stopped(self) -> str:
        await self._stop.wait()
        log.info("asked to end by a signal")
        return ""

    def _engine_died(self, cause: str) -> None:
        if self._cell.engine_died(cause):
            self._queue.put_nowait(EngineDied(cause))


async def lead(layout: RunLayout, cell: CellId, incarnation: int, *, trains: bool = True) -> int:
    """One incarnation of a cell, from connecting to goodbye; returns its exit code (0 = ended as told)."""
    config = load_run_config(layout.root)
    check_node(config.cluster.health_probe)
    if config.cluster.cell.ranks != 1:
        raise ConfigError(
            f"cluster.cell.ranks={config.cluster.cell.ranks}: a cell has one trainer rank",
            fix="set cluster.cell.ranks=1",
        )
    settle_host(config.cluster, layout)
    trains = trains and cell not in standalone_cells(config.cluster.cells, config.cluster.standalone)
    hello = Hello(PeerKind.CELL, cell, os.getpid(), node_name(), "")
    link = await Link.connect(
        layout,
        hello,
        incarnation,
        heartbeat_s=config.transport.heartbeat_s,
        timeout_s=config.cluster.start_timeout_s,
    )
    leader = Leader(config, layout, cell, incarnation, link, trains=trains)
    reason = await leader.run()
    if reason:
        log.critical("cell %d ends: %s", cell, reason)
    link.send(Goodbye(reason))
    await link.close()
    if ORPHANED in reason:
        raise Orphaned(link.epoch)
    return leader.exit_code


def main(argv: list[str] | None = None) -> int:
    """Entry point of the leader process; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m gyre_hpc.cells.leader", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="run folder")
    parser.add_argument("--cell", type=int, required=True, help="index of the cell in the launch plan")
    parser.add_argument("--incarnation", type=int, required=True, help="number of this start, growing")
    parser.add_argument(
        "--rollout-only", action="store_true", help="make no trainer: it will never be asked for"
    )
    parser.add_argument("--guest", action="store_true", help="a cell host started it, not the controller")
    args = parser.parse_args(argv)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    logging.getLogger("megatron").setLevel(logging.WARNING)
    layout = RunLayout(args.run.absolute())
    log.info("cell-%d %s", args.cell, whereabouts())
    try:
        with process_scratch(args.run, f"cell-{args.cell}"):
            return asyncio.run(
                lead(layout, CellId(args.cell), args.incarnation, trains=not args.rollout_only)
            )
    except Orphaned as orphaned:
        watch = outlive_host if args.guest else outlive
        watch(layout, load_run_config(layout.root).cluster, orphaned.epoch)
        return orphaned.exit_code
    except GyreError as error:
        log.critical("%s", error)
        return error.exit_code


if __name__ == "__main__":
    # A trainer thread in the middle of a micro-step must not delay the end of a cell whose claims return anyway.
    code = main()
    logging.shutdown()
    os._exit(code)
