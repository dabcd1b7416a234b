"""KV pages follow the executions whose cell leaves: exported before the lease is given back, imported before the next call.

    evacuate  while a cell drains: the pages of its idle executions, and what its running calls have so far, go ahead to
              where each execution will run; its `home` follows
    depart    a call that was cut: the rest of its pages are kept by the source's port, its engine may go
    arrive    before a call samples on a cell: what its execution was offered elsewhere is pulled there, once per cell

All of it has a deadline (`gateway.kv_move_s`) and none of it decides anything: what could not be moved is prefilled again,
and counted. Under kv_policy=strict the namespace is the weight version and a digest of the weights; under keep_execution it is the attempt's own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from gyre_hpc.engines.wire import EncodedIds
from gyre_hpc.gateway.calls import Call, Execution, Parcel
from gyre_hpc.gateway.routing import Cell, Lease, Router
from gyre_hpc.kv.client import PortClient, PortFailed
from gyre_hpc.kv.offers import Imported, Offer
from gyre_hpc.records import CellId, KvPolicy, Version
from gyre_hpc.transport.messages import StepName

log = logging.getLogger(__name__)

MOVES: Final = 4
"""Executions whose pages go ahead at the same time."""


class Serves(Protocol):
    """A cell, or a place on one: what it serves."""

    @property
    def version(self) -> Version: ...
    @property
    def weights(self) -> str: ...


def kv_namespace(policy: KvPolicy, execution: Execution, at: Serves) -> str:
    """The KV namespace of a call: pages are shared only inside it."""
    if policy.keeps_calls:
        return f"x{execution.id}.{execution.attempt}"
    return f"w{at.version}.{at.weights}" if at.weights else f"w{at.version}"


@dataclass
class Moved:
    """What one step has moved, for its record. `outcome`: "done", or why not all of it."""

    began: float = field(default_factory=time.time)
    calls: int = 0
    pages: int = 0
    bytes: int = 0
    outcome: str = "done"

    def add(self, came: Imported) -> None:
        self.pages += came.moved
        self.bytes += came.bytes
        if came.reason:
            self.outcome = came.reason


class PageMover:
    """One per gateway. `told` is called with (source cell, step, what it moved) when a step has ended."""

    def __init__(
        self,
        connect: Callable[[str], PortClient],
        router: Router,
        policy: KvPolicy,
        move_s: float,
        page_tokens: int,
        told: Callable[[CellId, StepName, Moved], None] = lambda cell, step, moved: None,
    ) -> None:
        self._connect, self._router = connect, router
        self._policy, self._move_s, self._page_tokens = policy, move_s, page_tokens
        self._told = told

    @classmethod
    def still(cls, router: Router) -> PageMover:
        """One that moves nothing."""
        return cls(_no_port, router, KvPolicy.STRICT, 0.0, 1)

    def namespace(self, execution: Execution, at: Serves) -> str:
        """The KV namespace of this execution's calls there."""
        return kv_namespace(self._policy, execution, at)

    @property
    def keeps(self) -> bool:
        """Whether KV of older weights is found by later calls of its execution."""
        return self._policy.keeps_calls

    # ---- a call -------------------------------------------------------------------------------------------------

    async def depart(self, execution: Execution, call: Call, lease: Lease) -> None:
        """The call was cut and its lease is still held: its source keeps what it has computed."""
        if not lease.moves or lease.gone or not lease.port or not self._move_s:
            return
        moved, ids = Moved(calls=1), execution.lineage.encoded(call.context) + EncodedIds.of(call.ids)
        call.pages_cut = (ids.count - 1) // self._page_tokens
        call.cut_under = self.namespace(execution, lease)
        offer = await self._export(execution, lease.cell, lease.port, lease, ids, moved)
        if offer is not None:
            moved.pages = len(offer.prefixes)
        self._told(lease.cell, StepName.EXPORT, moved)

    def found(self, execution: Execution, call: Call, cached_tokens: int, at: Serves) -> None:
        """The call goes on there with so many tokens cached: what it has again, and how old its KV may be."""
        version = at.version
        older = execution.kv_version if cached_tokens and self.keeps else None
        call.kv_version = version if older is None else min(older, version)
        execution.kv_version = (
            call.kv_version if execution.kv_version is None else min(execution.kv_version, version)
        )
        if call.cut_under == self.namespace(execution, at):
            call.pages_due += call.pages_cut
            call.pages_found += min(call.pages_cut, cached_tokens // self._page_tokens)
        call.pages_cut = 0

    async def arrive(self, execution: Execution, lease: Lease) -> None:
        """Have the lease's cell pull what the execution was offered elsewhere in this namespace."""
        if not lease.port or not self._move_s:
            return
        namespace = self.namespace(execution, lease)
        parcels = [parcel for parcel in execution.parcels if parcel.offer.kv_key == namespace]
        await asyncio.gather(*(self._bring(execution, it, lease.cell, lease.port) for it in parcels))

    # ---- a cell -------------------------------------------------------------------------------------------------

    def empty(
        self,
        cell: CellId,
        executions: Iterable[Execution],
        drain_s: float,
        *,
        gone: bool = False,
        moves: bool = False,
        told: Callable[[StepName, float, int], None] = lambda step, began, calls: None,
    ) -> Coroutine[Any, Any, int]:
        """`Router.unroute`, with the pages of its executions sent ahead meanwhile if they are good elsewhere (`moves`)."""
        leaving = self._router.unroute(cell, drain_s, gone=gone, moves=moves, told=told)
        return self._empty(cell, list(executions) if moves and not gone else [], drain_s, leaving)

    async def _empty(
        self, cell: CellId, executions: list[Execution], drain_s: float, leaving: Coroutine[Any, Any, int]
    ) -> int:
        ahead = asyncio.ensure_future(self.evacuate(cell, executions, max(drain_s, self._move_s)))
        cut: int = await leaving
        await ahead
        return cut

    async def evacuate(self, cell: CellId, executions: Iterable[Execution], within_s: float) -> None:
        """The cell leaves: executions at home there find their pages at the cell they will go to."""
        known = self._router.table.cells.get(cell)
        if known is None or not known.port or not self._move_s:
            return
        limit, moved = asyncio.Semaphore(MOVES), Moved()
        leaving = [execution for execution in executions if execution.home == cell and not execution.closing]

        async def one(execution: Execution) -> None:
            async with limit:
                await self._send_ahead(execution, known, moved)

        try:
            async with asyncio.timeout(within_s):
                await asyncio.gather(*(one(execution) for execution in leaving))
        except TimeoutError:
            moved.outcome = f"not complete within {within_s:g} s"
        if leaving:
            self._told(cell, StepName.PREFETCH, moved)

    async def _send_ahead(self, execution: Execution, leaving: Cell, moved: Moved) -> None:
        """Export what the execution has on the cell and import it where it will go; `moved` counts it if there is a place."""
        tips = [(call.context, call.ids) for call in execution.calls.values() if call.finish is None]
        offers = []
        for context, sampled in [*execution.tips, *tips]:
            ids = execution.lineage.encoded(context) + EncodedIds.of(sampled)
            offers.append(await self._export(execution, leaving.id, leaving.port, leaving, ids, moved))
        target = self._router.table.reserve(execution.home)
        if target is None or not target.port:
            return
        execution.home = target.id
        if self.namespace(execution, target) == self.namespace(execution, leaving):
            for parcel in list(execution.parcels):
                if parcel.offer in offers:
                    came = await self._bring(execution, parcel, target.id, target.port)
                    moved.outcome = came.reason or moved.outcome
        moved.calls += 1

    # ---- ports --------------------------------------------------------------------------------------------------

    async def _export(
        self, execution: Execution, cell: CellId, port: str, at: Serves, ids: EncodedIds, moved: Moved
    ) -> Offer | None:
        namespace = self.namespace(execution, at)
        try:
            async with asyncio.timeout(self._move_s):
                offer = await self._connect(port).export(ids, namespace)
        except (PortFailed, TimeoutError) as error:
            moved.outcome = f"{type(error).__name__}: {error}"
            log.warning("cell %d: pages of execution %d: %s", cell, execution.id, error)
            return None
        if offer.prefixes:
            execution.offered(offer, cell)
        return offer

    async def _bring(self, execution: Execution, parcel: Parcel, cell: CellId, port: str) -> Imported:
        """Pull the parcel to the cell, unless it is there; whoever asks meanwhile waits for the same pull."""
        if cell == parcel.source:
            return Imported(0, 0, 0, 0.0)
        pull = parcel.cells.get(cell)
        if pull is None:
            pull = parcel.cells[cell] = asyncio.ensure_future(self._pull(execution, parcel, cell, port))
            return await asyncio.shield(pull)
        await asyncio.shield(pull)
        return Imported(0, 0, 0, 0.0)

    async def _pull(self, execution: Execution, parcel: Parcel, cell: CellId, port: str) -> Imported:
        moved = Moved(calls=1)
        try:
            async with asyncio.timeout(self._move_s + 1.0):
                came = await self._connect(port).bring(parcel.offer, self._move_s)
        except (PortFailed, TimeoutError) as error:
            came = Imported(0, 0, 0, time.time() - moved.began, f"{type(error).__name__}: {error}")
            log.warning("cell %d: pages of execution %d: %s", cell, execution.id, error)
        moved.add(came)
        self._told(parcel.source, StepName.PULL_PAGES, moved)
        return came


def _no_port(address: str) -> PortClient:
    raise PortFailed(f"no page port is used here: {address}")
