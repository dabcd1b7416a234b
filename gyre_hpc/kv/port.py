"""The page port of a cell: its leader offers KV pages of the engine to others and pulls theirs into the host store.

    export  the engine writes the full pages of a prompt to the store, which keeps them leased; answered with an Offer
    import  what the own store lacks of an offer is pulled from the port that made it, a batch at a time

A pulled page has passed the region's checksum and is written with its own; a pull that fails leaves a shorter prefix, never
a wrong one, and a source that dies costs only a prefill. Nothing here waits for a role: pages outlive the memory of the
engine that computed them. Every request carries the bearer token of the run's engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import aiohttp
import msgspec
import numpy as np
import numpy.typing as npt
from aiohttp import web

from gyre_hpc.engines.wire import EncodedIds, ExportAnswer
from gyre_hpc.errors import GyreError
from gyre_hpc.kv.client import PortClient, PortFailed
from gyre_hpc.kv.offers import ExportIds, Import, Imported, Lend, Loan, Offer, Return
from gyre_hpc.kv.page_store import PageKey, PageStore
from gyre_hpc.transport.hosts import own_address
from gyre_hpc.transport.messages import Manifest, RegionKind
from gyre_hpc.transport.regions import PullFailed, RegionServer

log = logging.getLogger(__name__)

LEASE_S: Final = 60.0
"""Pages of an offer, and of a pull, are not evicted for so long; a region nobody returns is dropped after it."""
BATCH_BYTES: Final = 32 << 20
"""Most bytes of pages on their way to one puller: the credit that a destination grants."""
BODY_BYTES: Final = 256 << 20
_Body = TypeVar("_Body")


class Exporter(Protocol):
    """The engine behind the port (cells.engine_host.EngineHost)."""

    async def export(self, ids: EncodedIds, kv_key: str, lease_s: float) -> ExportAnswer:
        """Put the full pages of `ids` into the host store. Raises GyreError."""


@dataclass(frozen=True)
class Batch:
    """What one pull brought: pages and their bytes, and how many of them the own store kept."""

    pages: int
    kept: int
    bytes: int

    def shortage(self, asked: int) -> str:
        """Why not all pages asked for are here; "" if they are."""
        if self.pages < asked:
            return f"{asked - self.pages} pages were gone at the source"
        if self.kept < self.pages:
            return f"no room for {self.pages - self.kept} pages: raise engine.kv_store_mib"
        return ""


class PagePort:
    """The port of cell `owner`; `start` before anything else."""

    def __init__(
        self, host: str, owner: str, token: str, store: PageStore, regions: RegionServer, engine: Exporter
    ) -> None:
        self._host, self._owner, self._token = own_address(host), owner, token
        self._store, self._regions, self._engine = store, regions, engine
        self._loans: dict[str, tuple[Manifest, asyncio.TimerHandle]] = {}
        self._serial = itertools.count()
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None
        self.address = ""

    async def start(self) -> None:
        """Listen on a free port."""
        app = web.Application(middlewares=[self._checked], client_max_size=BODY_BYTES)
        app.add_routes(
            [
                web.post("/kv/export", self._answer(ExportIds, self._export)),
                web.post("/kv/import", self._answer(Import, self._import)),
                web.post("/kv/lend", self._answer(Lend, self._lend)),
                web.post("/kv/return", self._answer(Return, self._return)),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, 0).start()
        host, port = self._runner.addresses[0][:2]
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        self.address = f"http://{host}:{port}"

    async def close(self) -> None:
        """Stop listening and drop what is lent."""
        for name in list(self._loans):
            self._drop(name)
        if self._session is not None:
            await self._session.close()
        if self._runner is not None:
            await self._runner.cleanup()

    # ---- as source ----------------------------------------------------------------------------------------------

    async def _export(self, body: ExportIds) -> Offer:
        answer = await self._engine.export(EncodedIds.of(body.input_ids), body.kv_key, LEASE_S)
        namespace = body.kv_key if answer.namespace is None else answer.namespace
        return Offer(
            body.kv_key, namespace, answer.layout, answer.page_tokens, tuple(answer.keys), self.address
        )

    async def _lend(self, body: Lend) -> Loan:
        name = f"{self._owner}-{next(self._serial)}"
        manifest = await asyncio.to_thread(self._publish, name, body.pages)
        timer = asyncio.get_running_loop().call_later(LEASE_S, self._drop, name)
        self._loans[name] = (manifest, timer)
        return Loan(manifest)

    def _publish(self, name: str, pages: Offer) -> Manifest:
        arrays: dict[str, npt.NDArray[Any]] = {}
        for prefix, key in zip(pages.prefixes, pages.keys(), strict=True):
            payload = self._store.get(key)
            if payload is None:
                break
            arrays[prefix] = np.frombuffer(payload, np.uint8)
        return self._regions.publish(RegionKind.KV_PAGE, name, 0, pages.layout, arrays)

    async def _return(self, body: Return) -> None:
        self._drop(body.name)

    def _drop(self, name: str) -> None:
        manifest, timer = self._loans.pop(name, (None, None))
        if manifest is not None and timer is not None:
            timer.cancel()
            self._regions.drop(manifest)

    # ---- as destination -----------------------------------------------------------------------------------------

    async def _import(self, body: Import) -> Imported:
        offer, began = body.offer, time.monotonic()
        keys, end = offer.keys(), began + body.deadline_s
        moved = total = 0
        reason = ""
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + body.deadline_s):
                lacking = await asyncio.to_thread(self._lacking, offer)
                batch = 1
                while lacking and offer.source != self.address:
                    some, lacking = lacking[:batch], lacking[batch:]
                    came = await self._pull(offer, some, end)
                    moved, total = moved + came.kept, total + came.bytes
                    if reason := came.shortage(len(some)):
                        break
                    batch = max(1, BATCH_BYTES // max(1, total // moved))
        except TimeoutError:
            reason = f"not complete within {body.deadline_s:g} s"
        except GyreError as error:
            reason = error.message
        if reason:
            log.warning("%s: pages of %s: %s", self._owner, offer.source, reason)
        here = await asyncio.to_thread(self._store.lease, keys, LEASE_S)
        return Imported(here, moved, total, time.monotonic() - began, reason)

    def _lacking(self, offer: Offer) -> list[str]:
        """Pages of the offer that the own store lacks: a call to the file system for each."""
        keys = offer.keys()
        return [it for it, key in zip(offer.prefixes, keys, strict=True) if not self._store.has(key)]

    async def _pull(self, offer: Offer, prefixes: Sequence[str], end: float) -> Batch:
        """One batch into the store. Raises PortFailed, PullFailed, StorageFull."""
        assert self._session is not None
        source = PortClient(offer.source, self._session, self._token)
        wanted = msgspec.structs.replace(offer, prefixes=tuple(prefixes))
        manifest = (await source.lend(wanted)).manifest
        try:
            if manifest.layout != offer.layout or manifest.kind is not RegionKind.KV_PAGE:
                raise PullFailed(manifest, f"not KV pages of layout {offer.layout}")
            arrays = await self._regions.pull(manifest, deadline_s=max(0.0, end - time.monotonic()))
            layout = bytes.fromhex(offer.layout)
            pages = [
                (PageKey(offer.namespace, layout, bytes.fromhex(prefix)), arrays[prefix].data)
                for prefix in prefixes
                if prefix in arrays
            ]
            kept = await asyncio.to_thread(self._store.put, pages, lease_s=LEASE_S)
        finally:
            with contextlib.suppress(PortFailed):
                await source.give_back(manifest.name)
        return Batch(len(pages), kept, sum(payload.nbytes for _, payload in pages))

    # ---- HTTP ---------------------------------------------------------------------------------------------------

    @staticmethod
    def _answer(
        kind: type[_Body], work: Callable[[_Body], Awaitable[object]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            try:
                body = msgspec.json.decode(await request.read(), type=kind)
                return web.Response(
                    body=msgspec.json.encode(await work(body)), content_type="application/json"
                )
            except (GyreError, ValueError, OSError) as error:
                log.warning("%s refused: %s", request.path, error)
                return web.Response(status=409, text=str(error))

        return handle

    @web.middleware
    async def _checked(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            return web.Response(status=401, text="no valid bearer token")
        return await handler(request)
