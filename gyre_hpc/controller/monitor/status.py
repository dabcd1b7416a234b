"""Where each cell of a run stands: its phase, why it is blocked or quarantined, its last switch step by step.

Read from `metrics.jsonl` and the journal of the run folder, live or ended; nothing is asked of any process.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from gyre_hpc.controller.cells.switch_steps import Switch, SwitchEnd, read_switches
from gyre_hpc.layout import RunLayout
from gyre_hpc.report import metrics as m
from gyre_hpc.transport.messages import DONE


class CellStatus(msgspec.Struct, frozen=True):
    """One cell. `since`: seconds after the run's first start. `reason`: why it is, or was last, blocked or quarantined."""

    cell: int
    phase: str
    since: float
    reason: str
    direction: str
    end: str
    seconds: float
    steps: list[tuple[str, float, str]]
    """(step, seconds, outcome) of its last switch."""


@dataclass
class _Row:
    phase: str = ""
    since: float = 0.0
    reason: str = ""
    switch: Switch | None = None


def cell_statuses(run: Path) -> list[CellStatus]:
    """All cells that the run has had, in the order of their ids. Raises CorruptRecord."""
    rows: dict[int, _Row] = {}
    for line in m.read_metrics(RunLayout(run).metrics):
        if isinstance(line, m.RoleChange):
            row = rows.setdefault(line.cell, _Row())
            row.phase, row.since, row.reason = line.role, line.t, line.reason or row.reason
    for switch in read_switches(run):
        rows.setdefault(switch.cell, _Row()).switch = switch
    return [_status(cell, row) for cell, row in sorted(rows.items())]


def _status(cell: int, row: _Row) -> CellStatus:
    switch = row.switch
    return CellStatus(
        cell=cell,
        phase=row.phase,
        since=row.since,
        reason=row.reason,
        direction=switch.direction if switch else "",
        end=switch.end if switch else "",
        seconds=switch.seconds if switch else 0.0,
        steps=[(step.step, step.end - step.start, step.outcome) for step in switch.steps] if switch else [],
    )


def status_lines(cells: list[CellStatus]) -> list[str]:
    """A line per cell, one more for a reason, and one for each step of its last switch that went wrong."""
    lines = []
    for cell in cells:
        last = f"; {cell.direction} {cell.end} in {cell.seconds:.2f} s" if cell.direction else ""
        steps = ", ".join(f"{name} {seconds:.2f}" for name, seconds, _ in cell.steps)
        lines.append(
            f"cell-{cell.cell}  {cell.phase} since {cell.since:.1f} s{last}"
            + (f" ({steps})" if steps else "")
        )
        if cell.reason:
            lines.append(f"    {cell.reason}")
        if cell.end != SwitchEnd.DONE:
            lines += [f"    {name}: {outcome}" for name, _, outcome in cell.steps if outcome != DONE]
    return lines
