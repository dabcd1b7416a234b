"""Dispatched groups: who of them has ended, when the group is scored, what it costs the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from gyre_hpc.records import ExecutionId, GroupId
from gyre_hpc.schedule.protocol import DispatchedGroup
from gyre_hpc.simulate.workload import GroupWork


class Finished(NamedTuple):
    """A group whose outcomes are final. `valid` executions of it are trained; `micro_steps` is 0 if not known."""

    valid: int
    work: float
    micro_steps: int


class _Group:
    __slots__ = ("kept", "open", "scored_at", "work")

    def __init__(self, work: GroupWork) -> None:
        self.work = work
        self.open = len(work.seconds)
        self.kept: list[int] = []
        self.scored_at = 0.0


class Groups:
    """All groups that have not been scored, filled from an endless source in dispatch order."""

    def __init__(self, source: Iterator[GroupWork]) -> None:
        self._source = source
        self._groups: dict[GroupId, _Group] = {}
        self._members: dict[ExecutionId, tuple[GroupId, int]] = {}

    def admit(self, dispatched: DispatchedGroup) -> GroupWork:
        """The next group of the source gets these ids."""
        group = _Group(next(self._source))
        self._groups[dispatched.group] = group
        for index, execution in enumerate(dispatched.executions):
            self._members[execution] = (dispatched.group, index)
        return group.work

    def seconds(self, execution: ExecutionId) -> float:
        """What it needs undisturbed."""
        group, index = self._members[execution]
        return self._groups[group].work.seconds[index]

    def member(self, execution: ExecutionId) -> tuple[GroupWork, int] | None:
        """Its group's work and its place in it; None if it was not dispatched or has ended."""
        member = self._members.get(execution)
        return None if member is None else (self._groups[member[0]].work, member[1])

    def end(self, execution: ExecutionId, scored_at: float | None) -> tuple[GroupId, float] | None:
        """It has ended and has its score at that time (None: it is surplus). (group, when all scores are there) if it was
        the last of its group."""
        id_, index = self._members.pop(execution)
        group = self._groups[id_]
        group.open -= 1
        if scored_at is not None:
            group.scored_at = max(group.scored_at, scored_at)
            if group.work.is_valid(index):
                group.kept.append(index)
        return None if group.open else (id_, group.scored_at)

    def finish(self, id_: GroupId) -> Finished:
        """All scores are there."""
        group = self._groups.pop(id_)
        given, total = group.work.micro_steps, sum(group.work.training)
        work = sum(group.work.training[index] for index in group.kept)
        if given and total and len(group.kept) < len(group.work.training):
            given = max(1, round(given * work / total))
        return Finished(len(group.kept), work, given)
