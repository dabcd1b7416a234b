"""The regions under way at one endpoint: asked for, coming in, going out. One thread; its caller hears and moves.

A pull fails alone. One that its host gives up is stopped: the owner sends no more than both sides have posted, and that is
still taken, so that no message of it meets a later one. A channel that ends fails its own pulls at once; what MPI may
then still read or write is kept until MPI lets go of it, which is harmless: no region's file and no room is used again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Final

from gyre_hpc.errors import CorruptRecord, ProtocolViolation
from gyre_hpc.transport.mpi.joined import Joined
from gyre_hpc.transport.mpi.library import MPI
from gyre_hpc.transport.mpi.maps import Maps
from gyre_hpc.transport.mpi.transfers import Chunks, open_region, open_room
from gyre_hpc.transport.mpi.wire import Ask, Fetch, Fetched, Moved, Reply, Stop, Stopped, ToHost

LEFT_BYTES: Final = 1 << 30
"""Most memory that transfers of ended channels may hold on to before the endpoint should be replaced."""


class Traffic:
    """`tell` reaches the host. What raises MPI.Exception or ProtocolViolation ends the channel it was about."""

    def __init__(self, run_key: str, stall_s: float, tell: Callable[[ToHost], None]) -> None:
        self._run_key, self._stall_s, self._tell = run_key, stall_s, tell
        self._incoming: dict[int, Chunks] = {}
        self._outgoing: list[Chunks] = []
        self._left: list[Chunks] = []
        self._maps = Maps()

    @property
    def waiting(self) -> bool:
        """Whether anything is under way, an answer at least."""
        return bool(self._incoming or self._outgoing)

    @property
    def moving(self) -> bool:
        """Whether bytes are under way."""
        return any(chunks.posted for chunks in self.under_way())

    def under_way(self) -> Iterator[Chunks]:
        yield from (*self._incoming.values(), *self._outgoing)

    # ---- the puller ---------------------------------------------------------------------------------------------

    def fetch(self, channel: Joined, wish: Fetch) -> None:
        """Ask the owner; the room's pages are made while it looks for the region."""
        try:
            handle = os.open(wish.into, os.O_RDWR)
        except OSError as error:
            self._tell(Fetched(wish.transfer, f"cannot write the memory of the host ({error})"))
            return
        try:
            channel.send(Ask(wish.transfer, wish.path, wish.bytes))
            memory = self._maps.of(wish.into, wish.bytes, lambda: open_room(handle, wish.bytes))
        except (OSError, MPI.Exception) as error:
            reason = f"a region was asked for in vain ({error})"
            self._tell(Fetched(wish.transfer, reason))
            raise ProtocolViolation(reason) from error
        finally:
            os.close(handle)
        self._incoming[wish.transfer] = Chunks(channel, wish.transfer, memory, send=False)

    def answered(self, transfer: int, reason: str) -> None:
        """The owner sends, or does not."""
        chunks = self._incoming.get(transfer)
        if chunks is None:
            raise ProtocolViolation(f"an answer to transfer {transfer}, which nobody asked for")
        if reason:
            del self._incoming[transfer]
            self._say(chunks, Fetched(transfer, reason))
        elif not chunks.stopping:
            chunks.settle(chunks.total)

    def pull(self, transfer: int) -> Chunks | None:
        """What comes in for this transfer, unless it is over."""
        return self._incoming.get(transfer)

    def give_up(self, pull: Chunks) -> None:
        """The host waits no longer."""
        if not pull.stopping:
            pull.settled = False
            pull.joined.send(Stop(pull.transfer, pull.stop()))

    def stopped(self, transfer: int, sent: int | None) -> None:
        """The owner has told how much it sends; nothing if the transfer is over."""
        chunks = self._incoming.get(transfer)
        if chunks is not None:
            chunks.settle(chunks.total if sent is None else min(sent, chunks.total))

    # ---- the owner ----------------------------------------------------------------------------------------------

    def serve(self, channel: Joined, ask: Ask) -> None:
        """Send a region of this host, or say why not."""
        try:
            memory = self._maps.of(
                ask.path, ask.bytes, lambda: open_region(ask.path, ask.bytes, self._run_key)
            )
        except (OSError, CorruptRecord) as error:
            channel.send(Reply(ask.transfer, f"the owner has no such region ({error})"))
            return
        channel.send(Reply(ask.transfer))
        self._outgoing.append(Chunks(channel, ask.transfer, memory, send=True))

    def stop(self, channel: Joined, wish: Stop) -> None:
        """The puller has given up."""
        sent = None
        for chunks in self._outgoing:
            if chunks.joined is channel and chunks.transfer == wish.transfer:
                sent = chunks.stop(wish.posted)
        channel.send(Stopped(wish.transfer, sent))

    # ---- both ---------------------------------------------------------------------------------------------------

    def progress(self, chunks: Chunks, now: float) -> bool:
        """Move what can be moved; True if something did. Raises ProtocolViolation for one that has stalled."""
        before = chunks.arrived
        moved = chunks.progress(now)
        if chunks.done:
            self._finish(chunks)
        elif now - chunks.moved_at > self._stall_s:
            raise ProtocolViolation(f"a region has not moved for {self._stall_s:g} s")
        elif chunks.arrived > before and self._incoming.get(chunks.transfer) is chunks:
            self._say(chunks, Moved(chunks.transfer, chunks.arrived))
        return moved

    def _finish(self, chunks: Chunks) -> None:
        if self._incoming.get(chunks.transfer) is chunks:
            del self._incoming[chunks.transfer]
            self._say(chunks, Fetched(chunks.transfer))
        else:
            self._outgoing.remove(chunks)

    def forget(self, number: int, reason: str) -> None:
        """The channel has ended: so have its transfers."""
        ended = [chunks for chunks in self.under_way() if chunks.joined.channel == number]
        for chunks in ended:
            if self._incoming.get(chunks.transfer) is chunks:
                del self._incoming[chunks.transfer]
                self._say(chunks, Fetched(chunks.transfer, reason))
            chunks.stop()
        self._outgoing = [chunks for chunks in self._outgoing if chunks.joined.channel != number]
        self._left += [chunks for chunks in ended if chunks.posted]

    def tidy(self) -> None:
        """Let go of memory that nobody uses; to be called about every second."""
        self._maps.tidy()
        self._left = [chunks for chunks in self._left if _held(chunks)]

    @property
    def clogged(self) -> bool:
        """Whether ended channels hold on to too much memory."""
        return sum(chunks.total for chunks in self._left) > LEFT_BYTES

    def _say(self, chunks: Chunks, message: ToHost) -> None:
        """To a host that still waits."""
        if not chunks.stopping:
            self._tell(message)


def _held(chunks: Chunks) -> bool:
    try:
        chunks.progress(time.monotonic())
    except MPI.Exception:
        return False
    return chunks.posted
