"""Links: ordered, typed, fenced control messages between the controller and each peer over TCP.

Controller: `LinkServer` accepts authenticated peers as `PeerLink`s (server.py). Peer: `Link.connect` follows the
rendezvous file (peer.py). Both ends: `receive` returns None once the link is closed, for ever; a stale envelope is
dropped and logged; a frame that cannot be understood closes the link. This module is the one to import from.
"""

from gyre_hpc.transport.peer import Link
from gyre_hpc.transport.rendezvous import (
    Rendezvous,
    read_rendezvous,
    read_secret,
    write_rendezvous,
    write_secret,
)
from gyre_hpc.transport.server import LinkServer, PeerLink
from gyre_hpc.transport.wire import AuthenticationFailed, StaleIncarnation

__all__ = [
    "AuthenticationFailed",
    "Link",
    "LinkServer",
    "PeerLink",
    "Rendezvous",
    "StaleIncarnation",
    "read_rendezvous",
    "read_secret",
    "write_rendezvous",
    "write_secret",
]
