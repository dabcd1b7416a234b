"""What every link knows: kinds of peers, the base of all bodies, and how a link begins and ends."""

from __future__ import annotations

import enum
from typing import NewType

import msgspec

Serial = NewType("Serial", int)
"""Number of a switch or route: grows with each command of one controller, whatever the cell."""


class PeerKind(enum.StrEnum):
    """What a peer is."""

    CELL = "cell"
    GATEWAY = "gateway"
    RUNNER = "runner"
    PROCESSOR = "processor"
    CELL_HOST = "cell_host"


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all bodies; the tag is the class name."""


class Urgent(Message, frozen=True):
    """Base of what must not wait for earlier messages: always on the socket, outside the sequence, handed out at once."""


class Hello(Message, frozen=True):
    """First message of an incarnation. `address` is the URL or host:port the peer serves ("" if none)."""

    kind: PeerKind
    index: int
    pid: int
    host: str
    address: str


class Heartbeat(Message, frozen=True):
    """Sent every `transport.heartbeat_s` by a thread that does no tensor work."""


class Goodbye(Message, frozen=True):
    """The peer ends on purpose; `error` is empty on a clean end."""

    error: str = ""


class AskedToEnd(Message, frozen=True):
    """The signal reached the peer while nobody has told it to end: it goes on. The site may be ending its step or the job."""

    signal: str


class Shutdown(Message, frozen=True):
    """End cleanly: finish writes, say Goodbye, exit 0."""

    reason: str
