"""Which cell serves a call, and what happens to calls when a cell leaves.

`RouteTable` is the pure core: cells, loads, choice. `Router` is the shell: calls wait in `acquire` while no cell is
routable (publication, switching), hold a `Lease` while an engine samples for them, and are told through the lease
when they must leave. A cell that failed once gets no call until the controller routes it again. A cell is routed by
`Route` only; nothing here probes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gyre_hpc.engines.wire import EncodedIds
from gyre_hpc.records import CellId, Version
from gyre_hpc.transport.messages import StepName

log = logging.getLogger(__name__)

CUT_S = 30.0
"""Seconds a call that was told to leave may take; the cell counts as left after that."""


class Chunk(Protocol):
    """Tokens sampled since the last chunk (engines.client.Chunk)."""

    @property
    def ids(self) -> list[int]: ...
    @property
    def logprobs(self) -> list[float]: ...
    @property
    def versions(self) -> list[Version]: ...
    @property
    def finish(self) -> str | None: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def prompt_xxh3(self) -> str: ...


class Engine(Protocol):
    """The part of engines.client.EngineClient that a call needs."""

    def generate(
        self,
        rid: str,
        input_ids: EncodedIds,
        max_new_tokens: int,
        kv_key: str,
        stop_token_ids: Sequence[int] = (),
    ) -> AsyncIterator[Chunk]: ...

    async def abort(self, rid: str) -> None: ...


@dataclass
class Cell:
    """One cell as the gateway sees it. `running` are the calls it samples for."""

    id: CellId
    address: str
    capacity: int
    version: Version
    port: str = ""
    """Address of the cell's page port; "" = its KV pages do not move."""
    place: int = 0
    """In the order in which cells leave rollout, the standalone pool last."""
    weights: str = ""
    """Digest of what it serves."""
    routable: bool = True
    running: set[str] = field(default_factory=set)
    reserved: int = 0
    """Executions sent here ahead of their calls, since it was routed or a cell began to leave."""

    @property
    def load(self) -> float:
        return len(self.running) / max(1, self.capacity)

    @property
    def expected(self) -> float:
        """Load once those sent ahead have come."""
        return self.load + self.reserved / max(1, self.capacity)


@dataclass
class RouteTable:
    """All cells ever routed. Pure."""

    cells: dict[CellId, Cell] = field(default_factory=dict)

    def route(self, cell: Cell) -> None:
        """The cell serves; what it runs goes on there."""
        if cell.id in self.cells:
            cell.running = self.cells[cell.id].running
        self.cells[cell.id] = cell

    def block(self, id: CellId) -> None:
        """No new calls for the cell."""
        if id in self.cells:
            self.cells[id].routable = False

    def choose(self, preferred: CellId | None) -> Cell | None:
        """The cell that holds the execution's pages while it has room; None = wait.

        An execution without pages anywhere goes to the least loaded cell, one that must leave its cell as in `reserve`.
        """
        home = None if preferred is None else self.cells.get(preferred)
        if home is not None and home.routable and home.load < 1:
            return home
        open_cells = [cell for cell in self.cells.values() if cell.routable]
        if preferred is not None and home not in open_cells:
            return _destination(open_cells)
        return min(open_cells, key=lambda cell: (cell.load, cell.id != preferred, cell.id), default=None)

    def reserve(self, leaving: CellId | None) -> Cell | None:
        """Where an execution will go whose cell leaves; the next one goes elsewhere, until calls show the true load."""
        cells = [cell for cell in self.cells.values() if cell.routable and cell.id != leaving]
        chosen = _destination(cells)
        if chosen is not None:
            chosen.reserved += 1
        return chosen


def _destination(cells: Sequence[Cell]) -> Cell | None:
    """Of the cells with room the last to leave rollout, so that what moves seldom moves again; without room the least loaded."""
    room = [cell for cell in cells if cell.expected < 1]
    if room:
        return max(room, key=lambda cell: (cell.place, -cell.expected, -cell.id))
    return min(cells, key=lambda cell: (cell.expected, -cell.place, cell.id), default=None)


@dataclass(eq=False)
class Lease:
    """One call's place on one cell. `leave` is done when the call must go; `gone`: nothing can be asked of the engine."""

    call: str
    cell: CellId
    address: str
    version: Version
    engine: Engine
    leave: asyncio.Future[None]
    port: str = ""
    weights: str = ""
    gone: bool = False
    moves: bool = False
    """Told to leave, and its pages are good elsewhere."""


