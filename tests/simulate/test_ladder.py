"""The paper's ladder comes out of the rules: its order, and each row within 10 %."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gyre_hpc.simulate.ladder import BASE, PAPER, fixed_pools, ladder
from gyre_hpc.simulate.measure import Measured
from gyre_hpc.simulate.presets import compose


def times(rows: dict[str, Measured]) -> dict[str, float]:
    return {name: row.ratio_to(rows[BASE]).mean for name, row in rows.items()}


def in_paper_order(found: dict[str, float]) -> bool:
    middle = [found["A3"], found["C0"], found["C1"]]
    rising = [found["E0"], found["E2"], found["E1"], found["C2"], min(middle)]
    return rising == sorted(rising) and max(middle) < found["A0"]


def test_the_ladder_has_the_order_and_the_times_of_the_paper() -> None:
    rows = ladder(replace(compose(["preset=paper_ladder"]), seeds=2))
    found = times(rows)
    assert in_paper_order(found), found
    assert found == {name: pytest.approx(value, rel=0.1) for name, value in PAPER.items()}
    assert all(row.equally_stale for row in rows.values())


@pytest.mark.full
def test_the_ladder_over_all_seeds() -> None:
    found = times(ladder(compose(["preset=paper_ladder"])))
    assert in_paper_order(found), found
    assert found == {name: pytest.approx(value, rel=0.1) for name, value in PAPER.items()}


@pytest.mark.full
@pytest.mark.parametrize("world", ["P1", "P2", "P3"])
def test_elastic_cells_win_where_nothing_was_fitted(world: str) -> None:
    found = times(ladder(compose(["preset=paper_ladder", f"world={world}"])))
    assert all(value >= 1 for value in found.values())
    assert found["E2"] < found["C2"] < min(found["C0"], found["C1"], found["A0"])


@pytest.mark.full
def test_durations_piled_at_the_limit_leave_colocate_close_and_async_far() -> None:
    rows = fixed_pools(compose(["preset=paper_2p4t"]))
    assert rows["async"].ratio_to(rows["gyre"]).mean == pytest.approx(1.78, rel=0.05)
    assert rows["colocate"].ratio_to(rows["gyre"]).mean == pytest.approx(1.21, rel=0.05)
