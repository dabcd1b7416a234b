"""Every message that crosses a link, by direction. Small, ordered, typed; bulk goes through regions.

A link joins the controller to one peer: a cell leader, the gateway, the runner or the processor. The envelope
(epoch, incarnation, sequence) belongs to `links.py`; these are the bodies. Pickle never crosses a wire.

An answer names its command: calls and work by execution and attempt, batch, micro-step or version, switches and routes by
a `Serial` of their own, so that a late answer is never taken for that of a later command.
"""

from __future__ import annotations

import enum
from typing import NewType

import msgspec

from gyre_hpc.records import Assessment, CellId, ClosingReason, ExecutionId, GroupId, Version
from gyre_hpc.schedule.protocol import Role

Serial = NewType("Serial", int)
"""Number of a switch or route: grows with each command of one controller, whatever the cell."""


class PeerKind(enum.StrEnum):
    """What a peer is."""

    CELL = "cell"
    GATEWAY = "gateway"
    RUNNER = "runner"
    PROCESSOR = "processor"


class RegionKind(enum.StrEnum):
    """What a region holds (design section 4)."""

    WEIGHTS = "weights"
    GRADIENT = "gradient"
    KV_PAGE = "kv_page"
    MICRO_STEPS = "micro_steps"


class Fragment(msgspec.Struct, frozen=True):
    """One array of a region. `xxh3` is the hex xxh3-64 of its bytes; `dtype` is numpy's (little-endian)."""

    id: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    xxh3: str


class Manifest(msgspec.Struct, frozen=True):
    """Where an immutable, versioned region lies and how to check it. `address` is host:port of the owner's server.

    `path` is the region's file on the owner's host; a puller that sees it maps it, any other asks `address`.
    """

    kind: RegionKind
    name: str
    version: int
    layout: str
    owner: str
    address: str
    fragments: tuple[Fragment, ...]
    path: str = ""


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all bodies; the tag is the class name."""


# ---- any peer -> controller -------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message of an incarnation. `address` is the URL or host:port the peer serves ("" if none)."""

    kind: PeerKind
    index: int
    pid: int
    host: str
    address: str


class Heartbeat(Message, frozen=True):
    """Sent every `transport.heartbeat_s` by a thread that does no tensor work."""


class Goodbye(Message, frozen=True):
    """The peer ends on purpose; `error` is empty on a clean end."""

    error: str = ""


# ---- controller -> any peer -------------------------------------------------------------------------------------


class Shutdown(Message, frozen=True):
    """End cleanly: finish writes, say Goodbye, exit 0."""

    reason: str


# ---- controller -> gateway --------------------------------------------------------------------------------------


class OpenExecution(Message, frozen=True):
    """Accept calls under `key` (unguessable; the base URL is <gateway address>/x/<key>)."""

    execution: ExecutionId
    attempt: int
    key: str
    evaluation: bool


class CloseExecution(Message, frozen=True):
    """Refuse further calls of this execution, abandon running ones, answer with ExecutionSealed."""

    execution: ExecutionId
    attempt: int


class Route(Message, frozen=True):
    """Send calls to this cell's engine at `address`; it serves `version`."""

    cell: CellId
    address: str
    capacity: int
    version: Version
    serial: Serial


class Unroute(Message, frozen=True):
    """Stop sending calls to the cell; let running calls finish for `drain_s`, then cut and re-route them.

    `gone` means the engine is dead: nothing can be asked of it. Answered with Unrouted.
    """

    cell: CellId
    drain_s: float
    cause: str
    serial: Serial
    gone: bool = False


# ---- gateway -> controller --------------------------------------------------------------------------------------


class Unrouted(Message, frozen=True):
    """No call of before the Unroute `serial` runs on the cell any more; `cut` calls were cut at a token boundary and moved."""

    cell: CellId
    cut: int
    serial: Serial


class EngineFault(Message, frozen=True):
    """The engine of the Route `serial` refused or reset; its calls have been re-routed."""

    cell: CellId
    cause: str
    serial: Serial


