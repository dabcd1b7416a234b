"""Three points of a sweep, and run folders with nothing in them."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from gyre_hpc.layout import RunLayout
from gyre_hpc.sweep.points import Point

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
FIRST, SECOND, THIRD = (
    Point(("experiment=quickstart", f"schedule={name}"), (f"schedule={name}",))
    for name in ("gyre", "colocate", "async")
)


def a_run(root: Path, name: str = "run-1") -> RunLayout:
    layout = RunLayout(root / name)
    layout.jobs.mkdir(parents=True)
    layout.config.touch()
    return layout
