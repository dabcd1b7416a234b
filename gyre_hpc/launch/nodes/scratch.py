"""What a run keeps on a node outside its run folder: one folder per job and run, below a node-local base.

    BASE/gyre-JOB-RUN/NAME    temporary files of one process (TMPDIR); emptied when it starts, removed when it ends
    BASE/gyre-JOB-RUN/cache   compiled kernels and the like, shared by the job's processes on the node

JIT caches on a home directory of NFS have stopped whole jobs (stale file handles). Regions lie beside it in memory
(`transport.region_files`). What a killed process left goes with the job: at its end, and when it starts again after a requeue,
`python -m gyre_hpc.launch.nodes.scratch --run RUN` on every node removes both, and the folders of the run's other jobs that Slurm says
have ended; a folder is the run's if its file MARK says so. A base that a node lacks is passed over. From
here too go the KV pages that the run's cells shared (`kv.shared`), and what runs that are no more have left (`leftovers`).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from gyre_hpc.config import RunConfig, load_run_config
from gyre_hpc.config_cluster import ClusterConfig
from gyre_hpc.errors import GyreError, MissingInput, StorageFull
from gyre_hpc.kv.shared import shared_folder
from gyre_hpc.launch.nodes import leftovers
from gyre_hpc.layout import RunLayout
from gyre_hpc.transport.region_files import (
    make_private,
    regions_folder,
    remove_bare,
    remove_leftovers,
    run_folder,
)
from gyre_hpc.transport.regions import run_key
from gyre_hpc.transport.rendezvous import read_secret

BASES: Final = ("SLURM_TMPDIR", "TMPDIR")
"""Where sites put a job's own folder, by habit; /tmp comes last."""
CACHES: Final = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "cuda",
    "HF_HOME": "huggingface",
    "XDG_CACHE_HOME": "xdg",
}
"""Caches that lie in the home directory unless told otherwise."""


def base_folder(given: str, env: Mapping[str, str] = os.environ) -> Path:
    """`cluster.scratch`, else the first of `BASES` that exists here and may be written to, else /tmp."""
    named = [Path(os.path.expandvars(given))] if given else []
    for folder in (*named, *(Path(env[name]) for name in BASES if env.get(name))):
        if folder.is_dir() and os.access(folder, os.W_OK):
            return folder.absolute()
    return Path("/tmp")


def job_folder(given: str, layout: RunLayout, env: Mapping[str, str] = os.environ) -> Path:
    """The folder of this job and run on this node; made by `entered`."""
    return _folder_of(env.get("SLURM_JOB_ID", "local"), given, layout, env)


def _folder_of(job: str, given: str, layout: RunLayout, env: Mapping[str, str]) -> Path:
    run = hashlib.sha256(os.fsencode(layout.root.resolve())).hexdigest()[:12]
    return base_folder(given, env) / f"gyre-{job}-{run}"


@contextlib.contextmanager
def entered(given: str, layout: RunLayout, name: str) -> Iterator[Path]:
    """Let this process and its children put temporary files and caches there, and nowhere else. Raises StorageFull."""
    job = job_folder(given, layout)
    own, cache = job / name, job / "cache"
    try:
        held = _made(job, own, cache, layout)
        regions = _marked_regions(layout)
    except OSError as error:
        raise StorageFull(
            f"{own}: {error.strerror}", fix="set cluster.scratch to a node-local folder with space"
        ) from error
    job.chmod(0o700)
    os.environ["TMPDIR"] = tempfile.tempdir = str(own)
    for variable, folder_name in CACHES.items():
        os.environ.setdefault(variable, str(cache / folder_name))
    try:
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)
        with contextlib.suppress(OSError):  # caches are in use, or worth keeping until the job ends
            cache.rmdir()
        leftovers.let_go(held)
        remove_bare(job)
        if regions is not None:
            leftovers.let_go(regions[1])
            remove_bare(regions[0])


def _marked_regions(layout: RunLayout) -> tuple[Path, int] | None:
    """The run's folder in memory, held and known as its own whoever of it is killed. None for a run without a secret."""
    with contextlib.suppress(MissingInput):
        regions = run_folder(run_key(read_secret(layout)))
        return regions, _held(regions, layout)
    return None


