"""How the points of a sweep stand (`gyre sweep status`) and what they came to (`gyre sweep collect`).

A state is Slurm's word. Where Slurm has forgotten the job, a run folder whose summary has all its steps counts as
finished; otherwise the state is unknown, which is never taken for an end. Steps and scores come from the run folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from rich.table import Table

from gyre_hpc.config import load_run_config
from gyre_hpc.errors import GyreError
from gyre_hpc.launch.job.state import job_states
from gyre_hpc.layout import RunLayout
from gyre_hpc.report.summary import Summary, summarise
from gyre_hpc.sweep.manifest import Entry, Manifest
from gyre_hpc.sweep.points import Point

NOT_SUBMITTED: Final = "not submitted"
FINISHED: Final = "finished"
UNKNOWN: Final = "unknown"


@dataclass(frozen=True)
class Progress:
    """What a run folder tells: steps that count of those asked for, the newest held-out score."""

    steps: int
    asked: int
    score: float | None
    summarised: bool


@dataclass(frozen=True)
class Standing:
    """One point: its job and state, and its progress where its run has a configuration to read."""

    label: str
    job: str | None
    state: str
    progress: Progress | None
    error: str | None


class Result(msgspec.Struct, frozen=True):
    """One point of `gyre sweep collect --json`: `summary` is None where there is none, and `missing` says why."""

    overrides: tuple[str, ...]
    swept: tuple[str, ...]
    run: str | None
    steps_asked: int | None
    summary: Summary | None
    missing: str | None

    @property
    def label(self) -> str:
        return Point(self.overrides, self.swept).label


def standings(manifest: Manifest) -> list[Standing]:
    """Every point of the sweep as it stands."""
    jobs = [manifest.job_of(entry) for entry in manifest.entries]
    states = job_states([job for job in jobs if job])
    return [
        _standing(manifest, entry, job, states) for entry, job in zip(manifest.entries, jobs, strict=True)
    ]


def _standing(manifest: Manifest, entry: Entry, job: str | None, states: Mapping[str, str]) -> Standing:
    layout = manifest.run_of(entry)
    progress = _progress(layout) if layout else None
    return Standing(
        entry.point.label, job, state_of(job, states, progress), progress, _first_line(entry.error)
    )


def state_of(job: str | None, states: Mapping[str, str], progress: Progress | None) -> str:
    """Slurm's state; without one, what the run folder proves."""
    if job is None:
        return NOT_SUBMITTED
    if job in states:
        return states[job]
    done = progress is not None and progress.summarised and progress.steps >= progress.asked
    return FINISHED if done else UNKNOWN


def _progress(layout: RunLayout) -> Progress | None:
    try:
        asked = load_run_config(layout.root).schedule.steps
        summary = _summary(layout)
        now = summary or (summarise(layout.metrics) if layout.metrics.exists() else None)
    except (GyreError, msgspec.MsgspecError):
        return None
    if now is None:
        return Progress(0, asked, None, summarised=False)
    score = now.score_before if now.score_after is None else now.score_after
    return Progress(now.steps, asked, score, summarised=summary is not None)


def _summary(layout: RunLayout) -> Summary | None:
    if not layout.summary.exists():
        return None
    return msgspec.json.decode(layout.summary.read_bytes(), type=Summary)


def status_lines(points: Sequence[Standing]) -> list[str]:
    """One line per point: overrides, job, state, step, score, and what prevented it."""
    rows = [_cells(point) for point in points]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(5)]
    lines = []
    for row, point in zip(rows, points, strict=True):
        text = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append((text + (f"  error: {point.error}" if point.error else "")).rstrip())
    return lines


def _cells(point: Standing) -> tuple[str, str, str, str, str]:
    progress = point.progress
    step = f"step {progress.steps}/{progress.asked}" if progress else "-"
    return (
        point.label,
        f"job {point.job}" if point.job else "-",
        point.state,
        step,
        f"score {_number(progress.score if progress else None)}",
    )


def results(manifest: Manifest) -> list[Result]:
    """The summary of every point, with the reason where there is none."""
    return [_result(manifest, entry) for entry in manifest.entries]


def _result(manifest: Manifest, entry: Entry) -> Result:
    asked, summary, missing = None, None, None
    layout = manifest.run_of(entry)
    try:
        if layout is None:
            missing = _first_line(entry.error) or (
                f"{entry.run}: no such run folder" if entry.run else NOT_SUBMITTED
            )
        else:
            asked = load_run_config(layout.root).schedule.steps
            summary = _summary(layout)
            missing = None if summary else f"{entry.run}: no {layout.summary.name}"
    except (GyreError, msgspec.MsgspecError) as error:
        missing = f"{entry.run}: {error}"
    return Result(entry.overrides, entry.swept, entry.run, asked, summary, missing)


def _first_line(text: str | None) -> str | None:
    return text.splitlines()[0] if text else None


def table(points: Iterable[Result]) -> Table:
    """The points that have a summary."""
    shown = Table("point", "before", "after", "steps", "wall", "staleness")
    for point in points:
        if point.summary is not None:
            of = point.summary
            shown.add_row(
                point.label,
                _number(of.score_before),
                _number(of.score_after),
                f"{of.steps}/{point.steps_asked}",
                f"{of.wall_s:.0f} s",
                _number(of.staleness_mean, 2),
            )
    return shown


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
