"""Submit the points of a sweep, each as `gyre submit` would, after a look at all of them.

Every point is composed, planned and looked up on disk before the first is submitted. One that cannot be run is recorded
with its error and holds up no other. A later call with the same sweep folder leaves alone what has a job: it submits
what has none and, with `retry_failed`, goes on with those whose job Slurm says has failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from gyre_hpc.config import RunConfig, load_run_config
from gyre_hpc.controller.train import new_run
from gyre_hpc.errors import GyreError
from gyre_hpc.launch.elsewhere import service_job
from gyre_hpc.launch.job import profiles, staging
from gyre_hpc.launch.job import submit as slurm
from gyre_hpc.launch.job.state import FAILED, job_states
from gyre_hpc.layout import RunLayout
from gyre_hpc.sweep.manifest import Entry, Manifest
from gyre_hpc.sweep.pace import Pace, paced
from gyre_hpc.sweep.points import Point, run_name

CLUSTER: Final = "cluster=slurm"
"""What a point runs on unless its overrides name a cluster."""


@dataclass(frozen=True)
class Ready:
    """A point that was found fit; `layout` is its run folder where an earlier call made one."""

    point: Point
    config: RunConfig
    layout: RunLayout | None


def submit_points(
    points: Sequence[Point],
    manifest: Manifest,
    *,
    site: Path | None = None,
    retry_failed: bool = False,
    pace: Pace = Pace(),  # noqa: B008 (frozen)
    tell: Callable[[str], None],
) -> list[Entry]:
    """Submit what is to be submitted of `points`, telling a line about each; what is recorded of each afterwards."""
    slurm.check_slurm()
    for point in points:
        if manifest.find(point) is None:
            manifest.record(point, time=_now())
    wanted = _wanted(points, manifest, retry_failed=retry_failed, tell=tell)
    ready = [fit for point in wanted if (fit := _checked(point, manifest, site, tell)) is not None]
    paced(
        ready,
        manifest,
        pace,
        lambda each: _submitted(each, manifest),
        lambda each, entry: tell(_line(entry) if entry else f"{each.point.label}: left for later, {pace}"),
    )
    return [entry for point in points if (entry := manifest.find(point)) is not None]


def _wanted(
    points: Sequence[Point], manifest: Manifest, *, retry_failed: bool, tell: Callable[[str], None]
) -> list[Point]:
    jobs = {entry.point.identity: manifest.job_of(entry) for entry in manifest.entries}
    states = job_states([job for job in jobs.values() if job]) if retry_failed else {}
    wanted = {}
    for point in points:
        job = jobs.get(point.identity)
        if job is None or states.get(job) in FAILED:
            wanted[point.identity] = point
        else:
            tell(f"{point.label}: submitted before, as job {job}")
            _adopt(point, job, manifest)
    return list(wanted.values())


def _adopt(point: Point, job: str, manifest: Manifest) -> None:
    """Record a job that is found in the run folder only."""
    entry = manifest.find(point)
    if entry is not None and entry.job != job:
        manifest.record(point, run=manifest.run_of(entry), job=job, time=_now())


def _checked(
    point: Point, manifest: Manifest, site: Path | None, tell: Callable[[str], None]
) -> Ready | None:
    entry = manifest.find(point)
    layout = manifest.run_of(entry) if entry else None
    try:
        config = _configured(point, site, layout)
        slurm.script_for(config, layout or profiles.planned(config))
        staging.check_staged(config, layout)
    except GyreError as error:
        tell(_line(manifest.record(point, run=layout, error=str(error), time=_now())))
        return None
    return Ready(point, config, layout)


def _configured(point: Point, site: Path | None, layout: RunLayout | None) -> RunConfig:
    """The point's configuration; of a run that exists, its own with the job request of this call."""
    named = any(word.startswith(("cluster=", "cluster.kind=")) for word in point.overrides)
    config = profiles.composed([*([] if named else [CLUSTER]), *point.overrides], site)
    if layout is None:
        config.name = run_name(config.name, point)
        return config
    frozen = load_run_config(layout.root)
    frozen.cluster.job = config.cluster.job
    return frozen


def _submitted(ready: Ready, manifest: Manifest) -> Entry:
    entry = manifest.find(ready.point)
    layout = ready.layout or (manifest.run_of(entry) if entry else None)  # made by a try that was refused
    try:
        if layout is None:
            layout = new_run(ready.config)
            manifest.record(ready.point, run=layout, time=_now())
        taken = service_job.submit_both(ready.config, layout)
    except GyreError as error:
        return manifest.record(ready.point, run=layout, error=str(error), time=_now())
    return manifest.record(ready.point, run=layout, job=taken.job, time=_now())


def _line(entry: Entry) -> str:
    said = f"error: {entry.error}" if entry.error else f"job {entry.job}, run {entry.run}"
    return f"{entry.point.label}: {said}"


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)