def _made(job: Path, own: Path, cache: Path, layout: RunLayout) -> int:
    """The folders, `own` empty; nothing is written into a job's folder that is another user's. The hold on it."""
    held = _held(job, layout)
    shutil.rmtree(own, ignore_errors=True)
    make_private(job, own, cache)
    return held


def _held(folder: Path, layout: RunLayout) -> int:
    """Another process that ends, and found the folder bare, may just have removed it."""
    for last_try in (False, False, True):
        make_private(folder)
        try:
            return leftovers.hold(folder, layout)
        except FileNotFoundError:
            if last_try:
                raise
    raise AssertionError


@contextlib.contextmanager
def process_scratch(run: Path, name: str) -> Iterator[Path]:
    """`entered` for the main function of a process of a run."""
    with entered(load_run_config(run).cluster.scratch, RunLayout(run), name) as folder:
        yield folder


def remove(cluster: ClusterConfig, layout: RunLayout) -> None:
    """Remove everything of this job and run on this node; for when none of its processes is left here.

    Services of their own (`cluster.runners=external`) on a machine without Slurm live on, with their temporary files.
    """
    job = job_folder(cluster.scratch, layout)
    if cluster.runners == "external" and (job / "runner-0").exists():
        for folder in [*job.glob("cell-*"), *job.glob("processor-*")]:
            shutil.rmtree(folder, ignore_errors=True)
    else:
        shutil.rmtree(job, ignore_errors=True)
    with contextlib.suppress(GyreError):
        remove_leftovers(run_key(read_secret(layout)))


def remove_of_jobs(jobs: Sequence[str], cluster: ClusterConfig, layout: RunLayout) -> None:
    """Remove what these jobs of the run, which have ended, left on this node; only folders with the run's mark."""
    for job in jobs:
        folder = _folder_of(job, cluster.scratch, layout, os.environ)
        if leftovers.is_of(folder, layout):
            shutil.rmtree(folder, ignore_errors=True)


def mark_pages(config: RunConfig, layout: RunLayout) -> None:
    """The shared KV pages of this run are known as its own, wherever it was moved to since. Passes over a folder not seen here."""
    folder = shared_folder(config.engine, run_key(read_secret(layout)))
    if folder is not None and folder.is_dir():
        with contextlib.suppress(OSError):
            leftovers.mark(folder, layout)


def remove_pages(config: RunConfig, layout: RunLayout) -> None:
    """Remove the shared KV pages of this run, which is done for good."""
    with contextlib.suppress(GyreError):
        folder = shared_folder(config.engine, run_key(read_secret(layout)))
        if folder is not None:
            leftovers.discard(folder)


def remove_stale(config: RunConfig) -> None:
    """Remove what runs that are no more left on this node."""
    leftovers.remove_stale(leftovers.on_node(base_folder(config.cluster.scratch), regions_folder()))


def begin_to_remove_stale(config: RunConfig) -> threading.Thread:
    """Remove that, and such runs' shared KV pages, beside this process: nothing waits for it, and it may end half done."""

    def work() -> None:
        remove_stale(config)
        leftovers.remove_stale(leftovers.shared(config))

    thread = threading.Thread(target=work, name="gyre-leftovers", daemon=True)
    thread.start()
    return thread


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gyre_hpc.launch.nodes.scratch", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="run folder")
    parser.add_argument(
        "--over",
        action="store_true",
        help="the run is done for good: its shared KV pages go too, and what dead runs left on the node",
    )
    parser.add_argument("--ended", nargs="*", default=[], help="other jobs of the run, which have ended")
    args = parser.parse_args(argv)
    layout, config = RunLayout(args.run), load_run_config(args.run)
    remove_of_jobs([job for job in args.ended if job.isdigit()], config.cluster, layout)
    remove(config.cluster, layout)
    if args.over:
        remove_pages(config, layout)
        remove_stale(config)
    return 0


if __name__ == "__main__":
    sys.exit(main())
