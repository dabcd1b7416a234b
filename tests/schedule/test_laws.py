"""Every law of the schedule, in random worlds with and without faults, under each policy."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gyre_hpc.schedule.machine import decide, initial_state
from gyre_hpc.schedule.protocol import AnyDecision, AnyEvent, Forecast, Launch
from gyre_hpc.schedule.settings import LaunchOrder, PolicyName, Settings
from gyre_hpc.schedule.state import State

from .laws import ALL
from .world import Law, Nature, World

quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
SEEDS = st.integers(0, 2**32 - 1)


@st.composite
def plans(draw: st.DrawFn, policy: PolicyName | None = None) -> Settings:
    """Small schedules of every shape."""
    chosen = policy or draw(st.sampled_from(PolicyName))
    capacities = draw(
        st.lists(st.integers(1, 9), min_size=2 if chosen is PolicyName.ASYNC else 1, max_size=4)
    )
    spare = len(capacities) - (max(1, len(capacities) // 2) if chosen is PolicyName.ASYNC else 1)
    batch, burst = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    ahead = draw(st.integers(0, 2 * batch))
    return Settings(
        capacities=tuple(capacities),
        policy=chosen,
        batch_groups=batch,
        executions_per_group=draw(st.integers(2, 3)),
        steps_per_burst=burst,
        groups_ahead=ahead,
        oversample=draw(st.integers(0, 1)),
        max_staleness=draw(st.sampled_from((-1, -1, burst, 0))),
        steps=draw(st.integers(1, 6)),
        training_cells=max(1, len(capacities) // 2) if chosen is PolicyName.ASYNC else 0,
        streaming=draw(st.booleans()),
        launch_order=draw(st.sampled_from(LaunchOrder)),
        overlap_joins=draw(st.booleans()),
        standalone=draw(st.integers(0, min(1, spare))),
        pool=draw(st.sampled_from((0, 0, 3))),
        evaluate_first=draw(st.booleans()),
        evaluate_last=draw(st.booleans()),
    )


natures = st.builds(
    Nature,
    losses=st.integers(0, 6),
    flickers=st.integers(0, 6),
    growth=st.integers(0, 2),
    guests=st.integers(0, 4),
    dead=st.sampled_from((0.0, 0.1, 0.4)),
    flat=st.sampled_from((0.0, 0.2, 0.5)),
    noise=st.sampled_from((0.0, 0.1)),
    periodic=st.sampled_from((0.0, 0.5)),
    checkpoint_every=st.integers(1, 3),
    late_forecasts=st.sampled_from((0.0, 0.7)),
)
calm = st.builds(Nature, flat=st.sampled_from((0.0, 0.3)), periodic=st.sampled_from((0.0, 0.5)))
same_forecasts = st.builds(
    Nature, losses=st.integers(0, 4), periodic=st.sampled_from((0.0, 0.5)), forecasts=st.just((2.0,))
)


@pytest.mark.parametrize("law", ALL, ids=lambda law: law.__name__)
@quick
@given(plan=plans(), nature=natures, seed=SEEDS)
def test_law_holds_in_every_world(law: Law, plan: Settings, nature: Nature, seed: int) -> None:
    World(plan, nature, seed, (law,)).run()


@pytest.mark.full
@settings(max_examples=5000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan=plans(), nature=natures, seed=SEEDS)
def test_all_laws_hold_in_very_many_worlds(plan: Settings, nature: Nature, seed: int) -> None:
    World(plan, nature, seed, ALL).run()


@quick
@given(plan=plans(), nature=natures, seed=SEEDS)
def test_every_world_ends_with_all_steps_or_a_named_reason(plan: Settings, nature: Nature, seed: int) -> None:
    state = World(plan, nature, seed).run().state
    assert state.waterlevel >= 0 and state.stop_reason is not None
    if state.stop_reason:
        assert f"{plan.max_void_bursts} bursts in a row without a step: group" in state.stop_reason
    else:
        assert state.steps_done == plan.steps and state.published == state.version
        assert state.waterlevel == 0 and not state.evaluations


@quick
@given(plan=plans(), nature=calm, seed=SEEDS)
def test_a_world_without_faults_takes_exactly_the_configured_steps(
    plan: Settings, nature: Nature, seed: int
) -> None:
    state = World(plan, nature, seed, ALL).run().state
    assert state.undone == ()
    assert state.stop_reason or state.version == plan.steps


@quick
@given(plan=plans(), nature=natures, seed=SEEDS)
def test_replaying_the_journal_gives_the_same_decisions_and_state(
    plan: Settings, nature: Nature, seed: int
) -> None:
    world = World(plan, nature, seed).run()
    state = initial_state(plan)
    for event, decided in zip(world.journal, world.decided, strict=True):
        state = _through_json(state, State)
        state, decisions = decide(state, _through_json(event, AnyEvent))
        assert decisions == _through_json(decided, tuple[AnyDecision, ...])
    assert state == world.state


def _through_json(value: object, kind: object) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value), type=kind)


@quick
@given(plan=plans(), nature=same_forecasts, seed=SEEDS)
def test_with_equal_forecasts_longest_first_is_fifo(plan: Settings, nature: Nature, seed: int) -> None:
    world = World(replace(plan, launch_order=LaunchOrder.LONGEST_FIRST), nature, seed, ALL).run()
    state = initial_state(replace(plan, launch_order=LaunchOrder.FIFO))
    expected: list[tuple[AnyDecision, ...]] = []
    found: list[tuple[AnyDecision, ...]] = []
    for event, decided in zip(world.journal, world.decided, strict=True):
        if isinstance(event, Forecast):
            expected[-1] += decided
            continue
        state, decisions = decide(state, event)
        expected.append(decided)
        found.append(decisions)
    assert list(map(_launches_apart, found)) == list(map(_launches_apart, expected))
    groups = {id_: replace(group, forecast=None) for id_, group in world.state.groups.items()}
    assert state == replace(world.state, settings=state.settings, groups=groups, unforecast=())


def _launches_apart(decisions: tuple[AnyDecision, ...]) -> tuple[list[int], list[AnyDecision]]:
    launched = [id_ for launch in decisions if isinstance(launch, Launch) for id_ in launch.ids]
    return launched, [decision for decision in decisions if not isinstance(decision, Launch)]


@pytest.mark.parametrize("policy", PolicyName)
@pytest.mark.parametrize(
    ("batch", "burst", "ahead"), [(2, 1, 0), (2, 4, 0), (2, 1, 3), (3, 2, 3), (4, 3, 2), (1, 1, 2)]
)
def test_mean_staleness_is_phi_plus_half_of_mu_minus_one(
    policy: PolicyName, batch: int, burst: int, ahead: int
) -> None:
    """In a loss-free world with groups ready in the order of dispatch, once the queue is full."""
    plan = Settings(
        capacities=(5, 5, 5),
        policy=policy,
        batch_groups=batch,
        executions_per_group=2,
        steps_per_burst=burst,
        groups_ahead=ahead,
        max_staleness=20,
        steps=10 * burst,
        training_cells=1,
    )
    world = World(plan, Nature(fifo=True), seed=7, laws=ALL).run()
    warm = burst * (1 + math.ceil(ahead / (burst * batch)))
    steady = [age for version, age in world.staleness if version >= warm]
    assert Fraction(sum(steady), len(steady)) == Fraction(ahead, batch) + Fraction(burst - 1, 2)
