"""A host's side of its endpoint: a private Unix socket at which one endpoint at a time is heard and told.

An endpoint that is silent, or does not return from a join in time, is stuck in MPI: it is killed, by the process id
that the kernel names for its socket, and whoever started it starts another. Called from the host's event loop; `carry`
from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from gyre_hpc.errors import ProtocolViolation
from gyre_hpc.transport import region_files
from gyre_hpc.transport.mpi.wire import (
    Accept,
    Alive,
    Carry,
    Drop,
    Dropped,
    Join,
    Joined,
    Leave,
    Local,
    Ready,
    ToHost,
)
from gyre_hpc.transport.wire import connection, frame, read_frame

log = logging.getLogger(__name__)
STUCK_S: Final = 10.0
"""An endpoint says Alive every second; silent for so long it is stuck."""
MARGIN_S: Final = 2.0
"""An endpoint ends itself when a join takes too long; so much later it is killed from outside."""
_CREDENTIALS: Final = struct.Struct("3i")


def socket_path(run_key: str, name: str, incarnation: int = 0) -> Path:
    """Where the host of this name listens on its node; the folder is private to the user and the run."""
    return region_files.run_folder(run_key) / "mpi" / f"{name}.{incarnation}"


class EndpointHost:
    """`heard` gets what the endpoint says, `lost` is told when it is gone. Nothing is sent while there is none."""

    def __init__(
        self, path: Path, join_s: float, heard: Callable[[ToHost], None], lost: Callable[[str], None]
    ) -> None:
        self.path = path
        self.ready = False
        """Whether MPI runs in the endpoint that is connected."""
        self._join_s, self._heard_of, self._lost = join_s, heard, lost
        self._server: asyncio.Server | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._pid = 0
        self._heard = 0.0
        self._joining: dict[int, float] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0

    @property
    def pid(self) -> int:
        """Process id of the latest endpoint; 0 before there was one."""
        return self._pid

    async def start(self) -> None:
        """Listen, where no other user can. Raises OSError or StorageFull naming the path."""
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        region_files.make_private(self.path.parent.parent, self.path.parent)
        self.path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(connection(self._serve), self.path)

    def send(self, message: Local) -> None:
        """Tell the endpoint, if there is one."""
        if self._writer is None or self._writer.is_closing():
            return
        if isinstance(message, Accept | Join):
            self._joining[message.channel] = time.monotonic()
        self._writer.write(frame(message))

    def carry(self, channel: int, data: bytes) -> None:
        """Bytes for the other end of the channel; callable from any thread."""
        if threading.get_ident() == self._thread:
            self.send(Carry(channel, data))
        elif self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self.send, Carry(channel, data))

    def drop(self, channel: int, reason: str) -> None:
        """The channel is over; an endpoint that still waits for its other side would wait in vain, and is killed."""
        if channel in self._joining:
            self.kill(f"channel {channel} cannot be joined: {reason}")
        else:
            self.send(Drop(channel))

    def check(self, now: float) -> None:
        """Kill an endpoint that is stuck; to be called about every second."""
        if self._writer is None:
            return
        late = any(now - since > self._join_s + MARGIN_S for since in self._joining.values())
        if late:
            self.kill("a join did not return")
        elif not self._joining and now - self._heard > STUCK_S:
            self.kill(f"silent for {now - self._heard:.0f} s")

    def kill(self, reason: str) -> None:
        """End the endpoint now. What it would have said is not heard."""
        if self._writer is None:
            return
        log.error("MPI endpoint of %s (pid %d) is killed: %s", self.path.name, self._pid, reason)
        if self._pid > 0:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._pid, signal.SIGKILL)
        self._gone(reason)

    def close(self) -> None:
        """Let the endpoint leave and stop listening."""
        self.send(Leave())
        self._lost = lambda reason: None
        if self._writer is not None:
            self._writer.close()
        if self._server is not None:
            self._server.close()
        self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()
            self.path.parent.parent.rmdir()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._gone("another endpoint has come")
        sock: socket.socket = writer.get_extra_info("socket")
        self._pid = _CREDENTIALS.unpack(
            sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )[0]
        self._writer, self._heard = writer, time.monotonic()
        try:
            while (data := await read_frame(reader)) is not None and self._writer is writer:
                self._take(msgspec.msgpack.decode(data, type=ToHost))
        except (msgspec.DecodeError, ProtocolViolation) as error:
            log.error("MPI endpoint of %s: %s", self.path.name, error)
        finally:
            writer.close()
            if self._writer is writer:
                self._gone("its process has ended")

    def _take(self, message: ToHost) -> None:
        self._heard = time.monotonic()
        if isinstance(message, Alive):
            return
        if isinstance(message, Ready):
            self.ready = True
        elif isinstance(message, Joined | Dropped):
            self._joining.pop(message.channel, None)
        self._heard_of(message)

    def _gone(self, reason: str) -> None:
        if self._writer is None:
            return
        self._writer.close()
        self._writer, self.ready = None, False
        self._joining.clear()
        self._lost(reason)
