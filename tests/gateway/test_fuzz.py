"""No body, however odd, crashes the gateway, leaves anything behind, or gets an answer its dialect does not know."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre_hpc.gateway.rendering import Rendering

from .fuzz.driver import Report, fuzz

MIB = 1 << 20


def covered(report: Report) -> None:
    """The run reached all dialects, and both sides of every refusal."""
    assert set(report.dialects) == {"messages", "chat", "responses", "count"}
    assert report.statuses[200] > report.cases // 10 and report.statuses[400] > report.cases // 10
    assert report.statuses[404] > 0 and report.calls > report.cases // 20
    assert sum(report.statuses.values()) == report.cases


async def test_five_thousand_bodies(rendering: Rendering, tmp_path: Path) -> None:
    report = await fuzz(rendering, tmp_path, 5_000, seed=1)
    covered(report)


async def test_real_connections(rendering: Rendering, tmp_path: Path) -> None:
    report = await fuzz(rendering, tmp_path, 600, seed=2, sockets=True)
    assert report.statuses[200] and report.statuses[400] and report.calls


@pytest.mark.full
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("sockets", [False, True])
async def test_a_million_bodies(rendering: Rendering, tmp_path: Path, sockets: bool) -> None:
    report = await fuzz(rendering, tmp_path, 20_000 if sockets else 1_000_000, seed=3, sockets=sockets)
    covered(report)
    assert report.rss_growth < 64 * MIB, report
