"""Executions end on time however long the run has lasted."""

from __future__ import annotations

import pytest

from gyre_hpc.records import ExecutionId
from gyre_hpc.simulate.agenda import NEVER
from gyre_hpc.simulate.rollout import Rollout
from gyre_hpc.simulate.world import EngineModel

ONE, TWO = ExecutionId(1), ExecutionId(2)


@pytest.mark.parametrize("now", [0.0, 1e6, 1.7e9])
def test_what_is_left_by_rounding_is_no_time(now: float) -> None:
    """At 1.7e9 s a clock cannot move by less than 2.4e-7 s: nothing may wait for less."""
    rollout = Rollout(EngineModel(), NEVER)
    rollout.launch(ONE, 10.0)
    rollout.settle(4)
    rollout.advance(10.0 - 1e-7 * (now > 1e9))
    assert rollout.next_end(now) == now
    assert list(rollout.pop_ended(now)) == [(ONE, False)]


def test_an_interrupted_execution_ends_only_when_it_is_launched_again() -> None:
    rollout = Rollout(EngineModel(), 25.0)
    rollout.launch(ONE, 10.0)
    rollout.settle(4)
    rollout.advance(4.0)
    rollout.interrupt()
    rollout.launch(ONE, 10.0)
    rollout.settle(4)
    assert rollout.next_end(4.0) == 14.0
    rollout.advance(10.0)
    assert list(rollout.pop_ended(14.0)) == [(ONE, False)]


def test_neither_work_nor_limit_moves_without_capacity() -> None:
    rollout = Rollout(EngineModel(), 12.0)
    rollout.launch(ONE, 10.0)
    rollout.launch(TWO, 20.0)
    rollout.settle(0)
    assert rollout.next_end(5.0) == NEVER
    rollout.advance(100.0)
    rollout.settle(2)
    assert rollout.next_end(100.0) == 110.0
    rollout.advance(12.0)
    assert list(rollout.pop_ended(112.0)) == [(ONE, False), (TWO, True)]
