"""A launcher whose programs have one listening socket of ours as their whole network."""

from __future__ import annotations

import socket
import subprocess

from gyre_hpc.executions.launcher import Launcher, LaunchFailed, python_process

SERVER = (
    "import sys; sys.path.insert(0, sys.argv[1]); from gyre_hpc.executions.loopback import serve_apart;"
    " serve_apart(int(sys.argv[2]), int(sys.argv[3]))"
)


class Room(Launcher):
    """`listening` is the socket that its programs find on 127.0.0.1. Raises LaunchFailed without user namespaces."""

    def __init__(self) -> None:
        super().__init__()
        self.listening: socket.socket
        self._connected()

    def _start_server(self, owner: socket.socket) -> subprocess.Popen[bytes]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with ours:
            with theirs:
                server = python_process(SERVER, [owner, theirs])
            _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
        if not descriptors:
            server.wait()
            raise LaunchFailed(
                "no network namespace could be made", fix="gyre doctor tells what this machine can do"
            )
        self.listening = socket.socket(fileno=descriptors[0])
        return server
