"""Policies: who may train when. One interface, three implementations, chosen by `settings.policy`."""

from __future__ import annotations

from gyre_hpc.schedule.policies.asynchronous import Asynchronous
from gyre_hpc.schedule.policies.base import Policy, Turning
from gyre_hpc.schedule.policies.colocate import Colocate
from gyre_hpc.schedule.policies.gyre import Gyre
from gyre_hpc.schedule.settings import PolicyName
from gyre_hpc.schedule.state import State

__all__ = ["POLICIES", "Policy", "Turning", "policy_of"]

POLICIES: dict[PolicyName, Policy] = {
    PolicyName.GYRE: Gyre(),
    PolicyName.COLOCATE: Colocate(),
    PolicyName.ASYNC: Asynchronous(),
}


def policy_of(state: State) -> Policy:
    """The policy this run was configured with."""
    return POLICIES[state.settings.policy]
