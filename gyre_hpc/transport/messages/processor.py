"""Controller and processor: groups expected, outcomes told, micro-steps published, shards sealed."""

from __future__ import annotations

import msgspec

from gyre_hpc.records import Assessment, ClosingReason, ExecutionId, GroupId, Version
from gyre_hpc.transport.messages.base import Message
from gyre_hpc.transport.messages.regions import Manifest


class ExpectGroup(Message, frozen=True):
    """A dispatched group. `version` is the stamp; `executions` its members."""

    group: GroupId
    query: str
    version: Version
    executions: tuple[ExecutionId, ...]


class ExecutionOutcome(Message, frozen=True):
    """Closed, sealed, finally assessed or finally excluded. `group` is None for an evaluation.

    `assessment` is None when the execution is excluded (infrastructure, overall timeout, surplus, lost records).
    """

    execution: ExecutionId
    attempt: int
    group: GroupId | None
    query: str
    reason: ClosingReason
    wall_s: float
    incomplete: bool
    assessment: Assessment | None


class DropGroup(Message, frozen=True):
    """The group was written off or consumed: free what is held for it in memory."""

    group: GroupId


class Seal(Message, frozen=True):
    """Seal pending executions into a shard now (publication, drain)."""


class MicroStepRef(msgspec.Struct, frozen=True):
    """One claimable unit of training work. `id` is "<group>.<index>"."""

    id: str
    group: GroupId
    version: Version
    tokens: int
    targets: int
    manifest: Manifest


class GroupProcessed(Message, frozen=True):
    """`valid` executions have a score, the group's share of |E|: from 2 on it is ready, below that dead for `reason`."""

    group: GroupId
    valid: int
    rewards: tuple[float, ...]
    micro_steps: tuple[MicroStepRef, ...]
    trained_tokens: int
    paths: int
    paths_cut: int
    reason: str


class ShardSealed(Message, frozen=True):
    """These executions are at rest."""

    shard: str
    executions: tuple[ExecutionId, ...]
