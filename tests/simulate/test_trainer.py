"""Training in the simulator: a pipeline is filled once per batch, whichever way its work is kept."""

from __future__ import annotations

import math

import pytest

from gyre_hpc.records import CellId
from gyre_hpc.simulate.trainer import Claims, Fluid, Work
from gyre_hpc.simulate.world import TrainingModel

FILL_S = 40.0
ARRIVALS = [
    pytest.param([(0.0, 60.0)], id="at once"),
    pytest.param([(0.0, 60.0), (45.0, 20.0)], id="while the pipeline still fills"),
    pytest.param([(0.0, 60.0), (500.0, 20.0)], id="after a wait for work"),
]


def end_of(work: Work, arrivals: list[tuple[float, float]]) -> float:
    """Second at which one cell of two nodes has done what arrives: (second, node-seconds)."""
    work.begin()
    work.train(0.0, {CellId(0): 2.0})
    now = 0.0
    for second, amount in arrivals:
        while now < second and (work.unclaimed or work.open):
            now = work.run(now, second)
        now = second
        work.add(now, amount, work.micro_steps(amount, 0, 1))
    while work.unclaimed or work.open:
        now = work.run(now, math.inf)
    return now


@pytest.mark.parametrize("arrivals", ARRIVALS)
def test_a_pipeline_is_filled_once_per_batch(arrivals: list[tuple[float, float]]) -> None:
    fluid = end_of(Fluid(TrainingModel(0.0, FILL_S, 0.0)), arrivals)
    claims = end_of(Claims(TrainingModel(0.01, FILL_S, 0.0), 2.0), arrivals)
    last, amount = arrivals[-1]
    alone = FILL_S + sum(amount for _, amount in arrivals) / 2.0
    assert fluid == pytest.approx(max(alone, last + amount / 2.0), abs=0.1)
    assert claims == pytest.approx(fluid, abs=0.1)