class ExecutionSealed(Message, frozen=True):
    """All records of the attempt are durable. `calls` counts generations begun for it."""

    execution: ExecutionId
    attempt: int
    calls: int
    calls_rerouted: int
    calls_lost: int
    tokens_sampled: int
    tokens_recomputed: int
    prompt_tokens: int
    held_s: float
    incomplete: bool
    budget_exhausted: bool
    stalls: int = 0
    """Silences of an engine under a call of the attempt of `gateway.stall_alarm_s` and more."""


class HeldBack(Message, frozen=True):
    """Seconds so far for which our side held calls of the attempt. The controller passes it on to the runner.

    Growing; sent about once a second while it grows. The runner gives the harness clock as much credit.
    """

    execution: ExecutionId
    attempt: int
    seconds: float


class GatewayStatus(Message, frozen=True):
    """Every second: calls running per cell, calls waiting for a route, tokens sampled so far."""

    running: dict[int, int]
    waiting: int
    tokens: int


# ---- controller -> runner ---------------------------------------------------------------------------------------


class StartExecution(Message, frozen=True):
    """Prepare the workspace of `query` and start the harness against `base_url`."""

    execution: ExecutionId
    attempt: int
    query: str
    base_url: str
    seed: int
    evaluation: bool


class CancelExecution(Message, frozen=True):
    """End the execution now with this reason; no assessment follows for surplus."""

    execution: ExecutionId
    attempt: int
    reason: ClosingReason


class AssessExecution(Message, frozen=True):
    """Assess the preserved workspace of an attempt that closed before its assessment was recorded (resume)."""

    execution: ExecutionId
    attempt: int
    query: str


class ForgetExecution(Message, frozen=True):
    """The outcome of the execution is recorded: nobody asks for any attempt of it again."""

    execution: ExecutionId


# ---- runner -> controller ---------------------------------------------------------------------------------------


class ExecutionStarted(Message, frozen=True):
    """The harness process runs."""

    execution: ExecutionId
    attempt: int


class ExecutionClosed(Message, frozen=True):
    """The harness has ended and will make no further call. `wall_s` is real, `exit_code` None if killed."""

    execution: ExecutionId
    attempt: int
    reason: ClosingReason
    wall_s: float
    exit_code: int | None
    detail: str


class ExecutionAssessed(Message, frozen=True):
    """The final assessment (after retries). Not sent for reasons outside SCORED_REASONS."""

    execution: ExecutionId
    attempt: int
    assessment: Assessment


# ---- controller -> processor ------------------------------------------------------------------------------------


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


# ---- processor -> controller ------------------------------------------------------------------------------------


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


# ---- controller -> cell -----------------------------------------------------------------------------------------


class BecomeTrainer(Message, frozen=True):
    """Release the engine's memory, load `weights` (None for the core: it owns them), report CellSwitched(TRAINING)."""

    batch: int
    core: bool
    weights: Manifest | None
    version: Version
    serial: Serial


class BecomeEngine(Message, frozen=True):
    """Off-load the trainer, resume the engine, load and confirm `version`, report CellSwitched(ROLLOUT)."""

    version: Version
    weights: Manifest
    serial: Serial


class StartBatch(Message, frozen=True):
    """A batch is open for this training cell: begin to claim. Satellites pull `weights` first if not None."""

    batch: int
    version: Version
    weights: Manifest | None


class Claimed(Message, frozen=True):
    """Answer to Claim: work, or None when nothing is unclaimed at the moment (ask again when WorkReady comes)."""

    batch: int
    micro_step: MicroStepRef | None


class WorkReady(Message, frozen=True):
    """Micro-steps are claimable again."""

    batch: int


class FlushContribution(Message, frozen=True):
    """No more work in this batch for this cell: publish the accumulated gradient, answer with Contribution."""

    batch: int


class ContributionCommitted(Message, frozen=True):
    """The core has added this cell's contribution (or the batch is void): its gradient may be freed."""

    batch: int


class CommitBatch(Message, frozen=True):
    """To the core: add `contributions` in the given order to its own gradient, scale by 1/executions, clip, step.

    Contributions: (cell, manifest). Answered with BatchCommitted(version).
    """

    batch: int
    version: Version
    executions: int
    contributions: tuple[tuple[CellId, Manifest], ...]


