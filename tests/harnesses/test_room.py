"""A program in a room reaches our socket and nothing else, the host's own loopback included."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from gyre_hpc.executions.sandbox import Sandbox
from gyre_hpc.harnesses.room import Room

REACH = """
import socket, sys
for port in map(int, sys.argv[1:]):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        print("reached", flush=True)
    except OSError as error:
        print(type(error).__name__, flush=True)
try:
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(("192.0.2.1", 53))
    print("routed")
except OSError as error:
    print(error.strerror)
"""


@pytest.mark.userns
async def test_a_program_reaches_our_socket_and_nothing_else(tmp_path: Path) -> None:
    workspace, log = tmp_path / "workspace", tmp_path / "log"
    workspace.mkdir()
    room = Room()
    try:
        with socket.create_server(("127.0.0.1", 0)) as host:
            inside, outside = room.listening.getsockname()[1], host.getsockname()[1]
            argv = ["/usr/bin/python3", "-c", REACH, str(inside), str(outside)]
            process = await room.launch(Sandbox(True, tmp_path).command(argv, workspace=workspace), log, log)
            async with asyncio.timeout(30):
                assert await process.wait() == 0
    finally:
        await room.close()
    assert log.read_text().split("\n")[:3] == ["reached", "ConnectionRefusedError", "Network is unreachable"]
