"""Which cell serves a call, and what happens to calls when a cell leaves.

`RouteTable` is the pure core: cells, loads, choice. `Router` is the shell: calls wait in `acquire` while no cell is
routable (publication, switching), hold a `Lease` while an engine samples for them, and are told through the lease
when they must leave. A cell that failed once gets no call until the controller routes it again. A cell is routed by
`Route` only; nothing here probes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gyre_hpc.engines.wire import EncodedIds
from gyre_hpc.records import CellId, Version

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


def kv_key(version: Version) -> str:
    """KV namespace under the strict policy: nothing computed by other weights is ever used."""
    return f"w{version}"


@dataclass
class Cell:
    """One cell as the gateway sees it. `running` are the calls it samples for."""

    id: CellId
    address: str
    capacity: int
    version: Version
    routable: bool = True
    running: set[str] = field(default_factory=set)

    @property
    def load(self) -> float:
        return len(self.running) / max(1, self.capacity)


@dataclass
class RouteTable:
    """All cells ever routed. Pure."""

    cells: dict[CellId, Cell] = field(default_factory=dict)

    def route(self, id: CellId, address: str, capacity: int, version: Version) -> None:
        """The cell serves `version` at `address`."""
        running = self.cells[id].running if id in self.cells else set()
        self.cells[id] = Cell(id, address, capacity, version, True, running)

    def block(self, id: CellId) -> None:
        """No new calls for the cell."""
        if id in self.cells:
            self.cells[id].routable = False

    def choose(self, preferred: CellId | None) -> Cell | None:
        """The cell that holds the execution's pages while it has room, else the least loaded; None = wait."""
        open_cells = [cell for cell in self.cells.values() if cell.routable]
        home = next((cell for cell in open_cells if cell.id == preferred), None)
        if home is not None and home.load < 1:
            return home
        return min(open_cells, key=lambda cell: (cell.load, cell.id != preferred, cell.id), default=None)


@dataclass(eq=False)
class Lease:
    """One call's place on one cell. `leave` is done when the call must go; `gone`: nothing can be asked of the engine."""

    call: str
    cell: CellId
    address: str
    version: Version
    engine: Engine
    leave: asyncio.Future[None]
    gone: bool = False


class Router:
    """The asyncio shell around the table."""

    def __init__(self, connect: Callable[[str], Engine], fault: Callable[[CellId, str], None]) -> None:
        self.table = RouteTable()
        self._connect = connect
        self._fault = fault
        self._leases: dict[CellId, set[Lease]] = {}
        self._changed = asyncio.Event()
        self.waiting = 0

    def running(self) -> dict[int, int]:
        """Calls per cell."""
        return {int(id): len(cell.running) for id, cell in self.table.cells.items()}

    def route(self, id: CellId, address: str, capacity: int, version: Version) -> None:
        """Send calls to the cell. Calls it still runs under another version or address are moved first."""
        known = self.table.cells.get(id)
        if known is not None and (known.address, known.version) != (address, version):
            self._tell(self._leases.get(id, ()), gone=known.address != address)
        self.table.route(id, address, capacity, version)
        self._wake()

    def unroute(self, id: CellId, drain_s: float, *, gone: bool = False) -> Coroutine[Any, Any, int]:
        """Empty the cell: no new calls from here on; the rest, to be awaited: `drain_s` to finish, then cut.

        Its result is how many calls were cut. A Route that comes meanwhile is not undone.
        """
        self.table.block(id)
        return self._empty(id, frozenset(self._leases.get(id, ())), drain_s, gone)

    def forget_routes(self) -> None:
        """Another controller routes cells of its own: no call stays on, or goes to, those of the one before."""
        for id in self.table.cells:
            self.table.block(id)
            self._tell(self._leases.get(id, ()), gone=True)

    async def _empty(self, id: CellId, leases: frozenset[Lease], drain_s: float, gone: bool) -> int:
        if drain_s > 0 and not gone:
            await self._released(id, leases, drain_s)
        cut = self._tell(leases & self._leases.get(id, set()), gone=gone)
        if not await self._released(id, leases, CUT_S):
            log.error("cell %d: calls did not leave within %.0f s", id, CUT_S)
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
        lease = Lease(call, cell.id, cell.address, cell.version, self._connect(cell.address), leave)
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
    def _tell(leases: Iterable[Lease], *, gone: bool) -> int:
        """Tell calls to leave; how many had not been told."""
        told = [lease for lease in leases if not lease.leave.done()]
        for lease in told:
            lease.gone = gone
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
