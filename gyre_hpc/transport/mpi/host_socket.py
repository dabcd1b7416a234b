"""An endpoint's end of the Unix socket to its host: blocking writes, reads with a time limit, framed as a link is."""

from __future__ import annotations

import select
import socket
import time
from pathlib import Path
from typing import Final

import msgspec

from gyre_hpc.errors import PeerLost
from gyre_hpc.transport.mpi.wire import Local, ToEndpoint
from gyre_hpc.transport.wire import LENGTH, frame

RETRY_S: Final = 0.05
READ_BYTES: Final = 1 << 18


class HostSocket:
    """Connects to the host; raises PeerLost whenever the host is gone."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._socket.connect(str(path))
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise PeerLost(f"{path}: no host listens there ({error})") from error
                time.sleep(RETRY_S)
        self._buffer = bytearray()

    def send(self, message: Local) -> None:
        try:
            self._socket.sendall(frame(message))
        except OSError as error:
            raise PeerLost(f"the host is gone ({error})") from error

    def receive(self, wait_s: float) -> list[ToEndpoint]:
        """What has come, after waiting at most `wait_s` for something to come."""
        readable, _, _ = select.select([self._socket], [], [], wait_s)
        if not readable:
            return []
        data = self._socket.recv(READ_BYTES)
        if not data:
            raise PeerLost("the host has closed its socket")
        self._buffer += data
        return self._frames()

    def _frames(self) -> list[ToEndpoint]:
        messages: list[ToEndpoint] = []
        start = 0
        while len(self._buffer) - start >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._buffer, start)
            end = start + LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages.append(
                msgspec.msgpack.decode(bytes(self._buffer[start + LENGTH.size : end]), type=ToEndpoint)
            )
            start = end
        del self._buffer[:start]
        return messages