class PublishWeights(Message, frozen=True):
    """To the core: write checkpoint and weights region of `version`; answer with WeightsPublished."""

    version: Version
    checkpoint: bool


class RestoreTrainer(Message, frozen=True):
    """To the new core: load the checkpoint folder (relative to the run folder), answer with TrainerRestored."""

    checkpoint: str
    version: Version


# ---- cell -> controller -----------------------------------------------------------------------------------------


class CellSwitched(Message, frozen=True):
    """The switch `serial` ended well, or its engine serves again after a death. For ROLLOUT the engine confirmed `version`.

    `phases` maps phase name to seconds.
    """

    role: Role
    version: Version
    address: str
    phases: dict[str, float]
    serial: Serial


class SwitchFailed(Message, frozen=True):
    """`state` is "blocked" (release failed) or "quarantined" (load failed): this incarnation can only end."""

    state: str
    error: str


class SwitchPostponed(Message, frozen=True):
    """The weights of the BecomeEngine `serial` could not be pulled: the cell is as it was and waits for another one."""

    reason: str
    serial: Serial


class StartPostponed(Message, frozen=True):
    """The weights of the StartBatch of `batch` could not be pulled: the cell waits for another one."""

    batch: int
    reason: str


class EngineDown(Message, frozen=True):
    """The cell's engine process died; the leader is restarting it. CellSwitched(ROLLOUT) follows when it serves."""

    cause: str


class Claim(Message, frozen=True):
    """Ask for one micro-step of the batch."""

    batch: int


class MicroStepDone(Message, frozen=True):
    """Provisional: the gradient of this micro-step is in the cell's accumulator."""

    batch: int
    micro_step: str
    seconds: float
    metrics: dict[str, float]


class MicroStepUnavailable(Message, frozen=True):
    """The claimed micro-step's region could not be pulled: the claim returns, the group is to be published again."""

    batch: int
    micro_step: str
    reason: str


class Contribution(Message, frozen=True):
    """The cell's one contribution to the batch; names its micro-steps. `manifest` is None when it did none."""

    batch: int
    micro_steps: tuple[str, ...]
    manifest: Manifest | None


class BatchCommitted(Message, frozen=True):
    """The optimizer has stepped. `metrics`: grad_norm, learning_rate, ..."""

    batch: int
    version: Version
    metrics: dict[str, float]


class CommitFailed(Message, frozen=True):
    """The contribution of `cell` could not be pulled; nothing was added, the core's own gradient stands."""

    batch: int
    cell: CellId
    reason: str


class WeightsPublished(Message, frozen=True):
    """`weights` is the region satellites and engines pull; `checkpoint` is a folder or "" if none was asked.

    Relative to the run folder.
    """

    version: Version
    weights: Manifest
    checkpoint: str


class TrainerRestored(Message, frozen=True):
    """The core holds the checkpoint of `version`; `weights` is its region."""

    version: Version
    weights: Manifest


FromPeer = (
    Hello
    | Heartbeat
    | Goodbye
    | Unrouted
    | EngineFault
    | ExecutionSealed
    | HeldBack
    | GatewayStatus
    | ExecutionStarted
    | ExecutionClosed
    | ExecutionAssessed
    | GroupProcessed
    | ShardSealed
    | CellSwitched
    | SwitchFailed
    | SwitchPostponed
    | StartPostponed
    | EngineDown
    | Claim
    | MicroStepDone
    | MicroStepUnavailable
    | Contribution
    | BatchCommitted
    | CommitFailed
    | WeightsPublished
    | TrainerRestored
)
FromController = (
    Shutdown
    | OpenExecution
    | CloseExecution
    | Route
    | Unroute
    | StartExecution
    | CancelExecution
    | AssessExecution
    | ForgetExecution
    | HeldBack
    | ExpectGroup
    | ExecutionOutcome
    | DropGroup
    | Seal
    | BecomeTrainer
    | BecomeEngine
    | StartBatch
    | Claimed
    | WorkReady
    | FlushContribution
    | ContributionCommitted
    | CommitBatch
    | PublishWeights
    | RestoreTrainer
)
