"""What an endpoint says: to its host over a Unix socket, to another endpoint over an inter-communicator.

The host is the controller or a peer process (a cell's leader); its endpoint is the one process beside it that speaks MPI.
Both use msgpack structs; on the Unix socket each is length-prefixed like a link's frame. A channel is one
inter-communicator between two endpoints; its number is the controller's and never used again.
"""

from __future__ import annotations

import hashlib
import hmac

import msgspec

from gyre_hpc.transport.wire import LENGTH


class Local(msgspec.Struct, frozen=True, tag=True):
    """Base of what crosses the Unix socket."""


class Accept(Local, frozen=True):
    """Host to endpoint: open a port for this one joiner, say PortOpened, accept."""

    channel: int
    joiner: str


class Join(Local, frozen=True):
    """Host to endpoint: connect to the port that `acceptor` opened for this channel."""

    channel: int
    acceptor: str
    port: str
    nonce: bytes


class Carry(Local, frozen=True):
    """Either way: bytes for, or from, the other end of a channel, in order."""

    channel: int
    data: bytes


class Drop(Local, frozen=True):
    """Host to endpoint: forget this channel."""

    channel: int


class Fetch(Local, frozen=True):
    """Host to endpoint: fill the file `into` with `bytes` bytes of the region file `path` of the channel's other side."""

    channel: int
    transfer: int
    path: str
    bytes: int
    into: str


class GiveUp(Local, frozen=True):
    """Host to endpoint: nobody waits for this region any more; nothing is said of it from here on."""

    transfer: int


class Leave(Local, frozen=True):
    """Host to endpoint: say bye on every channel and exit."""


class Ready(Local, frozen=True):
    """Endpoint to host, first: MPI runs. `library` is the first line of its description."""

    library: str


class Unfit(Local, frozen=True):
    """Endpoint to host, instead of Ready, and then it exits: why MPI can never work here."""

    reason: str


class Alive(Local, frozen=True):
    """Endpoint to host, about once a second: it is not stuck in MPI."""


class PortOpened(Local, frozen=True):
    """Endpoint to host: the accept is being posted; no word of this endpoint until it returns."""

    channel: int
    port: str
    nonce: bytes


class Joined(Local, frozen=True):
    """Endpoint to host: both sides have proved themselves after so many seconds."""

    channel: int
    seconds: float


class Dropped(Local, frozen=True):
    """Endpoint to host: the channel has ended, or was never joined."""

    channel: int
    reason: str


class Moved(Local, frozen=True):
    """Endpoint to host: the first `bytes` bytes of the file are there; more follow."""

    transfer: int
    bytes: int


class Fetched(Local, frozen=True):
    """Endpoint to host: the file is whole, or why it is not."""

    transfer: int
    reason: str = ""


ToEndpoint = Accept | Join | Carry | Drop | Fetch | GiveUp | Leave
ToHost = Ready | Unfit | Alive | PortOpened | Joined | Carry | Dropped | Moved | Fetched


class Across(msgspec.Struct, frozen=True, tag=True):
    """Base of what crosses an inter-communicator."""


class Proof(Across, frozen=True):
    """First message of each side, the joiner's before the acceptor's."""

    name: str
    proof: bytes


class Carried(Across, frozen=True):
    """Bytes for the other host."""

    data: bytes


class Ask(Across, frozen=True):
    """Puller to owner: send this region file under the tag of `transfer`."""

    transfer: int
    path: str
    bytes: int


class Reply(Across, frozen=True):
    """Owner to puller: the bytes follow, or why they do not."""

    transfer: int
    reason: str = ""


class Stop(Across, frozen=True):
    """Puller to owner, after Ask: the region is not wanted any more; `posted` bytes are waited for and must be sent."""

    transfer: int
    posted: int


class Stopped(Across, frozen=True):
    """Owner to puller, after Reply: so many bytes were or will be sent (None: all), which the puller must take."""

    transfer: int
    bytes: int | None


class Bye(Across, frozen=True):
    """The endpoint exits; nothing follows."""


AnyAcross = Proof | Carried | Ask | Reply | Stop | Stopped | Bye


def proof_of(secret: bytes, side: str, nonce: bytes, channel: int, name: str) -> bytes:
    """HMAC that this side ("joiner" or "acceptor"), called `name`, knows the run secret, for this one port."""
    parts = (b"gyre mpi channel", side.encode(), nonce, str(channel).encode(), name.encode())
    text = b"".join(LENGTH.pack(len(part)) + part for part in parts)
    return hmac.new(secret, text, hashlib.sha256).digest()
