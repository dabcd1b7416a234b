"""A fork server in a network namespace of its own, with a loopback device and nothing else.

It makes a listening socket inside and hands it out to its owner: what the owner serves on it is all that the programs
started here can reach. Standard library only, as forkserver.py.
"""

from __future__ import annotations

import fcntl
import socket
import struct

from gyre_hpc.executions import namespace
from gyre_hpc.executions.forkserver import serve

SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1
BACKLOG = 128


def serve_apart(owner: int, handout: int) -> None:
    """`serve(owner)` inside the namespace; the listening socket is sent over the socket `handout` first."""
    namespace.unshare(namespace.CLONE_NEWNET)
    _bring_up("lo")
    with (
        socket.socket(fileno=handout) as channel,
        socket.create_server(("127.0.0.1", 0), backlog=BACKLOG) as listening,
    ):
        socket.send_fds(channel, [b"L"], [listening.fileno()])
    serve(owner)


def _bring_up(device: str) -> None:
    """`ip link set DEVICE up` (netdevice(7))."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh14x", device.encode(), 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(control, SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh14x", device.encode(), flags | IFF_UP))
