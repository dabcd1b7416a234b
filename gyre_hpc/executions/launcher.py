"""The owner's side of the fork server: start a program, learn that it runs, wait for its end, end it.

One `Launcher` lives in the runner's event loop. A `Process` is a channel, not a pid: `end()` kills the program and all
its descendants, and `wait()` returns only when none of them is left. If the runner dies the channels close with it and
every program ends. No polling, no signal, no thread.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from gyre_hpc.errors import GyreError
from gyre_hpc.executions.forkserver import LaunchSpec, encode

SERVER = "import sys; sys.path.insert(0, sys.argv[1]); from gyre_hpc.executions.forkserver import serve; serve(int(sys.argv[2]))"
DOCTOR = "gyre doctor tells what this machine can do"
PACKAGE_ROOT = Path(__file__).parents[2]


def python_process(code: str, descriptors: Sequence[socket.socket]) -> subprocess.Popen[bytes]:
    """Run `code` in a bare Python; its arguments are our package's root and the numbers of the inherited descriptors."""
    numbers = [descriptor.fileno() for descriptor in descriptors]
    return subprocess.Popen(
        [os.path.realpath(sys.executable), "-I", "-S", "-c", code, str(PACKAGE_ROOT), *map(str, numbers)],
        pass_fds=numbers,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


class Status(msgspec.Struct, frozen=True):
    """One line from the guard: the program runs, or did not start, or ended with this wait status."""

    started: bool = False
    failed: str = ""
    exit: int | None = None


class LaunchFailed(GyreError):
    """The program could not be started: sandbox, program file, or the fork server (names which)."""


class Process:
    """A program that runs. `wait` may be awaited by several tasks; `end` may be called at any time, repeatedly."""

    def __init__(self, channel: socket.socket, lines: _Lines) -> None:
        self._channel = channel
        self._exit = asyncio.ensure_future(self._read_exit(lines))

    async def wait(self) -> int:
        """The exit code, or -N if signal N ended it. Raises LaunchFailed if the guard was lost."""
        return await asyncio.shield(self._exit)

    def end(self) -> None:
        """Kill the program and everything it started; `wait` returns when they are gone."""
        if not self._exit.done():
            self._channel.shutdown(socket.SHUT_WR)

    async def _read_exit(self, lines: _Lines) -> int:
        try:
            status = await lines.next()
        finally:
            self._channel.close()
        if status is None or status.exit is None:
            raise LaunchFailed(
                "the guard of a running program was lost", fix="look for an out-of-memory kill on this node"
            )
        return os.waitstatus_to_exitcode(status.exit)


class _Lines:
    """Status lines of one channel, in order; None at its end."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._rest = b""

    async def next(self) -> Status | None:
        loop = asyncio.get_running_loop()
        while b"\n" not in self._rest:
            try:
                data = await loop.sock_recv(self._channel, 4096)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        return msgspec.json.decode(line, type=Status)

    async def end(self) -> None:
        """Wait for the end of the channel: no process of the launch is left."""
        while await self.next() is not None:
            pass


class Launcher:
    """Starts the fork server at the first launch and again if it was lost."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    @property
    def server_pid(self) -> int | None:
        """The fork server, if it has been started."""
        return None if self._server is None else self._server.pid

    async def launch(self, spec: LaunchSpec, out: Path, err: Path) -> Process:
        """Start `spec` with its output appended to `out` and `err`. Returns once the program runs; raises LaunchFailed.

        No answer at all means that the fork server was lost, and that nothing runs: asked once more, of a new one.
        """
        for _ in range(2):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            ours.setblocking(False)
            lines = _Lines(ours)
            try:
                status = await self._ask(spec, ours, theirs, lines, out, err)
                if status is not None and status.started:
                    return Process(ours, lines)
            except (
                BaseException
            ):  # given up, perhaps between start and answer: not before all of it has ended
                ours.shutdown(socket.SHUT_WR)
                await lines.end()
                ours.close()
                raise
            ours.close()
            if status is not None:
                raise LaunchFailed(f"{spec.argv[0]} did not start: {status.failed}", fix=DOCTOR)
            self._drop()
        raise LaunchFailed(f"{spec.argv[0]} did not start: no process could be forked", fix=DOCTOR)

    async def _ask(
        self,
        spec: LaunchSpec,
        ours: socket.socket,
        theirs: socket.socket,
        lines: _Lines,
        out: Path,
        err: Path,
    ) -> Status | None:
        try:
            with theirs:
                self._request(theirs, out, err)
            await asyncio.get_running_loop().sock_sendall(ours, encode(spec))
            return await lines.next()
        except (BrokenPipeError, ConnectionResetError):
            return None

    def _request(self, channel: socket.socket, out: Path, err: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        descriptors = [channel.fileno(), os.open(out, flags, 0o644), os.open(err, flags, 0o644)]
        try:
            socket.send_fds(self._connected(), [b"L"], descriptors)
        finally:
            for descriptor in descriptors[1:]:
                os.close(descriptor)

    def _connected(self) -> socket.socket:
        if self._socket is None:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            with theirs:
                self._server = self._start_server(theirs)
        return self._socket

    def _start_server(self, owner: socket.socket) -> subprocess.Popen[bytes]:
        return python_process(SERVER, [owner])

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._server is not None:
            self._server.wait()
        self._socket = self._server = None

    async def close(self) -> None:
        """End the fork server. Programs that run go on until their own channel closes."""
        await asyncio.to_thread(self._drop)
