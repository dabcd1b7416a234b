"""Optimizer steps as the controller sees them: the open batch in line with the schedule, the step's record, publication.

The schedule says which groups a batch takes and which cells train; `batches.py` hands out the work; here the two are kept
in line after every event. A step is recorded in the journal frame of the event that makes it count. Engines load weights
only once every service is up and what a resumed run waits for has been processed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from gyre_hpc.config import RunConfig
from gyre_hpc.controller.cells.cell_table import CellTable
from gyre_hpc.controller.cells.phases import Phase
from gyre_hpc.controller.driver import Driver
from gyre_hpc.controller.executions import queries
from gyre_hpc.controller.journal.entries import StepTaken
from gyre_hpc.controller.monitor.observer import Observer
from gyre_hpc.controller.processing import Outcomes, Processing
from gyre_hpc.controller.training.batches import BatchRunner
from gyre_hpc.controller.training.claims import Contradiction
from gyre_hpc.controller.training.weights import WeightKeeper
from gyre_hpc.records import CellId, Version
from gyre_hpc.schedule import protocol as p
from gyre_hpc.schedule.state import Phase as RunPhase
from gyre_hpc.schedule.state import State
from gyre_hpc.training.metrics import merge, summarise
from gyre_hpc.transport import messages as msg

WORK_S: Final = 3600.0
"""Seconds in which a trainer must have done the one thing it was asked for (a micro-step, its contribution, a step, a checkpoint).
Nothing takes near as long: one that does hangs, and its process, which beats on, is ended."""
LOOK_S: Final = 10.0
"""Most seconds between two looks that count: the whole job may have been suspended."""


@dataclass
class Steps:
    """Joins driver, batches, weights, cells and processing; owns only the sums of the open batch."""

    config: RunConfig
    driver: Driver
    cells: CellTable
    batches: BatchRunner
    weights: WeightKeeper
    processing: Processing
    observer: Observer
    _sums: dict[str, dict[str, float]] = field(default_factory=dict)
    _returning: dict[CellId, float] = field(default_factory=dict)
    """Cells whose contribution is awaited before they leave training, and since when (Unix seconds)."""
    _asked: dict[tuple[CellId, str], float] = field(default_factory=dict)
    """What trainers are at, and for how many seconds that has been seen; for ever less than any, once it was called overdue."""
    _looked: float = 0.0

    @property
    def state(self) -> State:
        return self.driver.state

    @property
    def _all_taken(self) -> bool:
        return self.state.steps_done >= self.config.schedule.steps

    # ---- the open batch -----------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Bring the claims ledger in line with the schedule's open batch."""
        batch, core = self.state.open_batch, self.state.core
        if batch is None or core is None or self.batches.finished(batch.index):
            return
        if self.batches.ledger is None or self.batches.ledger.batch != batch.index:
            makes = Version(self.state.version + 1)
            self.batches.open(batch.index, core, self.state.core_version, makes)
            self.observer.batch_opened()
        for group in batch.groups:
            processed = self.processing.processed.get(group)
            if processed is not None:
                self.batches.add_group(group, processed.micro_steps, processed.valid)
        if batch.window_open:
            for cell in self.state.trainers:
                row = self.cells.cells[cell]
                if row.phase is Phase.TRAINING and not row.departing:
                    self.batches.enrol(cell)

    def micro_step_done(self, cell: CellId, message: msg.MicroStepDone) -> None:
        if self.batches.done(cell, message.batch, message.micro_step):
            self._sums[message.micro_step] = message.metrics

    def micro_step_unavailable(
        self, cell: CellId, message: msg.MicroStepUnavailable, outcomes: Outcomes
    ) -> None:
        """A claimed micro-step lies nowhere: its group is processed and published again."""
        ref = self.batches.unavailable(cell, message.batch, message.micro_step)
        if ref is not None and ref.group in self.state.groups:
            self.observer.fault(f"micro-step {message.micro_step}", f"not available: {message.reason}")
            self.processing.publish_again(self.state.groups[ref.group], outcomes)

    def contribution(self, cell: CellId, message: msg.Contribution) -> None:
        self.batches.contribution(cell, message)
        if cell in self._returning:
            self.cells.flushed(cell, self._returning.pop(cell))
            self.cells.to_rollout(cell)

    def to_rollout(self, cell: CellId) -> None:
        """The cell leaves training, after its contribution if it has one."""
        if self.batches.flush_leaver(cell):
            self._returning[cell] = time.time()
        else:
            self.cells.to_rollout(cell)

    def overdue(self, now: float) -> list[tuple[CellId, str]]:
        """Cells whose trainer is not through with something after WORK_S, and with what. Each is told once."""
        passed, self._looked = min(now - self._looked, LOOK_S), now
        self._asked = {what: self._asked.get(what, -passed) + passed for what in self._under_way()}
        late = sorted(what for what, seconds in self._asked.items() if seconds > WORK_S)
        self._asked |= dict.fromkeys(late, -math.inf)
        return late

    def _under_way(self) -> Iterator[tuple[CellId, str]]:
        ledger, core = self.batches.ledger, self.state.core
        if self.weights.restoring is not None:
            yield self.weights.restoring, "restoring a checkpoint"
        if core is not None and self.weights.publishing is not None:
            yield core, f"publishing version {self.weights.publishing}"
        if ledger is None:
            return
        yield from ((cell, f"micro-step {name}") for name, cell in ledger.claims)
        yield from ((cell, f"its contribution to batch {ledger.batch}") for cell in self.batches.flushing)
        if core is not None and self.batches.committing:
            yield core, f"the step of batch {ledger.batch}"

    def cell_lost(self, cell: CellId) -> None:
        """What the cell did and held for training is gone; without the core the batch is void."""
        core = cell == self.state.core
        if core:
            self.batches.release()
        else:
            self.batches.cell_lost(cell)
        self._returning.pop(cell, None)
        self.weights.cell_lost(cell, core)

    # ---- the step -----------------------------------------------------------------------------------------------

    def committed(self, cell: CellId, message: msg.BatchCommitted) -> None:
        """The core has stepped. Raises Contradiction if nobody told the cell to."""
        ledger, batch, core = self.batches.ledger, self.state.open_batch, self.state.core
        if ledger is None or batch is None or core is None or ledger.batch != message.batch:
            return
        if cell != core or not self.batches.committing or message.version != self.batches.makes:
            raise Contradiction(f"cell {cell} steps to version {message.version} unasked")
        metrics = {
            **message.metrics,
            **summarise(merge(self._sums[name] for _, names in ledger.owners() for name in names)),
        }
        self._sums.clear()
        groups = [self.processing.processed[group] for group in batch.groups]
        staleness = tuple(self.state.staleness(self.state.groups[group]) for group in batch.groups)
        record = StepTaken(
            at=time.time(),
            batch=message.batch,
            version=message.version,
            executions=self.batches.executions,
            owners=ledger.owners(),
            metrics=metrics,
            staleness=staleness,
            tokens_trained=sum(group.trained_tokens for group in groups),
        )
        self.observer.step(record, self.state.step_of(message.version), groups, len(ledger))
        self.batches.trainer_version[core] = message.version
        self.batches.release()
        self.driver.feed(p.BatchDone(stepped=True), record)
        if self.state.open_batch is not None:
            self.weights.expose(core, message.version)

    # ---- weights ------------------------------------------------------------------------------------------------

    def publish(self, version: Version) -> None:
        assert self.state.core is not None
        self.observer.publishing()
        self.weights.publish(self.state.core, version, last=self._all_taken)

    def version_served(self, version: Version) -> None:
        """Every live engine serves `version`. A publication whose core is lost does not count; it is made again."""
        tasks, done = self.config.tasks, self._all_taken
        every = tasks.evaluate_every
        self.driver.feed(p.Published(version))
        if self.state.published != version:
            return
        self.observer.published(version)
        if tasks.heldout and (done or (every and self.weights.publications() % every == 0)):
            self.evaluate(version)

    def evaluate(self, version: Version) -> None:
        """Held-out executions of `version` are due."""
        size = queries.evaluation_size(self.config.tasks)
        self.driver.feed(p.EvaluationDue(version, size))

    def evaluate_if_awaited(self) -> None:
        """The last evaluation that the schedule waits for, if an earlier controller died before it could say it is due."""
        state = self.state
        awaited = state.settings.evaluate_last and not state.evaluated_last
        if state.phase is RunPhase.ENDING and awaited:
            self.evaluate(state.published)

    def restore_core(self, cell: CellId) -> None:
        """This cell is the core: its trainer holds the newest checkpoint, or loads it."""
        self.batches.release()
        restored = self.weights.restored
        if restored is not None and restored[0] == cell:
            self._core_restored(restored[1].version)
        elif self.weights.restoring != cell:
            self.weights.restore(cell)

    def trainer_restored(self, cell: CellId, message: msg.TrainerRestored, *, ready: bool) -> None:
        if not self.weights.trainer_restored(cell, message):
            return
        if self.state.restoring and self.state.core == cell:
            self._core_restored(message.version)
        if self.cells.weights is not None:
            self.cells.weights_available(message.weights)
        self.offer_weights(ready=ready)

    def _core_restored(self, version: Version) -> None:
        self.observer.restored(version)
        self.driver.feed(p.CoreRestored(version))

    def offer_weights(self, *, ready: bool) -> None:
        """Engines load once weights exist, the services are `ready` and nothing is awaited of the processor."""
        available = self.weights.available
        if ready and not self.processing.awaited and available is not None and self.cells.weights is None:
            self.cells.weights_available(available)
