"""Cells of other jobs: they come, train or only serve, and vanish; the run's own cells keep the core."""

from __future__ import annotations

import pytest

from gyre_hpc.errors import ConfigError
from gyre_hpc.records import CellId, Version
from gyre_hpc.schedule.protocol import (
    CellAdded,
    CellKind,
    CellLost,
    CoreRestored,
    Launch,
    RestoreCore,
    ToRollout,
    ToTraining,
)
from gyre_hpc.schedule.settings import PolicyName, Settings
from gyre_hpc.schedule.state import CellRole

from .script import Script

SATELLITE = CellAdded(CellId(3), 11, CellKind.SATELLITE)
SERVING = CellAdded(CellId(4), 11, CellKind.ROLLOUT)


def ids(run: Script) -> list[int]:
    return [cell.id for cell in run.state.cells]


def test_a_guest_that_only_serves_raises_the_capacity_and_stands_behind_all_that_train() -> None:
    run = Script(batch_groups=6)
    run.start()
    assert run.state.rollout_capacity == 33 and len(run.state.queued) == 15
    run.tell(SERVING)
    assert run.state.rollout_capacity == 44 and len(run.heard(Launch)) == 1 and len(run.state.queued) == 4
    run.tell(SATELLITE)
    assert ids(run) == [0, 1, 2, 3, 4] and not run.state.queued


@pytest.mark.parametrize("policy", PolicyName)
def test_only_a_guest_that_trains_is_ever_sent_to_training(policy: PolicyName) -> None:
    run = Script(policy=policy, training_cells=2 if policy is PolicyName.ASYNC else 0)
    run.start()
    run.tell(SERVING, SATELLITE)
    sent = set()
    for group in list(run.state.groups):
        sent |= {it.cell for it in run.end_group(group) if isinstance(it, ToTraining)}
    expected = {PolicyName.GYRE: {0, 1, 2, 3}, PolicyName.COLOCATE: {0, 1, 2, 3}, PolicyName.ASYNC: set()}
    assert sent == expected[policy] and run.state.cells[-1].role is CellRole.ROLLOUT


def test_with_a_guest_that_only_serves_every_other_cell_may_train_while_executions_run() -> None:
    run = Script()
    run.start()
    run.tell(SERVING)
    for group in (0, 1, 2):
        run.end_group(group)
    assert run.state.waterlevel == 8 and run.state.rollout_capacity == 11
    assert run.roles() == [CellRole.JOINING] * 3 + [CellRole.ROLLOUT]


def test_the_core_is_never_a_guest_even_if_no_other_cell_lives() -> None:
    run = Script(capacities=(11,))
    run.start()
    run.tell(SATELLITE, SERVING)
    assert run.tell(CellLost(CellId(0))) == [] and run.state.core is None and run.state.restoring
    assert run.tell(CellAdded(CellId(0), 11)) == [RestoreCore(CellId(0))]
    assert ids(run) == [0, 3, 4]
    run.tell(CoreRestored(Version(0)))
    assert run.state.core == 0 and not run.state.restoring


def test_a_guest_that_trains_returns_when_the_core_comes_back_behind_it() -> None:
    run = Script(capacities=(11,), batch_groups=1)
    run.start()
    run.tell(SATELLITE)
    run.end_group(0)
    run.trains(0, 3)
    run.tell(CellLost(CellId(0)))
    assert run.roles() == [CellRole.TRAINING]
    decisions = run.tell(CellAdded(CellId(0), 11))
    assert decisions == [ToRollout(CellId(3)), RestoreCore(CellId(0))]
    assert ids(run) == [0, 3] and run.roles() == [CellRole.ROLLOUT, CellRole.RETURNING]


def test_the_standalone_pool_serves_for_the_whole_run_and_lets_every_other_cell_train() -> None:
    run = Script(capacities=(11, 11, 11), standalone=1)
    run.start()
    assert run.state.rollout_capacity == 33, "its capacity counts"
    sent: set[int] = set()
    for group in list(run.state.groups)[:3]:
        sent |= {it.cell for it in run.end_group(group) if isinstance(it, ToTraining)}
    assert sent == {0, 1} and run.state.waterlevel > 0
    run.tell(CellLost(CellId(2)))
    run.tell(CellAdded(CellId(2), 11, CellKind.STANDALONE))
    assert ids(run)[-1] == 2 and run.state.cells[-1].role is CellRole.ROLLOUT


def test_a_cell_of_the_standalone_pool_never_becomes_the_core() -> None:
    run = Script(capacities=(11, 11), standalone=1)
    run.start()
    assert run.tell(CellLost(CellId(0))) == [] and run.state.core is None
    assert run.tell(CellAdded(CellId(0), 11)) == [RestoreCore(CellId(0))]


def test_a_pool_of_all_cells_is_refused() -> None:
    with pytest.raises(ConfigError, match="leave no core"):
        Settings(capacities=(11, 11), standalone=2)
