"""Pictures of simulated runs: PNG files and one self-contained HTML page, from outcomes and plain numbers.

`draw` writes what its arguments suffice for:
    roles-DESIGN.png    role of every cell under the waterlevel, of each design that has a recorded outcome
    idle.png            idle share of all device time by cause, one bar per design
    ladder.png          time per step relative to a reference design, with intervals, the paper's values beside ours
    nodes.png           seconds per step against the number of nodes
    simulation.html     all of them with hover and zoom, and a table of numbers
The plots are those of a live run's report, drawn from the same metrics lines, so both look alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from gyre_hpc.report.intervals import Interval
from gyre_hpc.simulate import page, png
from gyre_hpc.simulate.views import Designs, idle_by_cause, in_words, metric_lines, recorded


def draw(
    outcomes: Designs,
    folder: Path,
    *,
    title: str = "Simulation",
    about: str = "",
    ladder: Mapping[str, Sequence[float]] | None = None,
    paper: Mapping[str, float] | None = None,
    nodes: Mapping[str, Mapping[float, Sequence[float]]] | None = None,
) -> list[Path]:
    """Write the pictures into `folder` (made if needed); their paths, the page last.

    outcomes: design -> outcomes by seed; those with `lines` (simulate(..., record=True)) give a role timeline, the first
        such of each design. One recorded seed per design suffices; the others feed the table and idle shares.
    ladder: design -> time per step over the reference design's, one value per seed.
    paper: design -> the paper's value of the same ratio.
    nodes: design -> {nodes: seconds per step, one value per seed} (`scaling.time_against_nodes` makes it).
    title, about: heading and one line under it, plain text.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = {name: Interval.of(values) for name, values in (ladder or {}).items()}
    curves = {
        name: {size: Interval.of(values) for size, values in curve.items()}
        for name, curve in (nodes or {}).items()
    }
    paths = _prints(outcomes, folder, rows, paper or {}, curves)
    html = page.render(title, about, outcomes, rows, paper or {}, curves)
    paths.append(folder / "simulation.html")
    paths[-1].write_text(html, encoding="utf-8")
    return paths


def _prints(
    outcomes: Designs,
    folder: Path,
    ladder: Mapping[str, Interval],
    paper: Mapping[str, float],
    curves: Mapping[str, Mapping[float, Interval]],
) -> list[Path]:
    """The PNG files."""
    pictures = {
        f"roles-{_slug(name)}": png.role_timeline(metric_lines(run), name, in_words(run))
        for name, run in recorded(outcomes).items()
    }
    shares = idle_by_cause(outcomes)
    if shares:
        pictures["idle"] = png.idle_by_design(shares, "Idle time by cause")
    if ladder:
        pictures["ladder"] = png.ladder(ladder, paper, "Time per step")
    if curves:
        pictures["nodes"] = png.time_against_nodes(curves, "Time per step against nodes")
    return [png.save(figure, folder / f"{name}.png") for name, figure in pictures.items()]


def _slug(name: str) -> str:
    """A design's name as part of a file name."""
    return re.sub(r"[^A-Za-z0-9.+-]+", "_", name).strip("_")
