"""Pictures of simulated runs for papers and slides: the plots of `report/figures.py` and `report/comparisons.py`, printed.

Each function takes the same numbers as its namesake there and uses the same colours. 8 inches wide: readable on a page
and, at 150 dots per inch, on a screen of 1200 pixels. No window system and no global state: figures are plain objects.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

from gyre_hpc.report import figures as look
from gyre_hpc.report import metrics as m
from gyre_hpc.report.comparisons import ideal_scaling
from gyre_hpc.report.intervals import Interval
from gyre_hpc.report.spans import BLUE, ROLE_COLOURS, WORDS, role_spans

WIDTH, DPI = 8.0, 300
LEFT, RIGHT = 0.95, 0.25
"""Inches left and right of the axes."""
ROW, CELL_ROW, WATER = 0.3, 0.2, 1.9
"""Inches: a design's bar, a cell's bar, the waterlevel."""
MANY = 16
"""More cells than these have half the height, and every fourth is named."""
STYLE: Any = {
    "font.size": 9.0,
    "axes.edgecolor": look.MUTED,
    "axes.labelcolor": look.MUTED,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": look.GRID,
    "grid.linewidth": 0.7,
    "xtick.color": look.MUTED,
    "ytick.color": look.MUTED,
    "xtick.labelcolor": look.INK,
    "ytick.labelcolor": look.INK,
    "text.color": look.INK,
}
DOTS = (0, (1, 2))
BESIDE: dict[str, Any] = {"textcoords": "offset points", "va": "center"}
PAPER_MARK: dict[str, Any] = {
    "markerfacecolor": look.PAPER,
    "markeredgecolor": look.INK,
    "markersize": 5.5,
    "zorder": 4,
}
styled = matplotlib.rc_context(STYLE)


def save(figure: Figure, path: Path) -> Path:
    """Write it; the same figure gives the same bytes."""
    figure.savefig(path, dpi=DPI, facecolor=look.PAPER, metadata={"Software": None})
    return path


@styled
def role_timeline(lines: Sequence[m.AnyMetric], title: str, about: str = "") -> Figure:
    """Waterlevel and capacity over the role of every cell; a thin line at each optimizer step."""
    spans = role_spans(lines, lines[-1].t)
    cells = sorted({cell for cell, *_ in spans})
    unit, word = look.time_unit(lines[-1].t)
    rows = (CELL_ROW if len(cells) <= MANY else CELL_ROW / 2) * len(cells)
    head, gap, foot = 0.62, 0.4, 0.48
    figure = Figure((WIDTH, head + WATER + gap + rows + foot))
    water = _axes(figure, head, WATER)
    roles = _axes(figure, head + WATER + gap, rows)
    _heading(figure, title, about)
    _water(water, [line for line in lines if isinstance(line, m.Water)], lines[-1].t, unit)
    used = _roles(roles, spans, cells, unit)
    _joins(roles, [line for line in lines if isinstance(line, m.Join) and line.mid_batch], cells, unit)
    _steps(water, roles, [line.t / unit for line in lines if isinstance(line, m.Step)])
    for axes in (water, roles):
        axes.set_xlim(0, lines[-1].t / unit)
    water.tick_params(labelbottom=False)
    roles.set_xlabel(f"{word} since the start")
    marks = [(look.WATER, "waterlevel (unfinished executions)"), (look.CAPACITY, "rollout capacity")]
    _key(water, [*(_line(*mark) for mark in marks), _line(look.MUTED, "optimizer step", dotted=True)])
    _key(roles, [_square(colour, role) for role, colour in ROLE_COLOURS.items() if role in used])
    return figure


def _water(axes: Axes, water: Sequence[m.Water], end: float, unit: float) -> None:
    times = [*(line.t / unit for line in water), end / unit]
    level = [line.waterlevel for line in [*water, *water[-1:]]]
    capacity = [line.capacity for line in [*water, *water[-1:]]]
    times = times[: len(level)]
    axes.fill_between(times, level, step="post", color=BLUE, alpha=look.FILL_OPACITY, linewidth=0)
    axes.step(times, capacity, where="post", color=look.CAPACITY, linewidth=1.0)
    axes.step(times, level, where="post", color=look.WATER, linewidth=1.3)
    axes.set_ylim(0, 1.05 * max([*level, *capacity, 1]))
    axes.set_ylabel("executions")
    axes.grid(axis="y")


def _roles(
    axes: Axes, spans: Sequence[tuple[int, str, float, float]], cells: Sequence[int], unit: float
) -> set[str]:
    """The words of the roles drawn. A switch keeps a hair's width, however short it is."""
    bars: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for cell, role, start, stop in spans:
        if stop > start:
            bars[cell, WORDS.get(role, "starting")].append((start / unit, (stop - start) / unit))
    for (cell, word), ranges in bars.items():
        edge = 0.6 if word == "switching" else 0.0
        place = (cells.index(cell) - 0.4, 0.8)
        colour = ROLE_COLOURS[word]
        axes.broken_barh(ranges, place, facecolor=colour, edgecolor=colour, linewidth=edge, zorder=1 + edge)
    every = 1 if len(cells) <= MANY else 4
    axes.set_yticks(range(0, len(cells), every), [f"cell {cell}" for cell in cells[::every]])
    axes.set_ylim(len(cells) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    return {word for _, word in bars}


def _joins(axes: Axes, joins: Sequence[m.Join], cells: Sequence[int], unit: float) -> None:
    axes.scatter(
        [line.t / unit for line in joins],
        [cells.index(line.cell) for line in joins],
        marker="D",
        s=10,
        color=look.INK,
        edgecolors=look.PAPER,
        linewidths=0.5,
        zorder=3,
    )


def _steps(water: Axes, roles: Axes, times: Iterable[float]) -> None:
    for time in times:
        for axes in (water, roles):
            axes.axvline(time, color=look.MUTED, linewidth=0.7, linestyle=DOTS, zorder=0.5)


@styled
def idle_by_design(shares: Mapping[str, Mapping[str, float]], title: str) -> Figure:
    """Idle share of all device time, one bar per design, stacked by cause."""
    figure, axes = _rows(list(shares), title, "idle share of all device time")
    causes = [cause for cause in look.CAUSES if any(row.get(cause) for row in shares.values())]
    totals = [sum(row.values()) for row in shares.values()]
    for index, row in enumerate(shares.values()):
        left = 0.0
        for cause in causes:
            axes.barh(index, row.get(cause, 0.0), 0.68, left, color=look.CAUSES[cause][1], linewidth=0)
            left += row.get(cause, 0.0)
        axes.annotate(f"{left:.1%}", (left, index), (4, 0), **BESIDE, weight="bold")
    axes.set_xlim(0, 1.1 * max([*totals, 0.01]))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _key(axes, [_square(look.CAUSES[cause][1], look.CAUSES[cause][0]) for cause in causes])
    return figure


@styled
def ladder(rows: Mapping[str, Interval], paper: Mapping[str, float], title: str) -> Figure:
    """Time per step relative to the reference design, with intervals, the paper's value beside it."""
    figure, axes = _rows(list(rows), title, "time per step, reference = 1", right=1.75)
    for index, (name, row) in enumerate(rows.items()):
        axes.barh(index, row.mean, 0.68, color=BLUE, linewidth=0)
        reach = [[row.mean - row.low], [row.high - row.mean]] if row.known else None
        axes.errorbar(row.mean, index, xerr=reach, color=look.INK, linewidth=1.1, capsize=2.5)
        if name in paper:
            axes.plot(paper[name], index, "D", **PAPER_MARK)
    axes.set_xlim(0, 1.04 * max(max(row.high, paper.get(name, 0.0)) for name, row in rows.items()))
    axes.axvline(1.0, color=look.INK, linewidth=0.6, zorder=0.5)
    _column(axes, 0.6, "simulated", [f"{row.mean:.3f}" for row in rows.values()], look.INK)
    handles: list[Artist] = [_square(BLUE, "simulated, mean and 95 % interval of the seeds")]
    if paper:
        told = [f"{paper[name]:.3f}" if name in paper else "" for name in rows]
        _column(axes, 1.35, "paper", told, look.MUTED)
        handles.append(Line2D([], [], linestyle="", marker="D", label="paper", **PAPER_MARK))
    _key(axes, handles)
    return figure


def _column(axes: Axes, inches: float, head: str, words: Sequence[str], colour: str) -> None:
    """Numbers in a column right of the axes."""
    place: dict[str, Any] = {"xycoords": axes.get_yaxis_transform(), "annotation_clip": False}
    for y, word in enumerate([head, *words], start=-1):
        weight = "normal" if y < 0 else "bold" if colour == look.INK else "normal"
        text = axes.annotate(word, (1, y), (72 * inches, 0), **(BESIDE | place), ha="right", weight=weight)
        text.set_color(look.MUTED if y < 0 else colour)


@styled
def time_against_nodes(curves: Mapping[str, Mapping[float, Interval]], title: str) -> Figure:
    """Seconds per step by the number of nodes; dotted: the fastest design with ideal scaling."""
    figure = Figure((WIDTH, 4.2))
    axes = _axes(figure, 0.5, 3.2, right=1.15)
    _heading(figure, title)
    unit, word = look.time_unit(max(point.mean for curve in curves.values() for point in curve.values()))
    ends: list[tuple[float, str, str]] = []
    for (name, curve), colour in zip(curves.items(), cycle(look.DESIGN_COLOURS), strict=False):
        sizes = sorted(curve)
        points = [curve[nodes] for nodes in sizes]
        means = [point.mean / unit for point in points]
        reach = [
            [(point.mean - point.low) / unit for point in points],
            [(point.high - point.mean) / unit for point in points],
        ]
        axes.errorbar(sizes, means, reach, color=colour, marker="o", markersize=4, linewidth=1.6, capsize=2.5)
        ends.append((means[-1], name, colour))
    ideal = ideal_scaling(curves)
    axes.plot(
        list(ideal), [seconds / unit for seconds in ideal.values()], ":", color=look.CAPACITY, linewidth=1.4
    )
    ends.append((ideal[max(ideal)] / unit, "ideal scaling", look.CAPACITY))
    axes.set_ylim(0)
    _end_labels(axes, max(ideal), ends)
    _node_ticks(axes, sorted({nodes for curve in curves.values() for nodes in curve}))
    axes.set_xlabel("nodes")
    axes.set_ylabel(f"{word} per step")
    axes.grid(axis="y")
    return figure


def _node_ticks(axes: Axes, sizes: Sequence[float]) -> None:
    axes.set_xscale("log")
    axes.set_xticks(sizes)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())


