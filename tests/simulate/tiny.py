"""Worlds small enough to be computed by hand: groups (10 s, 20 s) and (30 s, 40 s), 5 node-seconds of training each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from gyre_hpc.report import metrics as m
from gyre_hpc.schedule.settings import PolicyName, Settings
from gyre_hpc.simulate.outcome import Outcome
from gyre_hpc.simulate.workload import GroupWork
from gyre_hpc.simulate.world import AnyFault, Place, SwitchCosts, TrainingModel, World


@dataclass(frozen=True)
class Given:
    """The same groups again and again; held-out executions take 7 s."""

    seconds: tuple[tuple[float, ...], ...] = ((10.0, 20.0), (30.0, 40.0))
    cost: float = 5.0
    details: dict[str, object] = field(default_factory=dict)
    """Further fields of every group."""

    def groups(self, seed: int, executions: int) -> Iterator[GroupWork]:
        while True:
            for members in self.seconds:
                yield GroupWork(members, (self.cost,) * len(members), 25.0, **self.details)  # type: ignore[arg-type]

    def heldout(self, seed: int) -> Iterator[float]:
        while True:
            yield 7.0


def plan(count: int, policy: PolicyName = PolicyName.GYRE, **changes: object) -> Settings:
    """One step of both groups. One cell has room for all four executions, two cells for two each."""
    fields = {
        "capacities": (4 // min(count, 2),) * count,
        "policy": policy,
        "batch_groups": 2,
        "executions_per_group": 2,
        "steps": 1,
        "training_cells": int(policy is PolicyName.ASYNC),
        **changes,
    }
    return Settings(**fields)  # type: ignore[arg-type]


def world(count: int, *faults: AnyFault, **changes: object) -> World:
    """Cells of one node: 3 s to training, 2 s back, 1 s for the step, 4 s for the publication."""
    fields = {
        "cells": (Place(1.0, 4 // min(count, 2)),) * count,
        "training": TrainingModel(step_s=1.0),
        "switch": SwitchCosts({"drain": 1.0, "load": 2.0}, {"load": 2.0}),
        "publish_s": 4.0,
        "faults": faults,
        **changes,
    }
    return World(**fields)  # type: ignore[arg-type]


def moments(outcome: Outcome, role: str) -> list[float]:
    """When cells entered this role."""
    return [line.t for line in outcome.lines if isinstance(line, m.RoleChange) and line.role == role]


def waters(outcome: Outcome) -> list[m.Water]:
    """The ledger over time."""
    return [line for line in outcome.lines if isinstance(line, m.Water)]
