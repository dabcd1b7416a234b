"""One command at a time submits the points of a sweep: `lock` in the sweep folder, created O_EXCL by who does.

It names its owner. One that was killed is found out on its own host and succeeded; from another host it cannot be told
from one that lives, and the error says what to remove. `gyre sweep status|collect` only read and take no lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from gyre_hpc.errors import RunOwned
from gyre_hpc.launch.owner import Owner, current_owner, process_gone

FILE_NAME: Final = "lock"


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold the sweep folder, which is made if need be. Raises RunOwned naming who holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE_NAME
    with _alone_on_this_host(folder):
        _remove_if_dead(path)
        _create(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _create(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        owner = _owner(path)
        who = f"pid {owner.pid} on {owner.host}" if owner else "another command"
        raise RunOwned(
            f"{path.parent}: {who} submits this sweep",
            fix=f"wait for it; if it is gone for sure, remove {path}",
        ) from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(current_owner(1)))
        file.flush()
        os.fsync(file.fileno())


def _remove_if_dead(path: Path) -> None:
    owner, own = _owner(path), current_owner(1)
    if owner is not None and owner.host == own.host and process_gone(owner):
        path.unlink(missing_ok=True)


def _owner(path: Path) -> Owner | None:
    """Who created the file; None where it is not there, or not written yet."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Owner)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


@contextlib.contextmanager
def _alone_on_this_host(folder: Path) -> Iterator[None]:
    """While a dead owner's lock is replaced; only commands of its own host do that, so that a host's own lock will do."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: two at this instant are not met
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
