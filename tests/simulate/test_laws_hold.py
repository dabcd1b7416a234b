"""The schedule's laws, checked at every turn of simulated runs with and without faults."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gyre_hpc.schedule.protocol import CellLost
from gyre_hpc.schedule.settings import Settings
from gyre_hpc.simulate.outcome import Outcome
from gyre_hpc.simulate.simulator import Stuck, simulate
from gyre_hpc.simulate.world import CellLoss, World
from tests.schedule.test_laws import plans
from tests.simulate.watch import Watch, watched
from tests.simulate.worlds import Mixed, calm_worlds, faults

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
mixtures = st.builds(Mixed, st.sampled_from((0.0, 0.1, 0.4)), st.sampled_from((0.0, 0.3)), st.booleans())
SEEDS = st.integers(0, 2**32 - 1)


def run(plan: Settings, world: World, mixture: Mixed, seed: int) -> tuple[Outcome | None, Watch]:
    """None if the world was left without a cell that trains for ever."""
    with watched(losses=len(world.faults)) as watch:
        try:
            return simulate(plan, world, mixture, seed), watch
        except Stuck:
            assert watch.state is not None and not any(cell.trains for cell in watch.state.cells)
            assert any(isinstance(event, CellLost) for event, _ in watch.journal)
            return None, watch


@quick
@given(data=st.data(), plan=plans(), mixture=mixtures, seed=SEEDS)
def test_laws_hold_in_calm_worlds(data: st.DataObject, plan: Settings, mixture: Mixed, seed: int) -> None:
    outcome, watch = run(plan, data.draw(calm_worlds(plan)), mixture, seed)
    assert outcome is not None and watch.turns == outcome.events
    if not outcome.reason:
        assert [step.version for step in outcome.steps] == list(range(1, plan.steps + 1))


@quick
@given(data=st.data(), plan=plans(), mixture=mixtures, seed=SEEDS)
def test_laws_hold_whatever_breaks(data: st.DataObject, plan: Settings, mixture: Mixed, seed: int) -> None:
    world = replace(data.draw(calm_worlds(plan)), faults=data.draw(faults(plan)))
    outcome, _ = run(plan, world, mixture, seed)
    if outcome is not None and not outcome.reason:
        assert len(outcome.steps) == plan.steps


@pytest.mark.full
@settings(max_examples=3000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), plan=plans(), mixture=mixtures, seed=SEEDS)
def test_laws_hold_in_very_many_worlds(
    data: st.DataObject, plan: Settings, mixture: Mixed, seed: int
) -> None:
    run(plan, replace(data.draw(calm_worlds(plan)), faults=data.draw(faults(plan))), mixture, seed)


@quick
@given(data=st.data(), plan=plans(), mixture=mixtures, seed=SEEDS)
def test_the_same_seed_gives_the_same_run(
    data: st.DataObject, plan: Settings, mixture: Mixed, seed: int
) -> None:
    lost = st.lists(st.builds(CellLoss, st.floats(0.0, 900.0), st.just(0), st.just(30.0)), max_size=2)
    world = replace(data.draw(calm_worlds(plan)), faults=tuple(data.draw(lost)))
    first = simulate(plan, world, mixture, seed, record=True)
    assert simulate(plan, world, mixture, seed, record=True) == first


@quick
@given(data=st.data(), plan=plans(), mixture=mixtures, seed=SEEDS)
def test_device_time_adds_up(data: st.DataObject, plan: Settings, mixture: Mixed, seed: int) -> None:
    world = replace(data.draw(calm_worlds(plan)), faults=data.draw(faults(plan)))
    outcome, _ = run(plan, world, mixture, seed)
    if outcome is not None:
        assert all(seconds >= 0 for seconds in outcome.device_time.values())
        assert sum(outcome.device_time.values()) == pytest.approx(world.nodes * outcome.seconds, rel=1e-6)


@quick
@given(data=st.data(), plan=plans(), seed=SEEDS)
def test_load_changes_nothing_while_no_cell_is_overfull(
    data: st.DataObject, plan: Settings, seed: int
) -> None:
    """Constant speed and a speed that falls with load agree when every execution has a place of its own."""
    world = replace(data.draw(calm_worlds(plan)), limit_s=float("inf"))
    steady = replace(world, engine=replace(world.engine, saturation=1e9, tool_share=0.0))
    loaded = replace(world, engine=replace(world.engine, saturation=1.0, tool_share=0.0))
    assert simulate(plan, loaded, Mixed(), seed) == simulate(plan, steady, Mixed(), seed)


@quick
@given(data=st.data(), plan=plans(), seed=SEEDS)
def test_ever_smaller_micro_steps_come_near_the_fluid(data: st.DataObject, plan: Settings, seed: int) -> None:
    """Joins may then be decided elsewhere by a hair, so only schedules whose cells never move are compared."""
    world = data.draw(calm_worlds(plan))
    plan = replace(
        plan,
        capacities=plan.capacities[:1],
        training_cells=0,
        policy=plan.policy.COLOCATE,
        pool=0,
        standalone=0,
    )
    world = replace(world, cells=world.cells[:1], pool=replace(world.pool, nodes=0.0, capacity=0))
    fluid = simulate(plan, replace(world, training=replace(world.training, micro_step_s=0.0)), Mixed(), seed)
    small = simulate(plan, replace(world, training=replace(world.training, micro_step_s=0.5)), Mixed(), seed)
    assert small.seconds == pytest.approx(fluid.seconds, rel=0.02)
