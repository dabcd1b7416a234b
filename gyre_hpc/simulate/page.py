"""`simulation.html`: one self-contained page in the style of a live run's report (`report/html.py`)."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from statistics import fmean

from gyre_hpc.report import comparisons, figures, tables
from gyre_hpc.report.html import page, plot, section
from gyre_hpc.report.intervals import Interval
from gyre_hpc.simulate.outcome import Outcome
from gyre_hpc.simulate.views import Designs, duration, idle_by_cause, in_words, metric_lines, recorded


def render(
    title: str,
    about: str,
    designs: Designs,
    ladder: Mapping[str, Interval],
    paper: Mapping[str, float],
    curves: Mapping[str, Mapping[float, Interval]],
) -> str:
    """The page; sections whose numbers are absent are left out."""
    parts = []
    if ladder:
        told = "Time per optimizer step over the reference design's; error bars: 95 % interval over seeds."
        parts.append(section("Ladder", told, plot(comparisons.ladder(ladder, paper), "ladder")))
    shares = idle_by_cause(designs)
    if shares:
        told = "Device time without tokens or micro-steps, over all device time."
        parts.append(section("Idle time by cause", told, plot(comparisons.idle_by_design(shares), "idle")))
    if curves:
        told = "The same data per step on more nodes; dotted: the fastest design with ideal scaling."
        parts.append(
            section("Time against nodes", told, plot(comparisons.time_against_nodes(curves), "nodes"))
        )
    if designs:
        parts.append(section("Numbers", "Means over seeds; 95 % interval of the time.", _numbers(designs)))
    for index, (name, run) in enumerate(recorded(designs).items()):
        figure = figures.role_timeline(metric_lines(run))
        words = f"{html.escape(in_words(run))}. Thin vertical lines: optimizer steps."
        parts.append(
            section(f"Roles under the waterlevel: {html.escape(name)}", words, plot(figure, f"roles-{index}"))
        )
    return page(title, about, "".join(parts))


def _numbers(designs: Designs) -> str:
    """One row per design."""
    heads = (
        "design",
        "time per step",
        "interval",
        "mean staleness",
        "idle share",
        "switches",
        "written off",
        "seeds",
    )
    longest = max((run.seconds for runs in designs.values() for run in runs), default=0.0)
    return tables.table(heads, [_row(name, runs, longest) for name, runs in designs.items() if runs])


def _row(name: str, runs: Sequence[Outcome], longest: float) -> tuple[object, ...]:
    taken = [run for run in runs if run.published]
    if not taken:
        return (name, in_words(runs[0]), *("-",) * 5, len(runs))
    time = Interval.of([run.seconds_per_step() for run in taken])
    return (
        name,
        duration(time.mean, longest),
        f"{duration(time.low, longest)} to {duration(time.high, longest)}" if time.known else "-",
        f"{fmean(run.staleness for run in taken):.2f}",
        f"{fmean(sum(run.idle_shares().values()) for run in taken):.1%}",
        f"{fmean(run.switches for run in taken):.0f}",
        f"{fmean(run.written_off for run in taken):.1f}",
        len(runs),
    )
