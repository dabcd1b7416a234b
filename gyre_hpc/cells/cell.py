"""A cell as a handler of the controller's messages, one at a time and in order.

Each handler finishes before the next begins, so a claimed micro-step is always done before the flush or the role switch
that was sent after it. A satellite's gradient leaves the trainer when it is flushed and its region stays until it is
committed; the core's gradient stays in the trainer until the commit. A pull that fails, as when its source dies, costs
the cell nothing: it says so, stays what it was and waits for other weights. What cannot be answered so, or with
SwitchFailed, is raised and ends the process: the controller then returns the cell's claims.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from gyre_hpc.cells.engine_host import EngineHost
from gyre_hpc.cells.memory_ledger import MemoryLedger
from gyre_hpc.cells.offers import Offers
from gyre_hpc.cells.roles import CellRole, RoleMachine
from gyre_hpc.cells.steps import RELEASE_S, TRAINER_S, Phases, step_done, timed, within
from gyre_hpc.cells.trainer_host import TrainerHost
from gyre_hpc.config import RunConfig
from gyre_hpc.errors import GyreError, ProtocolViolation
from gyre_hpc.layout import RunLayout
from gyre_hpc.records import CellId, Version
from gyre_hpc.schedule.protocol import Role
from gyre_hpc.trajectories.micro_steps import MicroStep
from gyre_hpc.transport.messages import (
    BatchCommitted,
    BecomeEngine,
    BecomeTrainer,
    CellSwitched,
    Claim,
    Claimed,
    CommitBatch,
    CommitFailed,
    Contribution,
    ContributionCommitted,
    EngineDown,
    FlushContribution,
    Manifest,
    Message,
    MicroStepDone,
    MicroStepRef,
    MicroStepUnavailable,
    PublishWeights,
    RestoreTrainer,
    Serial,
    StartBatch,
    StartPostponed,
    StepName,
    SwitchFailed,
    SwitchPostponed,
    TrainerRestored,
    WeightsPublished,
    WorkReady,
)
from gyre_hpc.transport.regions import PullFailed, RegionServer

log = logging.getLogger(__name__)
Array = npt.NDArray[Any]
SERVES_WEIGHTS = (CellRole.STARTING, CellRole.ROLLOUT, CellRole.TRAINING)
"""Roles from which an engine may be told to serve."""


@dataclass(frozen=True)
class EngineDied:
    """Not a message of the controller: the engine process ended. Queued among them, to be handled in order."""

    cause: str


@dataclass
class BatchWork:
    """What this cell does in the open batch. `asked`: a Claim is unanswered; `pending`: answered while not training."""

    batch: int
    done: list[str] = field(default_factory=list)
    asked: bool = False
    pending: MicroStepRef | None = None


class Cell:
    """One cell's state; `handle` is the only entry."""

    def __init__(
        self,
        config: RunConfig,
        layout: RunLayout,
        send: Callable[[Message], None],
        engine: EngineHost,
        trainer: TrainerHost,
        regions: RegionServer,
        id: CellId,
        ledger: MemoryLedger | None = None,
    ) -> None:
        self.id, self._ledger = id, ledger or MemoryLedger()
        self.port = ""
        """Address of the cell's page port."""
        self._config, self._layout, self._send = config, layout, send
        self._engine, self._trainer, self._regions = engine, trainer, regions
        self._machine = RoleMachine()
        self._core = False
        self._served_as = Serial(-1)
        """The BecomeEngine whose weights the engine serves."""
        self._work: BatchWork | None = None
        self._offers = Offers(regions, config.schedule.steps_per_burst)

    @property
    def role(self) -> CellRole:
        return self._machine.role

    async def handle(self, message: Message | EngineDied) -> None:
        """Carry one message out. Raises GyreError when the cell cannot go on."""
        match message:
            case BecomeTrainer():
                await self._become_trainer(message)
            case BecomeEngine():
                await self._become_engine(message)
            case EngineDied():
                await self._revive_engine()
            case StartBatch():
                await self._start_batch(message)
            case Claimed(batch=batch, micro_step=ref):
                await self._claimed(batch, ref)
            case WorkReady(batch=batch):
                if self._work is not None and self._work.batch == batch:
                    self._ask()
            case FlushContribution(batch=batch):
                await self._flush(batch)
            case ContributionCommitted(batch=batch):
                await self._committed(batch)
            case CommitBatch():
                await self._commit(message)
            case PublishWeights():
                await self._publish(message)
            case RestoreTrainer():
                await self._restore(message)
            case _:
                raise ProtocolViolation(f"a cell cannot handle {type(message).__name__}")

    def engine_died(self, cause: str) -> bool:
        """Tell the controller at once if calls were being served; True if the engine must be revived."""
        serving = self.role is CellRole.ROLLOUT
        log.log(logging.ERROR if serving else logging.WARNING, "%s (in %s)", cause, self.role)
        if serving:
            self._send(EngineDown(cause))
        return serving

    def end(self) -> None:
        """No role any more."""
        if self.role is not CellRole.ENDED:
            self._machine.to(CellRole.ENDED)

    # ---- role switches ------------------------------------------------------------------------------------------

    async def _become_trainer(self, message: BecomeTrainer) -> None:
        self._machine.to(CellRole.SWITCHING_TO_TRAINING)
        phases = self._phases(message.serial)
        try:
            with timed(phases, StepName.LEDGER):
                gradient, freed = self._trainer.gradient_bytes, self._engine.held_bytes
                self._ledger.for_training(message.weights, gradient, freed)
            async with within(phases, StepName.RELEASE, RELEASE_S):
                await self._engine.release()
        except GyreError as error:
            self._fail(CellRole.BLOCKED, error)
            return
        try:
            await self._take_training_memory(message, phases)
        except GyreError as error:
            self._fail(CellRole.QUARANTINED, error)
            return
        self._core = message.core
        self._machine.to(CellRole.TRAINING)
        self._switched(CellSwitched(Role.TRAINING, self._trainer.version, "", phases, message.serial))
        await self._take_up_work()

    async def _take_training_memory(self, message: BecomeTrainer, phases: Phases) -> None:
        async with within(phases, StepName.RESTORE, TRAINER_S):
            await self._trainer.enter()
        if message.weights is None or message.core:
            return
        try:
            arrays = await self._pull_weights(message.weights, phases)
        except PullFailed as error:
            log.warning("training starts with version %d: %s", self._trainer.version, error)
            return
        async with within(phases, StepName.LOAD, TRAINER_S):
            await self._trainer.load_weights(arrays, Version(message.weights.version))

    async def _become_engine(self, message: BecomeEngine) -> None:
        self._machine.require(*SERVES_WEIGHTS, action=f"serve version {message.version}")
        was_training = self.role is CellRole.TRAINING
        phases = self._phases(message.serial)
        try:
            arrays = await self._pull_weights(message.weights, phases)
        except PullFailed as error:
            log.warning("still %s: %s", self.role, error)
            self._send(SwitchPostponed(str(error), message.serial))
            return
        self._machine.to(CellRole.SWITCHING_TO_ROLLOUT)
        try:
            with timed(phases, StepName.LEDGER):
                aside = self._trainer.leaving_bytes(keeps_gradient=self._core) if was_training else 0
                self._ledger.for_rollout(message.weights, self._engine.released_bytes, aside)
            if was_training:
                async with within(phases, StepName.OFFLOAD, TRAINER_S):
                    await self._leave_training()
            await self._engine.serve(message.version, arrays, phases)
        except GyreError as error:
            self._fail(CellRole.QUARANTINED, error)
            return
        self._served_as = message.serial
        self._serving(message.version, phases)

    async def _revive_engine(self) -> None:
        """Restart the dead engine with the weights it served, unless a later switch has already done so."""
        if self.role is not CellRole.ROLLOUT or self._engine.alive:
            return
        self._machine.to(CellRole.SWITCHING_TO_ROLLOUT)
        phases = self._phases(self._served_as)
        try:
            version = await self._engine.serve_again(phases)
        except GyreError as error:
            self._fail(CellRole.QUARANTINED, error)
            return
        self._serving(version, phases)

    async def _leave_training(self) -> None:
        """The core's open gradient is kept; a satellite's has been handed over, or none of it was counted."""
        if not self._core:
            self._work = None
            await self._trainer.clear()
        await self._trainer.leave()

    def _serving(self, version: Version, phases: Phases) -> None:
        self._machine.to(CellRole.ROLLOUT)
        self._switched(
            CellSwitched(Role.ROLLOUT, version, self._engine.address, phases, self._served_as, self.port)
        )

    def _phases(self, serial: Serial) -> Phases:
        """Steps of the switch `serial`, told to the controller as they end."""
        return Phases(lambda step: self._send(step_done(self.id, serial, step)))

    async def _pull_weights(self, manifest: Manifest, phases: Phases) -> dict[str, Array]:
        with timed(phases, StepName.PULL):
            arrays = await self._pull(manifest)
            phases.moved(StepName.PULL, sum(array.nbytes for array in arrays.values()))
            return arrays

    def _switched(self, message: CellSwitched) -> None:
        times = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in message.phases.items())
        log.info("%s at version %d (%s)", self.role, message.version, times)
        self._send(message)

    def _fail(self, role: CellRole, error: GyreError) -> None:
        log.error("%s -> %s: %s", self.role, role, error)
        self._machine.to(role)
        self._send(SwitchFailed(role.value, str(error)))

    # ---- work in a batch ----------------------------------------------------------------------------------------

    async def _start_batch(self, message: StartBatch) -> None:
        self._machine.require(CellRole.TRAINING, action=f"start batch {message.batch}")
        if self._work is None or self._work.batch != message.batch:
            self._work = None
            await self._trainer.clear()
            try:
                arrays = await self._pull(message.weights) if message.weights is not None else None
            except PullFailed as error:
                log.warning("batch %d: %s", message.batch, error)
                self._send(StartPostponed(message.batch, str(error)))
                return
            if arrays is not None:
                await self._trainer.load_weights(arrays, message.version)
            if (held := self._trainer.version) != message.version:
                raise ProtocolViolation(
                    f"batch {message.batch} trains version {message.version}, held is {held}"
                )
            self._work = BatchWork(message.batch)
        self._ask()

    def _ask(self) -> None:
        """Claim one micro-step, unless an answer is due or the cell does not train."""
        work = self._work
        if work is not None and not work.asked and self.role is CellRole.TRAINING:
            work.asked = True
            self._send(Claim(work.batch))

    async def _claimed(self, batch: int, ref: MicroStepRef | None) -> None:
        work = self._work
        if work is None or work.batch != batch:
            log.info("answer to a claim of batch %d, which is over here", batch)
            return
        work.asked = False
        if ref is not None:
            work.pending = ref
            if self.role is CellRole.TRAINING:
                await self._take_up_work()

    async def _take_up_work(self) -> None:
        """Do the claimed micro-step, if there is one and it is to be had, and ask for the next."""
        work = self._work
        if work is None:
            return
        if work.pending is not None:
            ref, work.pending = work.pending, None
            try:
                arrays = await self._pull(ref.manifest)
            except PullFailed as error:
                log.error("micro-step %s: %s", ref.id, error)
                self._send(MicroStepUnavailable(work.batch, ref.id, str(error)))
                self._ask()
                return
            metrics, seconds = await self._trainer.micro_step(
                MicroStep.from_arrays(ref.id, ref.group, arrays)
            )
            work.done.append(ref.id)
            self._send(MicroStepDone(work.batch, ref.id, seconds, metrics))
        self._ask()

    async def _flush(self, batch: int) -> None:
        work = self._work
        if work is None or work.batch != batch:
            self._send(Contribution(batch, (), None))
            return
        manifest: Manifest | None = None
        if work.done and not self._core:
            manifest = await self._trainer.take_gradient(lambda arrays: self._offer_gradient(batch, arrays))
        self._send(Contribution(batch, tuple(work.done), manifest))
        if not self._core:
            self._work = None

    def _offer_gradient(self, batch: int, arrays: Mapping[str, Array]) -> Manifest:
        return self._offers.gradient(batch, self._trainer.version, self._trainer.layout_digest, arrays)

    async def _committed(self, batch: int) -> None:
        self._offers.drop_gradient(batch)
        if self._work is not None and self._work.batch == batch:
            self._work = None
            await self._trainer.clear()

    # ---- the core -----------------------------------------------------------------------------------------------

    async def _commit(self, message: CommitBatch) -> None:
        self._machine.require(CellRole.TRAINING, action=f"commit batch {message.batch}")
        arrays: list[dict[str, Array]] = []
        for cell, manifest in message.contributions:
            try:
                arrays.append(await self._pull(manifest))
            except PullFailed as error:
                log.error("contribution of cell %d: %s", cell, error)
                self._send(CommitFailed(message.batch, cell, str(error)))
                return
        metrics = await self._trainer.commit(arrays, message.executions, message.version)
        self._work = None
        self._send(BatchCommitted(message.batch, message.version, metrics))

    async def _publish(self, message: PublishWeights) -> None:
        folder = self._layout.checkpoint(message.version) if message.checkpoint else None
        resident = self.role is CellRole.TRAINING
        arrays = await self._trainer.publish(folder, message.version, resident=resident)
        manifest = await self._offers.weights(message.version, self._trainer.layout_digest, arrays)
        self._send(WeightsPublished(message.version, manifest, self._layout.named(folder) if folder else ""))

    async def _restore(self, message: RestoreTrainer) -> None:
        self._work = None
        if self.role is CellRole.STARTING and self._engine.shares_device:
            await self._engine.release()
        resident = self.role is CellRole.TRAINING
        arrays = await self._trainer.restore_from(
            self._layout.root / message.checkpoint, message.version, resident=resident
        )
        self._core = True
        manifest = await self._offers.weights(message.version, self._trainer.layout_digest, arrays)
        self._send(TrainerRestored(message.version, manifest))

    async def _pull(self, manifest: Manifest) -> dict[str, Array]:
        return await self._regions.pull(manifest, deadline_s=self._config.transport.pull_timeout_s)
