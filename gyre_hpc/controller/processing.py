"""What the processor has been told, and what it has said of it.

A processor holds nothing that the controller could not tell it again: groups that may still be trained, and outcomes
that are not at rest yet. `unsealed` are the latter: an outcome stays there until a shard has it, so neither the death of
a processor nor that of a controller keeps a finished execution out of the shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from gyre_hpc.records import ExecutionId, GroupId, Version
from gyre_hpc.schedule.state import Group
from gyre_hpc.transport.messages import DropGroup, ExecutionOutcome, ExpectGroup, GroupProcessed, Message

Outcomes = Mapping[ExecutionId, ExecutionOutcome]


@dataclass
class Processing:
    """Groups by what is known of them. `send` goes to the processor, `query` names a group's query."""

    send: Callable[[Message], None]
    query: Callable[[GroupId], str]
    processed: dict[GroupId, GroupProcessed] = field(default_factory=dict)
    awaited: set[GroupId] = field(default_factory=set)
    """Groups a resumed run needs again before it goes on."""
    asked_again: set[GroupId] = field(default_factory=set)
    """Groups whose micro-steps lie nowhere at the moment."""
    unsealed: dict[ExecutionId, ExecutionOutcome] = field(default_factory=dict)

    def expect(self, group: GroupId, version: Version, executions: tuple[ExecutionId, ...]) -> None:
        """A group was dispatched."""
        self.send(ExpectGroup(group, self.query(group), version, executions))

    def outcome(self, outcome: ExecutionOutcome) -> None:
        """An execution is finished."""
        self.unsealed[outcome.execution] = outcome
        self.send(outcome)

    def sealed(self, executions: Iterable[ExecutionId]) -> None:
        """A shard holds these executions."""
        for id in executions:
            self.unsealed.pop(id, None)

    def take(self, message: GroupProcessed) -> None:
        """The micro-steps of a group, published."""
        self.processed[message.group] = message
        self.awaited.discard(message.group)
        self.asked_again.discard(message.group)

    def forget_all_but(self, live: Mapping[GroupId, Group]) -> None:
        """Groups that left the schedule: nothing can call for them again."""
        for group in [group for group in self.processed if group not in live]:
            del self.processed[group]
            self.send(DropGroup(group))

    def publish_again(self, group: Group, outcomes: Outcomes) -> None:
        """The micro-steps of a group lie nowhere: the processor makes them anew."""
        if group.id in self.asked_again:
            return
        self.asked_again.add(group.id)
        self.send(DropGroup(group.id))
        self.tell_again({group.id: group}, outcomes)

    def tell_again(self, live: Mapping[GroupId, Group], outcomes: Outcomes) -> None:
        """A fresh processor: every group that may still be trained, then every outcome it needs for them or the shards."""
        for group in live.values():
            self.expect(group.id, group.version, group.executions)
        members = {id: outcomes[id] for group in live.values() for id in group.executions if id in outcomes}
        for outcome in {**members, **self.unsealed}.values():
            self.send(outcome)
