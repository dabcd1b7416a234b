"""What `gyre bench simulate` runs and what it makes of the times."""

from __future__ import annotations

import pytest

from gyre_hpc.bench import simulate
from gyre_hpc.bench.simulate import Cost


def test_every_design_has_192_nodes_and_the_same_mean_staleness() -> None:
    designs = simulate.points(simulate.config(), simulate.STEPS)
    assert list(designs) == ["A0", "A3", "C0", "C1", "C2", "E0", "E1", "E2"]
    for settings, world in designs.values():
        assert world.nodes == pytest.approx(192)
        assert settings.steps == 48
        ahead = settings.groups_ahead / settings.batch_groups
        assert ahead + (settings.steps_per_burst - 1) / 2 == pytest.approx(1.5)


def test_cells_have_48_or_24_nodes_and_async_has_halves() -> None:
    designs = simulate.points(simulate.config(), 1)
    assert [place.nodes for place in designs["E2"].world.cells] == [48.0] * 4
    assert [place.nodes for place in designs["E0"].world.cells] == [24.0] * 8
    assert [place.nodes for place in designs["A3"].world.cells] == [96.0] * 2
    assert designs["C1"].world.pool.nodes == 24


def test_a_cost_counts_the_events_of_all_seeds() -> None:
    world = simulate.config()
    designs = {"E2": simulate.points(world, 4)["E2"]}
    one, three = (simulate.measure(world, designs, range(seeds))["E2"] for seeds in (1, 3))
    assert three.events > 2 * one.events > 0
    assert three.seconds > 0 and three.heap_s > 0


def test_figures_are_sums_over_the_designs_against_the_heap() -> None:
    found = simulate.figures({"E0": Cost(3.0, 200, 0.1), "E1": Cost(1.0, 100, 0.1)})
    assert found["paper_scale_s"].value == 4.0 and found["paper_scale_s"].aim == 20.0
    assert found["heap_loop_share"].value == pytest.approx(0.05)
    assert found["events_per_s"].value == pytest.approx(75.0)
    assert found["events_per_s"].bound == pytest.approx(1500.0)


def test_the_yardstick_grows_with_the_entries() -> None:
    assert simulate.heap_seconds(200_000, 100) > simulate.heap_seconds(2_000, 100)
