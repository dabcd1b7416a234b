"""Runs that end with the test, whatever happens in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.end_to_end.runs import Run

Start = Callable[..., Run]
TIMEOUT_S = 1200
"""Of one test: a machine shared with others may be many times slower than one of its own."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a run with these overrides, and `env` added to its environment."""
    runs: list[Run] = []

    def begin(*overrides: str, env: Mapping[str, str] | None = None) -> Run:
        runs.append(Run(tmp_path / f"runs-{len(runs)}", *overrides, env=env).start())
        return runs[-1]

    yield begin
    for run in runs:
        run.end()
