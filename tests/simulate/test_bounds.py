"""No simulated schedule is faster than what no schedule can be."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gyre_hpc.schedule.settings import PolicyName, Settings
from gyre_hpc.simulate.bounds import burst_barrier_s, bursts, work_conservation_s
from gyre_hpc.simulate.simulator import simulate
from gyre_hpc.simulate.workload import GroupWork, LogNormal
from gyre_hpc.simulate.world import EngineModel, Place, World
from tests.schedule.test_laws import plans
from tests.simulate.tiny import Given, world
from tests.simulate.worlds import LONG_S, calm_worlds

quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
SEEDS = st.integers(0, 2**32 - 1)
HAIR = 1e-6


@st.composite
def closed_bursts(draw: st.DrawFn) -> tuple[Settings, World, LogNormal]:
    """phi = 0, every execution trained, equally many places per node; loads from idle to hopeless."""
    capacity = draw(st.integers(1, 9))
    plan = draw(plans())
    plan = replace(
        plan, groups_ahead=0, oversample=0, max_staleness=-1, capacities=(capacity,) * len(plan.capacities)
    )
    plan = replace(
        plan, pool=draw(st.sampled_from((0, 2 * capacity))), evaluate_first=False, evaluate_last=False
    )
    machine = draw(calm_worlds(plan))
    pool = Place(2.0 if plan.pool else 0.0, plan.pool)
    machine = replace(machine, cells=(Place(1.0, capacity),) * len(plan.capacities), pool=pool)
    work = LogNormal(
        100.0, draw(st.sampled_from((0.0, 0.8))), 0.6, LONG_S, draw(st.sampled_from((0.05, 0.5, 3.0)))
    )
    return plan, machine, work


@quick
@given(case=closed_bursts(), seed=SEEDS)
def test_no_burst_is_faster_than_its_barrier(case: tuple[Settings, World, LogNormal], seed: int) -> None:
    plan, machine, work = case
    outcome = simulate(plan, machine, work, seed)
    ends = [0.0, *outcome.published.values()]
    served = [0, *outcome.published]
    groups = work.groups(seed, plan.executions_per_group)
    for (begin, end), (first, last) in zip(pairwise(ends), pairwise(served), strict=True):
        burst = list(islice(groups, (last - first) * plan.batch_groups))
        assert end - begin >= burst_barrier_s(burst, machine) * (1 - HAIR)
        assert burst_barrier_s(burst, machine) >= work_conservation_s(burst, machine) * (1 - HAIR)


@quick
@given(case=closed_bursts(), ahead=st.integers(0, 4), seed=SEEDS)
def test_no_run_is_faster_than_its_work(
    case: tuple[Settings, World, LogNormal], ahead: int, seed: int
) -> None:
    """With groups dispatched ahead a burst need not be closed, but a whole run is."""
    plan, machine, work = case
    plan = replace(plan, groups_ahead=ahead)
    groups = islice(work.groups(seed, plan.executions_per_group), plan.steps * plan.batch_groups)
    assert simulate(plan, machine, work, seed).seconds >= work_conservation_s(groups, machine) * (1 - HAIR)


def test_bounds_of_a_burst_computed_by_hand() -> None:
    """Four places: 100 s of slots, 20 node-seconds on 2 nodes. Barrier: group 1 (5 s of training) is there at 40."""
    groups = list(islice(Given().groups(0, 2), 2))
    assert work_conservation_s(groups, world(2)) == 100 / 4 + 20 / 2
    assert burst_barrier_s(groups, world(2)) == 40 + 5


def test_the_barrier_is_met_where_nothing_is_lost() -> None:
    """Many small cells, free switches, free steps: only the groups' last members are waited for."""
    free = World(cells=(Place(1.0, 1),) * 32)
    plan = Settings(capacities=free.capacities, batch_groups=8, executions_per_group=4, steps=4)
    work = LogNormal(100.0, 0.5, 0.3, 300.0, 0.2)
    outcome = simulate(plan, free, work, seed=3)
    barrier = sum(burst_barrier_s(burst, free) for burst in bursts(work.groups(3, 4), 8, 4))
    assert barrier <= outcome.seconds * (1 + HAIR) and outcome.seconds <= 1.06 * barrier


def test_the_time_limit_and_invalid_members_lower_the_bounds() -> None:
    group = GroupWork((10.0, 50.0), (4.0, 6.0), 25.0)
    limited = world(2, limit_s=30.0)
    assert work_conservation_s([group], limited) == 40 / 4 + 10 / 2
    half = group._replace(valid=(True, False))
    assert work_conservation_s([half], limited) == 40 / 4
    assert burst_barrier_s([half], limited) == 30


@pytest.mark.parametrize("policy", PolicyName)
def test_a_slower_engine_is_no_way_below_the_barrier(policy: PolicyName) -> None:
    slow = World(cells=(Place(2.0, 6),) * 3, engine=EngineModel(saturation=0.5, tool_share=0.3))
    plan = Settings(slow.capacities, policy, 3, 4, steps=5, training_cells=int(policy is PolicyName.ASYNC))
    work = LogNormal(100.0, 0.5, 0.3, 300.0, 0.2)
    barrier = sum(burst_barrier_s(burst, slow) for burst in bursts(work.groups(1, 4), 3, 5))
    assert simulate(plan, slow, work, seed=1).seconds > barrier
