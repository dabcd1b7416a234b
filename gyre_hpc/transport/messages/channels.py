"""How channels come and go (transport=mpi): a peer asks, the controller lets one side accept and invites the other.

A channel joins the endpoints of two named processes: "controller", or the name under which a peer owns regions. Its number
is the controller's and is never used again. These messages are urgent: an endpoint that accepts relays nothing.
"""

from __future__ import annotations

from gyre_hpc.transport.messages.base import Urgent


class ChannelWanted(Urgent, frozen=True):
    """Peer to controller: my endpoint is ready to join that of `acceptor`."""

    acceptor: str


class AcceptChannel(Urgent, frozen=True):
    """Controller to peer: open a port for the endpoint of `joiner`, answer PortPosted."""

    channel: int
    joiner: str


class PortPosted(Urgent, frozen=True):
    """Peer to controller: the accept is being posted at this port; `nonce` is what the joiner must prove."""

    channel: int
    port: str
    nonce: bytes


class JoinChannel(Urgent, frozen=True):
    """Controller to peer: connect to the port of `acceptor`."""

    channel: int
    acceptor: str
    port: str
    nonce: bytes


class ChannelJoined(Urgent, frozen=True):
    """Peer to controller: this side of the channel stands."""

    channel: int


class ChannelGone(Urgent, frozen=True):
    """Either way: the channel has ended or did not come about; for a link, what it held comes again over the socket."""

    channel: int
    reason: str
    acceptor: str = ""


class ChannelsOff(Urgent, frozen=True):
    """Peer to controller: MPI can never work here, and why."""

    reason: str
