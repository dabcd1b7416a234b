"""Controller and cell leader: role switches, work in a batch, the core's steps and publications."""

from __future__ import annotations

from gyre_hpc.records import CellId, Version
from gyre_hpc.schedule.protocol import Role
from gyre_hpc.transport.messages.base import Message, Serial
from gyre_hpc.transport.messages.processor import MicroStepRef
from gyre_hpc.transport.messages.regions import Manifest
from gyre_hpc.transport.messages.steps import StepName


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
    """The core has added this cell's contribution (or never will: void batch, failed pull): its gradient may be freed."""

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


class CellSwitched(Message, frozen=True):
    """The switch `serial` ended well, or its engine serves again after a death. For ROLLOUT the engine confirmed `version`.

    `phases` maps phase name to seconds.
    """

    role: Role
    version: Version
    address: str
    phases: dict[StepName, float]
    serial: Serial
    port: str = ""
    """Address of the cell's page port; "" = its KV pages do not move."""


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
