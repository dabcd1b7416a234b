"""Runs that end with the test, whatever happens in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.end_to_end.runs import Run

Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a run with these overrides."""
    runs: list[Run] = []

    def begin(*overrides: str) -> Run:
        runs.append(Run(tmp_path / f"runs-{len(runs)}", *overrides).start())
        return runs[-1]

    yield begin
    for run in runs:
        run.end()
