"""Folders that a run keeps outside its run folder, and which of them nobody will need any more.

Each names its run in a file MARK: the job's folder on a node (`scratch`), the run's regions in memory
(`transport.region_files`), its KV pages on a file system that cells share (`kv.shared`). What a run still needs after its
controller has ended is not removed by others: a folder is *stale* when its run has nobody left (`nobody_left`: the rule by
which a run may be taken over, and no job of it that Slurm still knows), and the folder was not used for KEPT_S, in which a
person may resume the run. Of a run folder that is gone, or lies where this host does not see it, only the time counts. Whatever
else is true, a folder that a process holds (`hold`: a lock on its mark) is in use. Folders of other users, and those without a
mark, are left alone. Called by controllers and cell hosts beside their start, and on each node as a run ends for good.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from gyre_hpc.config import RunConfig
from gyre_hpc.errors import GyreError
from gyre_hpc.launch.elsewhere.services import read_service
from gyre_hpc.launch.incarnations import OUTLIVE
from gyre_hpc.launch.job.state import gone
from gyre_hpc.launch.owner import jobs_of_run, why_alive
from gyre_hpc.layout import RunLayout
from gyre_hpc.transport.region_files import MARK, unheld

log = logging.getLogger(__name__)

KEPT_S: Final = 24 * 3600.0
"""Seconds for which a dead run finds its folders again when it is resumed, whoever else starts meanwhile."""
_GOING: Final = ".going-"
"""A folder that is being removed is renamed first: who still writes into it finds it gone, and fills no half of it."""
_SUBMISSION: Final = "_submission.sh"


def mark(folder: Path, layout: RunLayout, *, anew: bool = True) -> None:
    """Say whose folder it is, unless it says so (`anew=False`: a run may have been moved since, or be seen elsewhere)."""
    path = folder / MARK
    if anew or not path.exists():
        path.write_bytes(_mark_of(layout))


def hold(folder: Path, layout: RunLayout, *, anew: bool = True) -> int:
    """Mark the folder and keep it from others' removal as long as the descriptor returned is open, or this process lives.

    Raises OSError; FileNotFoundError where somebody has just removed it.
    """
    mark(folder, layout, anew=anew)
    handle = os.open(folder / MARK, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without flock
            fcntl.flock(handle, fcntl.LOCK_SH)
        (folder / MARK).stat()
    except OSError:
        os.close(handle)
        raise
    return handle


def let_go(held: int) -> None:
    """What `hold` returned is held no longer, not even by a child that was forked meanwhile."""
    with contextlib.suppress(OSError):
        fcntl.flock(held, fcntl.LOCK_UN)
    os.close(held)


def _mark_of(layout: RunLayout) -> bytes:
    return os.fsencode(layout.root.resolve()) + b"\n"


def is_of(folder: Path, layout: RunLayout) -> bool:
    """Whether the folder is marked as this run's. A link to one is not."""
    with contextlib.suppress(OSError):
        return not folder.is_symlink() and (folder / MARK).read_bytes() == _mark_of(layout)
    return False


def discard(folder: Path) -> None:
    """Remove a folder under which others may still write; they find it gone from here on."""
    shutil.rmtree(_renamed(folder), ignore_errors=True)


def _renamed(folder: Path) -> Path:
    if folder.name.startswith(_GOING):
        return folder
    going = folder.with_name(_GOING + folder.name)
    shutil.rmtree(going, ignore_errors=True)  # left by a removal that was cut short
    with contextlib.suppress(OSError):
        folder.rename(going)
    return going


def jobs_known(layout: RunLayout) -> frozenset[str]:
    """Every Slurm job the run was submitted as, was owned by, or has its services in."""
    jobs = {path.name.removesuffix(_SUBMISSION) for path in layout.jobs.glob(f"[0-9]*{_SUBMISSION}")}
    with contextlib.suppress(OSError):
        jobs.add(layout.service_job.read_text().strip())
    return frozenset(jobs | jobs_of_run(layout.root)) - {""}


def nobody_left(layout: RunLayout) -> bool:
    """Whether no controller of the run is alive, none of its jobs runs or waits, and no service of it lives on this host."""
    try:
        if why_alive(layout.root):
            return False
    except GyreError as error:
        log.info("%s", error)
        return False
    for record in (read_service(layout, kind) for kind in OUTLIVE):
        if record is not None and record.process.here and not record.process.gone():
            return False
    jobs = sorted(jobs_known(layout))
    return set(jobs) <= gone(jobs)


def stale(folder: Path, now: float) -> bool:
    """Whether nobody needs this marked folder any more. One whose removal has begun needs no mark."""
    try:
        seen = folder.lstat()
        if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.getuid():
            return False
        if folder.name.startswith(_GOING):
            return True
        run = Path(os.fsdecode((folder / MARK).read_bytes().removesuffix(b"\n")))
        if now - _last_use(folder) < KEPT_S:
            return False
        return not (run / "config.yaml").is_file() or nobody_left(RunLayout(run))
    except OSError:
        return False


def remove_stale(folders: Iterable[Path], now: float | None = None) -> list[Path]:
    """Remove those of `folders` that are stale; which."""
    now = time.time() if now is None else now
    found = []
    for folder in folders:
        if not stale(folder, now):
            continue
        with unheld(folder) as free:
            going = _renamed(folder) if free else folder
        if free:
            log.info("removed: %s, left by a run that is no more", folder)
            shutil.rmtree(going, ignore_errors=True)
            found.append(folder)
    return found


def on_node(base: Path, memory: Path) -> Iterator[Path]:
    """Folders of any run on this node's disk and in its memory."""
    for place in dict.fromkeys((base, memory)):
        yield from _listed(place, "gyre-*")
        yield from _listed(place, f"{_GOING}gyre-*")


def shared(config: RunConfig) -> Iterator[Path]:
    """Folders of any run where `config` has cells share KV pages."""
    if config.engine.sglang.kv_folder:
        yield from _listed(Path(config.engine.sglang.kv_folder), "*")


def _listed(place: Path, pattern: str) -> list[Path]:
    """Nothing of a place that cannot be read."""
    try:
        return list(place.glob(pattern))
    except OSError as error:
        log.warning("%s: %s; leftovers there stay", place, error)
        return []


def _last_use(folder: Path) -> float:
    """When something was last made or removed in the folder, or a controller of its run has marked it."""
    return max(folder.stat().st_mtime, (folder / MARK).stat().st_mtime)