class Router:
    """The asyncio shell around the table."""

    def __init__(
        self,
        connect: Callable[[str], Engine],
        fault: Callable[[CellId, str], None],
        *,
        keeps_calls: bool = False,
    ) -> None:
        self.keeps_calls = keeps_calls
        """Whether calls run on when their engine has loaded other weights (kv_policy=keep_execution)."""
        self.table = RouteTable()
        self._connect = connect
        self._fault = fault
        self._leases: dict[CellId, set[Lease]] = {}
        self._changed = asyncio.Event()
        self.waiting = 0

    def running(self) -> dict[int, int]:
        """Calls per cell."""
        return {int(id): len(cell.running) for id, cell in self.table.cells.items()}

    def route(
        self,
        id: CellId,
        address: str,
        capacity: int,
        version: Version,
        port: str = "",
        place: int = 0,
        weights: str = "",
    ) -> None:
        """Send calls to the cell. Calls it still runs under another version or address are moved first."""
        known = self.table.cells.get(id)
        same = (known is not None and known.version == version) or self.keeps_calls
        if known is not None and not (same and known.address == address):
            self._tell(self._leases.get(id, ()), gone=known.address != address)
        self.table.route(Cell(id, address, capacity, version, port, place, weights))
        self._wake()

    def unroute(
        self,
        id: CellId,
        drain_s: float,
        *,
        gone: bool = False,
        moves: bool = False,
        told: Callable[[StepName, float, int], None] = lambda step, began, calls: None,
    ) -> Coroutine[Any, Any, int]:
        """Empty the cell: no new calls from here on; the rest, to be awaited: `drain_s` to finish, then cut.

        Its result is how many calls were cut. A Route that comes meanwhile is not undone. `told` is called with the name,
        the start (Unix seconds) and the calls of each step that ends.
        """
        self.table.block(id)
        for cell in self.table.cells.values():
            cell.reserved = 0
        return self._empty(id, frozenset(self._leases.get(id, ())), drain_s, gone, moves, told)

    def forget_routes(self) -> None:
        """Another controller routes cells of its own: no call stays on, or goes to, those of the one before."""
        for id in self.table.cells:
            self.table.block(id)
            self._tell(self._leases.get(id, ()), gone=True)

    async def _empty(
        self,
        id: CellId,
        leases: frozenset[Lease],
        drain_s: float,
        gone: bool,
        moves: bool,
        told: Callable[[StepName, float, int], None],
    ) -> int:
        began = time.time()
        if drain_s > 0 and not gone:
            await self._released(id, leases, drain_s)
        told(StepName.DRAIN, began, len(leases))
        began = time.time()
        cut = self._tell(leases & self._leases.get(id, set()), gone=gone, moves=moves)
        if not await self._released(id, leases, CUT_S):
            log.error("cell %d: calls did not leave within %.0f s", id, CUT_S)
        told(StepName.CUT, began, cut)
        return cut

    async def acquire(self, call: str, preferred: CellId | None) -> Lease:
        """A place on a cell; waits while there is none."""
        self.waiting += 1
        try:
            while (cell := self.table.choose(preferred)) is None:
                await self._changed.wait()
        finally:
            self.waiting -= 1
        leave = asyncio.get_running_loop().create_future()
        engine = self._connect(cell.address)
        lease = Lease(call, cell.id, cell.address, cell.version, engine, leave, cell.port, cell.weights)
        cell.running.add(call)
        self._leases.setdefault(cell.id, set()).add(lease)
        return lease

    def release(self, lease: Lease) -> None:
        """The call samples there no more."""
        self.table.cells[lease.cell].running.discard(lease.call)
        self._leases[lease.cell].discard(lease)
        self._wake()

    def failed(self, lease: Lease, cause: str) -> None:
        """The engine did not do its part: out of use until it is routed again."""
        cell = self.table.cells[lease.cell]
        if cell.routable and cell.address == lease.address and not lease.leave.done():
            log.warning("cell %d failed: %s", lease.cell, cause)
            cell.routable = False
            self._fault(lease.cell, cause)

    @staticmethod
    def _tell(leases: Iterable[Lease], *, gone: bool, moves: bool = False) -> int:
        """Tell calls to leave; how many had not been told."""
        told = [lease for lease in leases if not lease.leave.done()]
        for lease in told:
            lease.gone, lease.moves = gone, moves
            lease.leave.set_result(None)
        return len(told)

    async def _released(self, id: CellId, leases: frozenset[Lease], timeout_s: float) -> bool:
        """Whether none of the leases holds any more, within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not leases.isdisjoint(self._leases.get(id, ())):
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
