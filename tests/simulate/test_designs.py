"""Designs: comparable only at equal staleness, placed without losing a slot, chosen by what they measure."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_hpc.errors import ConfigError
from gyre_hpc.report.intervals import Interval
from gyre_hpc.schedule.settings import LaunchOrder, PolicyName
from gyre_hpc.simulate.choose import SEEDS, choose
from gyre_hpc.simulate.designs import Design, place, points, splits
from gyre_hpc.simulate.measure import Window, measure, seconds_per_step
from gyre_hpc.simulate.presets import WorldConfig

SMALL = WorldConfig(nodes=8, slots=24, batch_groups=4, executions_per_group=3, training_h=0.8)
POLICIES = (
    Design(PolicyName.GYRE, cells=4),
    Design(PolicyName.GYRE, cells=8, launch_order=LaunchOrder.LONGEST_FIRST, overlap_joins=True),
    Design(PolicyName.COLOCATE, pool_nodes=2),
    Design(PolicyName.COLOCATE, pool_nodes=2, streaming=False),
    Design(PolicyName.ASYNC, training_nodes=4),
    Design(PolicyName.ASYNC, training_nodes=4, streaming=False),
)


@given(half_steps=st.integers(0, 12), batch=st.integers(1, 64))
def test_points_have_the_same_mean_staleness_and_a_whole_number_of_groups_ahead(
    half_steps: int, batch: int
) -> None:
    staleness = half_steps / 2
    found = list(points(Design(PolicyName.GYRE), staleness, batch))
    assert found
    for point in found:
        assert point.staleness == pytest.approx(staleness)
        assert point.extra_dispatch >= 0
        assert point.extra_dispatch * batch == pytest.approx(round(point.extra_dispatch * batch))


@given(
    cells=st.integers(1, 16),
    pool=st.integers(0, 8),
    slots=st.integers(64, 900),
    order=st.sampled_from(LaunchOrder),
)
def test_placed_cells_have_all_nodes_and_all_slots(
    cells: int, pool: int, slots: int, order: LaunchOrder
) -> None:
    design = Design(PolicyName.GYRE, cells=cells, pool_nodes=pool, launch_order=order)
    settings, world = place(design, replace(SMALL, nodes=16, slots=slots), 12)
    assert world.nodes == pytest.approx(16)
    assert sum(settings.capacities) + settings.pool == slots
    assert max(settings.capacities) - min(settings.capacities) <= 1
    assert settings.launch_order is order


@pytest.mark.parametrize("design", POLICIES, ids=lambda design: f"{design.policy}-{design.streaming}")
def test_measured_staleness_is_the_same_at_every_point_of_every_policy(design: Design) -> None:
    for point in points(design, 1.5, SMALL.batch_groups):
        measured = measure(point, SMALL, Window(12, 24), range(2))
        assert measured.staleness == pytest.approx(1.5, abs=0.05), point
        assert measured.equally_stale


def test_a_fixed_split_leaves_both_roles_nodes() -> None:
    for split in splits(Design(PolicyName.ASYNC), SMALL.nodes, 4):
        settings, world = place(split, SMALL, 12)
        assert world.nodes == SMALL.nodes
        assert settings.training_cells == 1
    with pytest.raises(ConfigError, match="leaves one role without nodes"):
        place(Design(PolicyName.ASYNC), SMALL, 12)


def test_more_cells_than_slots_are_refused() -> None:
    with pytest.raises(ConfigError, match="40 cells"):
        place(Design(PolicyName.GYRE, cells=40), SMALL, 12)


def test_the_chosen_design_is_the_fastest_of_all_points_and_splits() -> None:
    window, design = Window(0, 8), Design(PolicyName.ASYNC)
    chosen = choose(design, SMALL, window, 1.5, parts=4)
    every = [split for point in points(design, 1.5, 4) for split in splits(point, SMALL.nodes, 4)]
    assert chosen in every

    def seconds(one: Design) -> float:
        return sum(seconds_per_step(one, SMALL, window, seed) for seed in SEEDS)

    assert seconds(chosen) == min(map(seconds, every))


def test_a_row_may_fix_its_burst_length() -> None:
    chosen = choose(Design(PolicyName.GYRE, cells=4), SMALL, Window(0, 8), 1.5, bursts=range(1, 2))
    assert (chosen.steps_per_burst, chosen.extra_dispatch) == (1, 1.5)


def test_a_staleness_without_whole_groups_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"staleness=1\.3"):
        choose(Design(PolicyName.GYRE, cells=4), SMALL, Window(0, 8), 1.3)


def test_no_design_is_faster_than_its_lower_bounds() -> None:
    for design in POLICIES[:2]:
        measured = measure(design, SMALL, Window(12, 24), range(3))
        assert measured.gap_bb is not None
        assert 0 <= measured.gap_bb <= measured.gap_wc + 1e-9


def test_an_interval_is_that_of_student() -> None:
    interval = Interval.of([1.0, 2.0, 3.0])
    assert interval.mean == 2.0
    assert interval.high - 2.0 == pytest.approx(4.303 / 3**0.5, rel=1e-3)
    assert interval.low == pytest.approx(4.0 - interval.high)
