"""Short runs whose regions take the network way although all cells are on one host; only a cell's own are mapped."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from gyre_hpc.report.summary import Summary
from gyre_hpc.transport.regions import SAME_HOST
from tests.end_to_end.conftest import Start
from tests.end_to_end.runs import Plan


def ways_of(run: Path) -> Counter[str]:
    """Pulls of all cells by the way that brought them, as their logs tell at the end."""
    found: Counter[str] = Counter()
    for log in run.glob("logs/attempt-*/cell-*"):
        for said in re.findall(r"pulls by way: (.*)", log.read_text()):
            for way, count in re.findall(r"([a-z ]+) (\d+)(?:, |$)", said):
                found[way] += int(count)
    return found


@pytest.mark.parametrize("kind", ["sockets", pytest.param("nixl", marks=pytest.mark.nixl)])
def test_a_run_pulls_all_its_regions_over_the_network_way(start: Start, tmp_path: Path, kind: str) -> None:
    plan = Plan(tmp_path / "plan")
    run = start(*plan.overrides, f"transport={kind}", "transport.same_host=false", "schedule.steps=1")
    run.finish()
    assert run.versions() == [1]
    ways = ways_of(run.folder)
    assert ways.keys() <= {kind, SAME_HOST} and ways[kind] >= 4, ways
    summary = msgspec.json.decode((run.folder / "summary.json").read_bytes(), type=Summary)
    assert summary.transport == kind
