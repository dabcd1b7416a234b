"""The role of a cell changes only along the listed transitions."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_hpc.cells.roles import TRANSITIONS, CellRole, RoleMachine
from gyre_hpc.errors import IllegalTransition

R = CellRole


def machine_in(role: CellRole) -> RoleMachine:
    """A machine driven to `role` by legal transitions."""
    frontier: list[tuple[CellRole, ...]] = [()]
    for path in frontier:
        machine = RoleMachine()
        for step in path:
            machine.to(step)
        if machine.role is role:
            return machine
        frontier += [
            (*path, following) for following in sorted(TRANSITIONS[machine.role]) if following not in path
        ]
    raise AssertionError(f"{role} cannot be reached")


@pytest.mark.parametrize("role", list(CellRole))
def test_every_role_can_be_reached_and_any_but_the_last_can_end(role: CellRole) -> None:
    machine = machine_in(role)
    if role is not R.ENDED:
        machine.to(R.ENDED)
    assert machine.role is R.ENDED


@pytest.mark.parametrize(("source", "target"), list(itertools.product(CellRole, CellRole)))
def test_an_unlisted_transition_names_both_roles_and_changes_nothing(
    source: CellRole, target: CellRole
) -> None:
    machine = machine_in(source)
    if target in TRANSITIONS[source]:
        machine.to(target)
        assert machine.role is target
    else:
        with pytest.raises(IllegalTransition, match=rf"{source} cannot go to {target}"):
            machine.to(target)
        assert machine.role is source


@given(st.lists(st.sampled_from(CellRole)))
def test_rollout_and_training_are_only_entered_through_their_switch(targets: list[CellRole]) -> None:
    machine, previous = RoleMachine(), R.STARTING
    for target in targets:
        if target not in TRANSITIONS[machine.role]:
            continue
        previous = machine.role
        machine.to(target)
        if target is R.ROLLOUT:
            assert previous is R.SWITCHING_TO_ROLLOUT
        if target is R.TRAINING:
            assert previous is R.SWITCHING_TO_TRAINING


def test_a_requirement_that_is_not_met_names_the_role() -> None:
    with pytest.raises(IllegalTransition, match="starting cannot commit a batch"):
        RoleMachine().require(R.TRAINING, action="commit a batch")
