"""A host's view of the regions that its endpoint fetches: one future each, ended by the endpoint's word or its loss."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from gyre_hpc.transport.mpi.host import EndpointHost
from gyre_hpc.transport.mpi.wire import Fetch, Fetched, GiveUp, Moved


class MpiFailed(OSError):
    """A region did not come over MPI (says why)."""


class Transfers:
    """Those under way at one host."""

    def __init__(self) -> None:
        self._serial = itertools.count(1)
        self._waiting: dict[int, tuple[asyncio.Future[None], Callable[[int], None]]] = {}

    async def fetch(
        self,
        host: EndpointHost,
        channel: int,
        path: str,
        total: int,
        into: str,
        moved: Callable[[int], None],
    ) -> None:
        """Have the region file `path` of the channel's other side written into the file `into`. Raises MpiFailed.

        `moved` is told how many bytes are there, but for the last. Cancelled, it has the endpoint give up this one.
        """
        transfer = next(self._serial)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[transfer] = (future, moved)
        host.send(Fetch(channel, transfer, path, total, into))
        try:
            await future
        except asyncio.CancelledError:
            host.send(GiveUp(transfer))
            raise
        finally:
            del self._waiting[transfer]

    def heard(self, message: Moved | Fetched) -> None:
        """What the endpoint says; nothing if nobody waits for that transfer."""
        future, moved = self._waiting.get(message.transfer, (None, None))
        if future is None or moved is None or future.done():
            return
        if isinstance(message, Moved):
            moved(message.bytes)
        elif message.reason:
            future.set_exception(MpiFailed(message.reason))
        else:
            future.set_result(None)

    def lost(self, reason: str) -> None:
        """The endpoint is gone: so is all it fetched."""
        for future, _ in self._waiting.values():
            if not future.done():
                future.set_exception(MpiFailed(reason))
