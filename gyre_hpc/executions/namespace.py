"""A private root for one process, made with system calls alone: user, mount, pid and IPC namespaces.

Called in a freshly forked, single-threaded child of the fork server (standard library only); needs no privilege and no
container runtime.
Invariants once `build_root` has returned: the process sees the listed host folders read-only, its own binds, private
/tmp, /dev and /proc, and nothing else of the host; every mount but the writable binds, /tmp and /dev/shm is read-only.
After `drop_privileges` no capability can come back, so the mounts cannot be changed from inside. The network stays the
host's (the gateway is on loopback). The user keeps their own id; nothing here is setuid.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 0x1, 0x2, 0x4, 0x8
MS_REMOUNT, MS_NOATIME, MS_NODIRATIME, MS_BIND, MS_REC = 0x20, 0x400, 0x800, 0x1000, 0x4000
MS_PRIVATE, MS_RELATIME, MS_STRICTATIME = 1 << 18, 1 << 21, 1 << 24
MNT_DETACH = 2
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID = 0x20000, 0x08000000, 0x10000000, 0x20000000
CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 24, 36, 38
LAST_CAPABILITY = 63
"""The kernel refuses numbers it does not have; 63 is the width of its capability set."""

SHARED_MEMORY = "size=1g,mode=1777"
"""/tmp and /dev/shm live in memory: a runaway task must not take the node's."""
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
DEVICE_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "fd/0",
    "stdout": "fd/1",
    "stderr": "fd/2",
    "ptmx": "pts/ptmx",
}
KERNEL_SETTINGS = ("sys", "sysrq-trigger", "irq", "bus", "fs")
"""Parts of /proc that global uid 0 may write without any capability: read-only, for runs started as root."""
HOST = "/.host"

_libc = ctypes.CDLL(None, use_errno=True)


class Bind(NamedTuple):
    """The host's `source` (folder or file) shown at `target`."""

    source: str
    target: str
    writable: bool = False


class Root(NamedTuple):
    """What a private root shows: host folders at their own path, minus `hidden` ones, plus `binds`."""

    system: tuple[str, ...]
    hidden: tuple[str, ...]
    binds: tuple[Bind, ...]


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    arguments = (
        source.encode(),
        target.encode(),
        kind.encode() or None,
        ctypes.c_ulong(flags),
        data.encode() or None,
    )
    _check(_libc.mount(*arguments), f"mount {source} on {target}")


def die_with_parent(signal_number: int) -> None:
    """The kernel sends this process `signal_number` when its parent ends, however it ends."""
    _check(_libc.prctl(PR_SET_PDEATHSIG, signal_number, 0, 0, 0), "prctl PDEATHSIG")


def adopt_orphans() -> None:
    """Descendants whose parent ends become children of this process (what pid 1 is inside a pid namespace)."""
    _check(_libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl CHILD_SUBREAPER")


def unshare(kinds: int = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC) -> None:
    """Enter a new user namespace and namespaces of these kinds; with NEWPID the next child forked is pid 1 of it."""
    uid, gid = os.getuid(), os.getgid()
    _check(_libc.unshare(CLONE_NEWUSER | kinds), "unshare user namespace")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def drop_privileges() -> None:
    """Give up every capability for good: the exec that follows gains none, setuid programs included."""
    _check(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl NO_NEW_PRIVS")
    for capability in range(LAST_CAPABILITY + 1):
        if _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break


def build_root(root: Root) -> None:
    """Make the private root and enter it. Called as pid 1 of the new pid namespace; any failure raises OSError."""
    _mount("none", "/", flags=MS_REC | MS_PRIVATE)
    _mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
    os.mkdir("/tmp" + HOST)
    _check(_libc.pivot_root(b"/tmp", b"/tmp" + HOST.encode()), "pivot_root")
    os.chdir("/")
    _private_folders()
    for path in root.system:
        _mirror(path)
    for path in root.hidden:
        if os.path.isdir(path):
            _mount("tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV)
        elif os.path.exists(path):
            _mount("/dev/null", path, flags=MS_BIND)
    for bind in root.binds:
        _bind(HOST + bind.source, bind.target)
    sealed = [*root.system, *(bind.target for bind in root.binds if not bind.writable)]
    sealed += [f"/proc/{name}" for name in KERNEL_SETTINGS if os.path.exists(f"/proc/{name}")]
    _seal(sealed, [*root.hidden, *(bind.target for bind in root.binds if bind.writable)])
    _check(_libc.umount2(HOST.encode(), MNT_DETACH), "umount host root")
    os.rmdir(HOST)
    _mount("none", "/", flags=MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def _mirror(path: str) -> None:
    source = HOST + path
    if os.path.islink(source):
        os.symlink(os.readlink(source), path)
    else:
        _bind(source, path)


def _bind(source: str, target: str) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    elif not os.path.exists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(source, target, flags=MS_BIND | MS_REC)


def _private_folders() -> None:
    for folder in ("/tmp", "/var/tmp", "/run", "/dev/shm", "/dev/pts", "/proc"):
        os.makedirs(folder, exist_ok=True)
    _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    for name in KERNEL_SETTINGS:
        if os.path.exists(f"/proc/{name}"):
            _mount(f"/proc/{name}", f"/proc/{name}", flags=MS_BIND | MS_REC)
    _mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, SHARED_MEMORY)
    _mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, SHARED_MEMORY)
    _mount("devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")
    for name in DEVICES:
        _bind(f"{HOST}/dev/{name}", f"/dev/{name}")
    for name, target in DEVICE_LINKS.items():
        os.symlink(target, f"/dev/{name}")


def _seal(sealed: Sequence[str], spared: Sequence[str]) -> None:
    """Remount every mount at or under `sealed` read-only, each with the flags the kernel has locked on it."""
    for point, options in _mounts():
        inside = max((len(path) for path in sealed if _within(point, path)), default=-1)
        apart = max((len(path) for path in spared if _within(point, path)), default=-1)
        if inside > apart:
            _mount("none", point, flags=MS_REMOUNT | MS_BIND | MS_RDONLY | _locked_flags(options))


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _mounts() -> Iterator[tuple[str, frozenset[str]]]:
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        lines = file.read().splitlines()
    for line in lines:
        fields = line.split(" ")
        point = fields[4]
        for code, character in ((r"\040", " "), (r"\011", "\t"), (r"\012", "\n"), (r"\134", "\\")):
            point = point.replace(code, character)
        yield point, frozenset(fields[5].split(","))


def _locked_flags(options: frozenset[str]) -> int:
    names = {"nosuid": MS_NOSUID, "nodev": MS_NODEV, "noexec": MS_NOEXEC, "nodiratime": MS_NODIRATIME}
    flags = sum(flag for name, flag in names.items() if name in options)
    if "noatime" in options:
        return flags | MS_NOATIME
    return flags | (MS_RELATIME if "relatime" in options else MS_STRICTATIME)
