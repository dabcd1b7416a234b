"""Random simulated worlds for the schedules of `tests.schedule.test_laws.plans`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from gyre_hpc.schedule.settings import Settings
from gyre_hpc.simulate.workload import GroupWork
from gyre_hpc.simulate.world import (
    AnyFault,
    CellLoss,
    EngineModel,
    EvaluatorOutage,
    Place,
    Preemption,
    SwitchCosts,
    TrainingModel,
    World,
    wall_time,
)

LONG_S = 400.0
"""No execution of these worlds takes longer."""


@dataclass(frozen=True)
class Mixed:
    """Groups of every kind: some executions invalid, some groups with equal rewards, recorded micro-steps or not."""

    invalid: float = 0.0
    flat: float = 0.0
    known: bool = False

    def groups(self, seed: int, executions: int) -> Iterator[GroupWork]:
        draws = np.random.default_rng(seed)
        while True:
            seconds = np.minimum(100 * np.exp(draws.normal(0, 0.6, executions)), LONG_S)
            cost = 0.0 if draws.random() < self.flat else 0.4
            yield GroupWork(
                seconds=tuple(seconds.tolist()),
                training=tuple((cost * seconds).tolist()),
                forecast=float(seconds.mean()),
                valid=tuple((draws.random(executions) >= self.invalid).tolist()),
                micro_steps=int(draws.integers(1, 6)) if self.known and cost else 0,
                scored_s=float(draws.exponential(10.0)) if self.known else None,
            )


def cells_for(plan: Settings, draw: st.DrawFn) -> tuple[Place, ...]:
    return tuple(
        Place(draw(st.sampled_from((1.0, 2.0, 4.0))), capacity, draw(st.sampled_from((0.0, 7.0))))
        for capacity in plan.capacities
    )


@st.composite
def calm_worlds(draw: st.DrawFn, plan: Settings) -> World:
    """Nothing breaks; every cost may be free."""
    cost = st.sampled_from((0.0, 3.0, 40.0))
    return World(
        cells=cells_for(plan, draw),
        pool=Place(1.0, plan.pool) if plan.pool else Place(0.0, 0),
        engine=EngineModel(
            draw(st.sampled_from((0.4, 1.0))),
            draw(st.sampled_from((0.0, 0.5))),
            draw(st.sampled_from((0.0, 9.0))),
        ),
        training=TrainingModel(
            draw(st.sampled_from((0.0, 5.0, 30.0))), draw(cost), draw(cost), draw(st.sampled_from((0.0, 3.0)))
        ),
        switch=SwitchCosts({"drain": draw(cost), "load": 1.0}, {"load": draw(cost)}),
        publish_s=draw(cost),
        checkpoint_every=draw(st.integers(1, 3)),
        heldout=draw(st.integers(0, 5)),
        evaluate_every=draw(st.integers(0, 2)),
        launch_s=draw(cost),
        evaluate_s=draw(cost),
        limit_s=draw(st.sampled_from((120.0, float("inf")))),
    )


def faults(plan: Settings) -> st.SearchStrategy[tuple[AnyFault, ...]]:
    """Losses with and without a replacement, of any cell; preemptions, a wall time, an evaluator that is away."""
    when = st.floats(0.0, 2000.0)
    back = st.sampled_from((0.0, 1.0, 90.0))
    restore = st.sampled_from((0.0, 20.0))
    cell = st.integers(0, len(plan.capacities) - 1)
    loss = st.builds(CellLoss, when, cell, st.one_of(st.none(), back), restore)
    preemption = st.builds(Preemption, when, back, restore, st.booleans())
    outage = st.builds(EvaluatorOutage, when, st.sampled_from((10.0, 300.0)))
    single = st.lists(st.one_of(loss, loss, preemption, outage), max_size=5).map(tuple)
    walls = st.builds(wall_time, st.sampled_from((500.0, 900.0)), back, st.integers(1, 4), restore)
    return st.one_of(single, walls, st.tuples(single, walls).map(lambda both: both[0] + both[1]))
