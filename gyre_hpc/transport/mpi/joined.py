"""One channel inside an endpoint: an inter-communicator between two processes that have proved the run secret.

`accept` and `connect` block all MPI of the process until the other side comes: the caller limits them from outside. After
that nothing blocks. Control frames and bulk have tags of their own; frames keep their order.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from gyre_hpc.errors import ProtocolViolation
from gyre_hpc.transport.mpi.library import MPI
from gyre_hpc.transport.mpi.wire import AnyAcross, Proof, proof_of

CONTROL: Final = 1
BULK: Final = 100
"""First of the tags that transfers use."""
BULK_TAGS: Final = 10_000
POLL_S: Final = 0.0005


class Joined:
    """One end. Raises MPI.Exception where the library notices that the other side is gone (not every one does)."""

    def __init__(self, channel: int, communicator: Any) -> None:
        self.channel = channel
        self.communicator = communicator
        communicator.Set_errhandler(MPI.ERRORS_RETURN)
        self._sending: list[tuple[Any, bytes]] = []

    def send(self, frame: AnyAcross) -> None:
        data = msgspec.msgpack.encode(frame)
        request = self.communicator.Isend([data, MPI.BYTE], dest=0, tag=CONTROL)
        self._sending.append((request, data))

    def receive(self) -> list[AnyAcross]:
        """Frames that have come."""
        self._sending = [pair for pair in self._sending if not pair[0].Test()]
        frames: list[AnyAcross] = []
        status = MPI.Status()
        while self.communicator.Iprobe(source=0, tag=CONTROL, status=status):
            data = bytearray(status.Get_count(MPI.BYTE))
            self.communicator.Recv([data, MPI.BYTE], source=0, tag=CONTROL)
            frames.append(msgspec.msgpack.decode(data, type=AnyAcross))
        return frames

    def isend_bulk(self, transfer: int, view: memoryview) -> Any:
        return self.communicator.Isend([view, MPI.BYTE], dest=0, tag=BULK + transfer % BULK_TAGS)

    def irecv_bulk(self, transfer: int, view: memoryview) -> Any:
        return self.communicator.Irecv([view, MPI.BYTE], source=0, tag=BULK + transfer % BULK_TAGS)

    def first(self) -> AnyAcross:
        """Wait for the first frame; the caller's limit holds."""
        while not (frames := self.receive()):
            time.sleep(POLL_S)
        return frames[0]


def accept(
    channel: int, name: str, joiner: str, nonce: bytes, secret: bytes, opened: Callable[[str], None]
) -> Joined:
    """Open a port, tell it, accept one, prove. Raises ProtocolViolation for anyone but the invited joiner."""
    port = MPI.Open_port()
    try:
        opened(port)
        joined = Joined(channel, MPI.COMM_SELF.Accept(port))
    finally:
        MPI.Close_port(port)
    _check(joined.first(), joiner, proof_of(secret, "joiner", nonce, channel, joiner))
    joined.send(Proof(name, proof_of(secret, "acceptor", nonce, channel, name)))
    return joined


def connect(channel: int, name: str, acceptor: str, port: str, nonce: bytes, secret: bytes) -> Joined:
    """Connect to the invited port and prove. Raises ProtocolViolation if the acceptor does not know the run secret."""
    joined = Joined(channel, MPI.COMM_SELF.Connect(port))
    joined.send(Proof(name, proof_of(secret, "joiner", nonce, channel, name)))
    _check(joined.first(), acceptor, proof_of(secret, "acceptor", nonce, channel, acceptor))
    return joined


def _check(frame: AnyAcross, name: str, expected: bytes) -> None:
    if not isinstance(frame, Proof) or frame.name != name or not hmac.compare_digest(frame.proof, expected):
        raise ProtocolViolation(f"the other side did not prove to be {name} of this run")
