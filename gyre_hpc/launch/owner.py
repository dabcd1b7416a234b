"""Who owns a run folder: exactly one controller at a time, proved by exclusive file creation.

`owner` is created O_EXCL by the first controller, `owner.<epoch>` by each that takes over. The highest epoch owns the
run and fences the rest: every message carries it. Taking over is allowed to a later restart of the same Slurm job, when
Slurm calls the owner's job terminal, on the same host when the owning process is gone, to anyone when the owner ended in order
(`release`), and with `force` otherwise.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import msgspec

from gyre_hpc.errors import CorruptRecord, RunOwned
from gyre_hpc.files import replace_file
from gyre_hpc.launch.identity import ProcessIdentity, job_id, job_restarts
from gyre_hpc.launch.job.state import ENDED, job_state

RELEASED = "released"
"""File with the epoch of the newest controller that ended in order."""


class Owner(msgspec.Struct, frozen=True):
    """Identity of a controller process. `job` is "" outside Slurm; `process_start` is psutil's create time."""

    epoch: int
    job: str
    restart_count: int
    host: str
    boot_id: str
    pid: int
    process_start: float


def current_owner(epoch: int) -> Owner:
    """This process as an owner of `epoch`."""
    me = ProcessIdentity.own()
    return Owner(
        epoch=epoch,
        job=job_id(),
        restart_count=job_restarts(),
        host=me.host,
        boot_id=me.boot_id,
        pid=me.pid,
        process_start=me.process_start,
    )


def owner_path(run: Path, epoch: int) -> Path:
    """File of the owner of `epoch`; epochs start at 1."""
    return run / ("owner" if epoch == 1 else f"owner.{epoch}")


def read_owner(run: Path) -> Owner | None:
    """The owner with the highest epoch, or None for a folder nobody has owned."""
    epochs = [1] if (run / "owner").exists() else []
    epochs += [int(path.suffix[1:]) for path in run.glob("owner.*") if path.suffix[1:].isdigit()]
    if not epochs:
        return None
    path = owner_path(run, max(epochs))
    try:
        return msgspec.json.decode(path.read_bytes(), type=Owner)
    except msgspec.MsgspecError as error:
        raise CorruptRecord(
            f"{path}: not an owner record ({error})",
            fix="if no controller of this run is alive, remove the file",
        ) from error


def acquire(run: Path, *, force: bool = False) -> Owner:
    """Own the run folder. Raises RunOwned naming the live (or unprovably dead) owner."""
    previous = read_owner(run)
    if previous is not None and not force and _released(run) != previous.epoch:
        reason = _why_alive(previous)
        if reason:
            raise RunOwned(
                f"{run} is owned by pid {previous.pid} on {previous.host} (epoch {previous.epoch}): {reason}",
                fix="stop that run first, or pass resume_force=true if you know that it is gone",
            )
    epoch = 1 if previous is None else previous.epoch + 1
    owner = current_owner(epoch)
    path = owner_path(run, epoch)
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        raise RunOwned(
            f"{path}: another controller has just taken this run", fix="leave it to that one"
        ) from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(owner))
        file.flush()
        os.fsync(file.fileno())
    return owner


def why_alive(run: Path) -> str:
    """Why a controller of this run may be alive; "" when none has owned the folder or the last is provably gone."""
    owner = read_owner(run)
    return "" if owner is None or _released(run) == owner.epoch else _why_alive(owner)


def release(run: Path, owner: Owner) -> None:
    """The controller of `owner` has ended in order: anyone may go on, wherever it starts and whatever Slurm still knows."""
    replace_file(run / RELEASED, f"{owner.epoch}\n".encode())


def _released(run: Path) -> int:
    """The newest epoch that ended in order, 0 if none did."""
    try:
        return int((run / RELEASED).read_text())
    except (FileNotFoundError, ValueError):
        return 0


def run_of_job(root: Path, job: str) -> Path | None:
    """The run below `root` that this Slurm job owned last; None if there is none."""
    folders = {path.parent for path in root.glob("*/owner*")}
    owners = [(folder, read_owner(folder)) for folder in sorted(folders)]
    return next((folder for folder, owner in owners if owner is not None and owner.job == job), None)


def jobs_of_run(run: Path) -> frozenset[str]:
    """Every Slurm job whose controller has owned this run; unreadable records count for nothing."""
    found = set[str]()
    for path in run.glob("owner*"):
        with contextlib.suppress(msgspec.MsgspecError, OSError):
            found.add(msgspec.json.decode(path.read_bytes(), type=Owner).job)
    return frozenset(found - {""})


def _why_alive(owner: Owner) -> str:
    """Why the owner may still be alive; "" when it is provably gone."""
    job = job_id()
    if owner.job and owner.job == job:
        restarts = job_restarts()
        if restarts > owner.restart_count:
            return ""
    if owner.host == socket.gethostname():
        return "" if process_gone(owner) else "that process is alive"
    if owner.job:
        state = job_state(owner.job)
        return "" if state in ENDED else f"Slurm job {owner.job} is {state or 'in an unknown state'}"
    return "it runs on another host and cannot be checked from here"


def process_gone(owner: Owner) -> bool:
    """Whether the owner, of this host, has ended."""
    return ProcessIdentity(owner.host, owner.boot_id, owner.pid, owner.process_start).gone()
