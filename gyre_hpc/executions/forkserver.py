"""The fork server: a small process that starts others, inside namespaces or not, for a few milliseconds of CPU each.

`launcher.Launcher` starts it with `serve(fd)` over a Unix socket; it ends when that closes. A request carries three
descriptors: a channel, standard output and standard error. The forked guard reads a `LaunchSpec` from the channel and
answers with JSON lines: `{"started": true}` or `{"failed": text}`, and after a start `{"exit": wait status}`.
Invariants: the channel's end is the program's end. If the owner shuts the channel down, or dies, every process of the
launch is killed; the channel reaches end of file only when none of them is left. No pid crosses a process border.
Standard library only: every megabyte here is copied with each fork.

    fork server -> guard (holds the channel) -> keeper (pid 1 of the namespace, reaps) -> target (the program)
"""

from __future__ import annotations

import gc
import json
import os
import resource
import select
import signal
import socket
import sys
from typing import TYPE_CHECKING, NamedTuple

from gyre_hpc.executions import namespace

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import NoReturn

END_GRACE_MS = 5000
"""Without namespaces the keeper kills the descendants itself; it is killed too if that takes longer than this."""


END = signal.SIGUSR1
"""Asks a keeper without namespaces to end. SIGTERM is ignored by all three: Slurm sends it to every process of a step long
before the end. The program gets it all the same; its owner knows (`Attempts.signalled`)."""


class LaunchSpec(NamedTuple):
    """One program to start. `root` None = no namespaces. `file_limit` bounds any file it writes (bytes, 0 = none)."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    root: namespace.Root | None = None
    file_limit: int = 0


def encode(spec: LaunchSpec) -> bytes:
    """The request body: length and JSON."""
    body = json.dumps(spec).encode()
    return len(body).to_bytes(4, "little") + body


def decode(body: bytes) -> LaunchSpec:
    """The inverse of `encode`, without the length."""
    argv, env, cwd, root, file_limit = json.loads(body)
    if root is not None:
        system, hidden, binds = root
        root = namespace.Root(tuple(system), tuple(hidden), tuple(namespace.Bind(*bind) for bind in binds))
    return LaunchSpec(argv, env, cwd, root, file_limit)


def serve(descriptor: int) -> None:
    """Fork a guard for every request until the owner closes its end."""
    owner = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    gc.disable()
    gc.freeze()
    while True:
        data, descriptors, _, _ = socket.recv_fds(owner, 1, 3, socket.MSG_CMSG_CLOEXEC)
        if not data:
            return
        try:
            child = os.fork()
        except BlockingIOError:  # no process left: the closed channel tells the owner
            child = -1
        if child == 0:
            owner.close()
            _as_process(guard, *descriptors)
        for received in descriptors:
            os.close(received)


def _as_process(body: Callable[..., None], *arguments: object) -> NoReturn:
    """Run `body` as the whole life of this forked process."""
    code = 1
    try:
        body(*arguments)
        code = 0
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
    try:
        if spec.root is None:
            namespace.adopt_orphans()
        else:
            namespace.unshare()
    except OSError as error:
        _send(channel, {"failed": f"sandbox: {error}"})
        return
    report, report_end = os.pipe()
    life, life_end = os.pipe()
    keeper = os.fork()
    if keeper == 0:
        for descriptor in (channel.detach(), report, life):
            os.close(descriptor)
        _as_process(keep, spec, report_end, life_end, out, err)
    for descriptor in (report_end, life_end, out, err):
        os.close(descriptor)
    _watch(channel, report, life, keeper, END if spec.root is None else signal.SIGKILL)


def _read_spec(channel: socket.socket) -> LaunchSpec | None:
    size = int.from_bytes(channel.recv(4, socket.MSG_WAITALL), "little")
    body = channel.recv(size, socket.MSG_WAITALL) if size else b""
    return decode(body) if body and len(body) == size else None


def _send(channel: socket.socket, status: dict[str, object]) -> None:
    try:
        channel.sendall(json.dumps(status).encode() + b"\n")
    except (BrokenPipeError, ConnectionResetError):  # the owner is gone; nobody wants to know
        return


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
                    _send(channel, {"started": True})
    os.waitpid(keeper, 0)
    end_children()
    if texts[report]:
        _send(channel, {"failed": texts[report].decode(errors="replace")})
    else:
        _send(channel, {"exit": int(texts[life] or signal.SIGKILL)})


def keep(spec: LaunchSpec, report: int, life: int, out: int, err: int) -> None:
    """Start the target, reap everything below, report the target's wait status. Text in `report` = it did not start."""
    isolated = spec.root is not None
    namespace.die_with_parent(signal.SIGKILL if isolated else END)
    try:
        if not isolated:
            namespace.adopt_orphans()
            signal.signal(END, _end)
        try:
            target = _start(spec, out, err)
        except OSError as error:
            os.write(report, str(error).encode())
            return
        for descriptor in (report, out, err):
            os.close(descriptor)
        pid, status = os.wait()
        while pid != target:
            pid, status = os.wait()
        os.write(life, str(status).encode())
    finally:
        if not isolated:
            end_children()


def _end(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def end_children() -> None:
    """Kill and reap children until none is left; the children of the killed become ours (we adopt orphans)."""
    signal.signal(END, signal.SIG_IGN)
    try:
        while True:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                for child in _children():
                    os.kill(child, signal.SIGKILL)
                os.waitpid(-1, 0)
    except ChildProcessError:
        return


def _children() -> list[int]:
    own, children = os.getpid(), []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):  # ended meanwhile
                continue
            if parent == own:
                children.append(int(name))
    return children


def _start(spec: LaunchSpec, out: int, err: int) -> int:
    """Enter the private root, give up privileges, spawn the program; returns its pid. Raises OSError saying why not."""
    if spec.root is not None:
        try:
            namespace.build_root(spec.root)
        except OSError as error:
            raise OSError(f"sandbox: {error}") from error
        namespace.drop_privileges()
    os.chdir(spec.cwd)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if spec.file_limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (spec.file_limit, spec.file_limit))
    null = os.open("/dev/null", os.O_RDONLY)
    standard = [(os.POSIX_SPAWN_DUP2, source, number) for number, source in enumerate((null, out, err))]
    defaults = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM)
    program = find(spec.argv[0], spec.env.get("PATH", os.defpath))
    return os.posix_spawn(
        program, spec.argv, spec.env, file_actions=standard, setsid=True, setsigdef=defaults
    )


def find(program: str, search_path: str) -> str:
    """Where `program` lies on `search_path` (as the kernel would look it up); itself if it is a path."""
    if "/" in program:
        return program
    for folder in search_path.split(os.pathsep):
        candidate = os.path.join(folder, program)
        if os.access(candidate, os.X_OK) and os.path.isfile(candidate):
            return candidate
    raise FileNotFoundError(f"program '{program}' is not on the PATH {search_path}")