def _end_labels(axes: Axes, x: float, ends: Iterable[tuple[float, str, str]]) -> None:
    """A word beside the end of each curve, moved up where two would overlap."""
    reach = axes.get_ylim()[1] * 0.06
    lowest = float("-inf")
    for y, word, colour in sorted(ends):
        lowest = max(y, lowest + reach)
        axes.annotate(
            word, (x, lowest), (8, 0), **(BESIDE | {"annotation_clip": False}), color=colour, weight="bold"
        )


def _rows(names: Sequence[str], title: str, label: str, right: float = RIGHT) -> tuple[Figure, Axes]:
    """Axes with one row per design, the first on top."""
    head, foot = 0.66, 0.5
    figure = Figure((WIDTH, head + ROW * len(names) + foot))
    axes = _axes(figure, head, ROW * len(names), right)
    _heading(figure, title)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(label)
    axes.grid(axis="x")
    return figure, axes


def _axes(figure: Figure, top: float, height: float, right: float = RIGHT) -> Axes:
    """Axes of that height, `top` inches below the upper edge."""
    wide, high = figure.get_size_inches()
    left = LEFT / wide
    return figure.add_axes((left, 1 - (top + height) / high, 1 - left - right / wide, height / high))


def _heading(figure: Figure, title: str, about: str = "") -> None:
    """`title` in bold at the upper left, `about` beside it."""
    high = figure.get_size_inches()[1]
    bold: dict[str, Any] = {"fontsize": 11, "weight": "bold", "va": "top"}
    text = figure.text(0.12 / WIDTH, 1 - 0.12 / high, title, **bold)
    beside: dict[str, Any] = {
        "xycoords": text,
        "textcoords": "offset points",
        "va": "bottom",
        "color": look.MUTED,
    }
    figure.axes[0].annotate(about, (1, 0), (9, 0), **beside)


def _square(colour: str, word: str) -> Patch:
    return Patch(facecolor=colour, label=word)


def _line(colour: str, word: str, dotted: bool = False) -> Line2D:
    return Line2D([], [], color=colour, linewidth=1.6, linestyle=":" if dotted else "-", label=word)


def _key(axes: Axes, handles: Sequence[Artist]) -> None:
    """What the marks mean, in a line above the axes."""
    axes.legend(
        handles=list(handles),
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=len(handles),
        frameon=False,
        borderaxespad=0.1,
        borderpad=0.2,
        handlelength=0.9,
        handleheight=0.9,
        handletextpad=0.4,
        columnspacing=1.2,
    )
