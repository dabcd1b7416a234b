"""Every law of the schedule, in random worlds with and without faults, under each policy."""

from __future__ import annotations

import math
from fractions import Fraction

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre_hpc.schedule.machine import decide, initial_state
from gyre_hpc.schedule.protocol import AnyDecision, AnyEvent
from gyre_hpc.schedule.settings import PolicyName, Settings
from gyre_hpc.schedule.state import State

from .laws import ALL
from .world import Law, Nature, World

quick = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
SEEDS = st.integers(0, 2**32 - 1)


@st.composite
def plans(draw: st.DrawFn, policy: PolicyName | None = None) -> Settings:
    """Small schedules of every shape."""
    chosen = policy or draw(st.sampled_from(PolicyName))
    capacities = draw(st.lists(st.integers(1, 9), min_size=2 if chosen is PolicyName.ASYNC else 1, max_size=4))
    batch, burst = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    ahead = draw(st.integers(0, 2 * batch))
    stalest = math.ceil(2 * (Fraction(ahead, batch) + burst))
    return Settings(
        capacities=tuple(capacities),
        policy=chosen,
        batch_groups=batch,
        executions_per_group=draw(st.integers(2, 3)),
        steps_per_burst=burst,
        groups_ahead=ahead,
        oversample=draw(st.integers(0, 1)),
        max_staleness=draw(st.sampled_from((stalest, stalest, burst))),
        steps=draw(st.integers(1, 6)),
        training_cells=max(1, len(capacities) // 2) if chosen is PolicyName.ASYNC else 0,
        streaming=draw(st.booleans()),
        pool=draw(st.sampled_from((0, 0, 3))),
        evaluate_first=draw(st.booleans()),
        evaluate_last=draw(st.booleans()),
    )


natures = st.builds(
    Nature,
    losses=st.integers(0, 6),
    flickers=st.integers(0, 6),
    growth=st.integers(0, 2),
    dead=st.sampled_from((0.0, 0.1, 0.4)),
    flat=st.sampled_from((0.0, 0.2, 0.5)),
    noise=st.sampled_from((0.0, 0.1)),
    periodic=st.sampled_from((0.0, 0.5)),
    checkpoint_every=st.integers(1, 3),
)
calm = st.builds(Nature, flat=st.sampled_from((0.0, 0.3)), periodic=st.sampled_from((0.0, 0.5)))


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
