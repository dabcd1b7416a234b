"""The fork server: a small process that starts others, inside namespaces or not, for one millisecond of CPU each.

`python -m gyre_hpc.executions.forkserver FD` serves one owner (`launcher.Launcher`) over the Unix socket FD and ends when
that closes. A request carries three descriptors: a channel, standard output and standard error. The forked child
reads a `LaunchSpec` from the channel and answers with JSON lines: one of `started` / `failed`, then one `exit`.
Invariants: the channel's end is the process's end. If the owner shuts the channel down, or dies, every process of the
launch is killed; the channel reaches end of file only when none of them is left. No pid crosses a process border.

    fork server -> guard (holds the channel) -> keeper (pid 1 of the namespace, reaps) -> target (the program)
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import select
import signal
import socket
import sys
from types import FrameType
from typing import NoReturn

import msgspec

from gyre_hpc.executions import namespace

END_GRACE_MS = 5000
"""Without namespaces the keeper kills the descendants itself; it is killed too if that takes longer than this."""


class LaunchSpec(msgspec.Struct, frozen=True):
    """One program to start. `root` None = no namespaces. `file_limit` bounds any file it writes (bytes, 0 = none)."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    root: namespace.Root | None = None
    file_limit: int = 0


class Status(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line from the guard. `exit` is the wait status of the target."""

    started: bool = False
    failed: str = ""
    exit: int | None = None


def serve(owner: socket.socket) -> None:
    """Fork a guard for every request until the owner closes its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
    gc.freeze()
    while True:
        data, descriptors, _, _ = socket.recv_fds(owner, 1, 3, socket.MSG_CMSG_CLOEXEC)
        if not data:
            return
        with contextlib.suppress(BlockingIOError):  # no process left: the closed channel tells the owner
            if os.fork() == 0:
                owner.close()
                _as_process(guard, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _as_process(body: object, *arguments: object) -> NoReturn:
    """Run `body` as the whole life of this forked process."""
    code = 1
    try:
        assert callable(body)
        code = int(body(*arguments) or 0)
    except SystemExit:
        code = 0
    except BaseException:  # noqa: BLE001 (the process border: nothing of the parent's stack may run in a child)
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def guard(channel_fd: int, out: int, err: int) -> None:
    """Start the keeper, relay what becomes of it, and end it when the owner is done or gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    channel = socket.socket(fileno=channel_fd)
    spec = _read_spec(channel)
    if spec is None:
        return
    report, report_end = os.pipe2(os.O_CLOEXEC)
    life, life_end = os.pipe2(os.O_CLOEXEC)
    try:
        if spec.root is not None:
            namespace.unshare()
    except OSError as error:
        _send(channel, Status(failed=f"sandbox: {error}"))
        return
    keeper = os.fork()
    if keeper == 0:
        os.close(channel.detach())
        os.close(report)
        os.close(life)
        _as_process(keep, spec, report_end, life_end, out, err)
    for descriptor in (report_end, life_end, out, err):
        os.close(descriptor)
    _watch(channel, report, life, keeper, signal.SIGTERM if spec.root is None else signal.SIGKILL)


def _read_spec(channel: socket.socket) -> LaunchSpec | None:
    size = int.from_bytes(channel.recv(4, socket.MSG_WAITALL), "little")
    body = channel.recv(size, socket.MSG_WAITALL) if size else b""
    return msgspec.msgpack.decode(body, type=LaunchSpec) if body and len(body) == size else None


def _send(channel: socket.socket, status: Status) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        channel.sendall(msgspec.json.encode(status) + b"\n")


def _watch(channel: socket.socket, report: int, life: int, keeper: int, ending: signal.Signals) -> None:
    """Relay `report` (text = the launch failed, bare end = it runs) and `life` (wait status, end = all are gone)."""
    poll = select.poll()
    for descriptor in (channel.fileno(), report, life):
        poll.register(descriptor, select.POLLIN)
    texts = {report: b"", life: b""}
    waiting = {report, life}
    timeout: int | None = None
    while waiting:
        events = poll.poll(timeout)
        if not events:
            os.kill(keeper, signal.SIGKILL)
        for descriptor, _ in events:
            if descriptor == channel.fileno():
                poll.unregister(channel)
                os.kill(keeper, ending)
                timeout = END_GRACE_MS
                continue
            data = os.read(descriptor, 4096)
            texts[descriptor] += data
            if not data:
                poll.unregister(descriptor)
                waiting.remove(descriptor)
                if descriptor == report and not texts[report]:
                    _send(channel, Status(started=True))
    os.waitpid(keeper, 0)
    if texts[report]:
        _send(channel, Status(failed=texts[report].decode(errors="replace")))
    else:
        _send(channel, Status(exit=int(texts[life] or signal.SIGKILL)))


def keep(spec: LaunchSpec, report: int, life: int, out: int, err: int) -> None:
    """Start the target, reap everything below, report the target's wait status; no descendant outlives the keeper."""
    if spec.root is not None:
        namespace.die_with_parent(signal.SIGKILL)
        try:
            namespace.build_root(spec.root)
        except OSError as error:
            os.write(report, f"sandbox: {error}".encode())
            return
        _tend(spec, report, life, out, err)
        return
    namespace.adopt_orphans()
    try:
        signal.signal(signal.SIGTERM, _end)
        namespace.die_with_parent(signal.SIGTERM)
        _tend(spec, report, life, out, err)
    finally:
        _end_children()


def _tend(spec: LaunchSpec, report: int, life: int, out: int, err: int) -> None:
    target = os.fork()
    if target == 0:
        _as_process(become, spec, report, out, err)
    for descriptor in (report, out, err):
        os.close(descriptor)
    pid, status = os.wait()
    while pid != target:
        pid, status = os.wait()
    os.write(life, str(status).encode())


def _end(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def _end_children() -> None:
    """Kill children until none is left; the children of the killed become ours (we adopt orphans)."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    own = os.getpid()
    with contextlib.suppress(ChildProcessError):
        while True:
            with open(f"/proc/{own}/task/{own}/children") as file:
                children = [int(pid) for pid in file.read().split()]
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)


def become(spec: LaunchSpec, report: int, out: int, err: int) -> None:
    """Turn this process into the program. Only returns by raising; the reason goes to `report`."""
    try:
        os.setsid()
        null = os.open("/dev/null", os.O_RDONLY)
        for descriptor, standard in ((null, 0), (out, 1), (err, 2)):
            os.dup2(descriptor, standard)
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if spec.file_limit:
            resource.setrlimit(resource.RLIMIT_FSIZE, (spec.file_limit, spec.file_limit))
        os.chdir(spec.cwd)
        if spec.root is None:
            namespace.die_with_parent(signal.SIGKILL)
        else:
            namespace.drop_privileges()
        os.execvpe(spec.argv[0], spec.argv, spec.env)
    except OSError as error:
        os.write(report, f"{spec.argv[0]}: {error}".encode())


def main() -> None:
    """Entry point: the only argument is the inherited socket's descriptor."""
    serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
