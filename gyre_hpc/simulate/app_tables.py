"""The tables that `gyre simulate` shows a person."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from gyre_hpc.report.intervals import Interval
from gyre_hpc.simulate.beyond import Comparison
from gyre_hpc.simulate.ladder import BASE, PAPER
from gyre_hpc.simulate.measure import Measured

HEADS = ("time", "h/step", "mu, phi", r"E\[d]", "> WC", "> BB", "idle %")
"""mu: steps per burst, phi: extra dispatch (async: training nodes), E[d]: measured staleness; time over the two bounds; idle
share in rollout, in training, and switching."""
LEGEND = (
    "mu steps per burst, phi dispatched ahead (async: nodes that train); idle % rollout/training/switching"
)


def designs(rows: dict[str, Measured], base: str, console: Console, title: str = "design") -> None:
    """One row per design, times over `base`."""
    table = _table(title)
    for name, row in rows.items():
        table.add_row(name, *_cells(row, rows[base]))
    console.print(table)
    _warn(rows, console)


def ladder(rows: dict[str, Measured], console: Console) -> None:
    """The ladder beside what the paper reports."""
    table = _table("row", "paper")
    for name, row in rows.items():
        table.add_row(name, f"{PAPER[name]:.3f}", *_cells(row, rows[BASE]))
    console.print(table)
    _warn(rows, console)


def beyond(found: Sequence[Comparison], console: Console) -> None:
    """Bundle A over E0 in each world, and with less training work."""
    table = _table("world", "design")
    for each in found:
        named = {"E0": each.base, "A": each.bundle, "A, training x0.75": each.less_training}
        for name, row in named.items():
            table.add_row(each.world, name, *_cells(row, each.base), end_section=row is each.less_training)
        _warn({f"{each.world} {name}": row for name, row in named.items()}, console)
    console.print(table)


def _table(*names: str) -> Table:
    """Narrow enough for 80 columns."""
    table = Table(
        *names, *HEADS, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=LEGEND, caption_justify="left"
    )
    for column in table.columns:
        column.no_wrap = True
    return table


def _cells(row: Measured, base: Measured) -> list[str]:
    design = row.design
    split = f" ({design.training_nodes:g})" if design.training_nodes else ""
    idle = [
        f"{100 * sum(share for cause, share in row.idle.items() if cause.split()[0] == role):.0f}"
        for role in ("rollout", "training", "switching")
    ]
    return [
        _interval(row.ratio_to(base)),
        f"{row.hours.mean:.3f}",
        f"{design.steps_per_burst}, {design.extra_dispatch:g}{split}",
        f"{row.staleness:.2f}",
        f"{row.gap_wc:+.1%}",
        "-" if row.gap_bb is None else f"{row.gap_bb:+.1%}",
        "/".join(idle),
    ]


def _interval(value: Interval) -> str:
    return f"{value.mean:.3f} ±{(value.high - value.low) / 2:.3f}"


def _warn(rows: dict[str, Measured], console: Console) -> None:
    for name, row in rows.items():
        if not row.equally_stale:
            console.print(
                f"{name}: measured staleness {row.staleness:.2f}, not {row.design.staleness:.2f}: not comparable"
            )
