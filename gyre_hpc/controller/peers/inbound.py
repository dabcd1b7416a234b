"""What the controller's one queue brings: everything its peers, and cell hosts, say and do, in order."""

from __future__ import annotations

from dataclasses import dataclass

from gyre_hpc.transport.links import PeerLink
from gyre_hpc.transport.messages import Message, PeerKind

PeerId = tuple[PeerKind, int]
"""Kind and index."""


@dataclass(frozen=True)
class Said:
    """A message of the peer's current incarnation."""

    peer: PeerId
    message: Message


@dataclass(frozen=True)
class Connected:
    """A hello was accepted. `again`: the same launch with a new incarnation (its worker restarted)."""

    peer: PeerId
    again: bool


@dataclass(frozen=True)
class Exited:
    """The process of launch `launch` ended."""

    peer: PeerId
    launch: int
    code: int


@dataclass(frozen=True)
class Replaced:
    """Another process has come in the place of an external one; `Connected` follows."""

    peer: PeerId


@dataclass(frozen=True)
class Suspected:
    """No heartbeat for `suspect_after_s`, or one again after that (`recovered`)."""

    peer: PeerId
    recovered: bool


@dataclass(frozen=True)
class HostSaid:
    """A message of a cell host; None: its link has ended."""

    link: PeerLink
    message: Message | None


@dataclass(frozen=True)
class Told:
    """Something about `who` that is for a person only."""

    who: str
    what: str


Inbound = Said | Connected | Exited | Replaced | Suspected | HostSaid | Told
NOT_STARTED = -1000
"""In place of an exit code: no node had room for the process."""
