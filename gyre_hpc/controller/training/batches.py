"""One training batch at a time: who may claim, who has contributed, when the core may step.

Satellites get StartBatch (with the core's snapshot if theirs is older), claim micro-steps until the batch closes, hand
over one contribution, and free it when it is committed. The core's own gradient never leaves it: it claims until
CommitBatch, so claims that return after the flush still find a worker. A contribution enters the sum whole or not at
all; a lost cell's micro-steps return, contributed or not, until the core has committed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from gyre_hpc.controller.training.claims import ClaimsLedger, Contradiction
from gyre_hpc.errors import IllegalTransition
from gyre_hpc.records import CellId, GroupId, Version
from gyre_hpc.schedule.protocol import MicroSteps
from gyre_hpc.transport.messages import (
    Claimed,
    CommitBatch,
    Contribution,
    ContributionCommitted,
    FlushContribution,
    Manifest,
    Message,
    MicroStepRef,
    StartBatch,
    WorkReady,
)

log = logging.getLogger(__name__)
INITIAL = Version(0)


@dataclass(frozen=True)
class BatchHooks:
    """What the runner asks of its owner."""

    send: Callable[[CellId, Message], None]
    counts: Callable[[MicroSteps], None]
    """The ledger's counts for the schedule."""
    empty: Callable[[], None]
    """The batch closed without a micro-step."""
    joined: Callable[[CellId, int, bool], None]
    """(cell, batch, mid_batch): a satellite or the core may claim from here on."""


@dataclass
class BatchRunner:
    """State of the open batch. `executions` is |E|: valid executions of the consumed groups.

    `version` is what all participants' weights are, `makes` the version that the commit gives; steps that were undone lie
    between them.
    """

    hooks: BatchHooks
    ledger: ClaimsLedger | None = None
    core: CellId | None = None
    version: Version = INITIAL
    makes: Version = INITIAL
    snapshot: Manifest | None = None
    executions: int = 0
    participants: set[CellId] = field(default_factory=set)
    waiting: set[CellId] = field(default_factory=set)
    contributions: dict[CellId, Contribution] = field(default_factory=dict)
    flushing: set[CellId] = field(default_factory=set)
    refused: set[CellId] = field(default_factory=set)
    """Cells whose contribution the core could not pull: they have no further part in this batch."""
    survived_by: set[CellId] = field(default_factory=set)
    """Cells that were lost while the core commits what they contributed: that counts if it is to be had."""
    trainer_version: dict[CellId, Version] = field(default_factory=dict)
    """What cells have said that their trainers hold: a snapshot counts once the cell claims with it."""
    unpulled: dict[CellId, Manifest] = field(default_factory=dict)
    """Snapshots that cells could not pull: they wait for others."""
    closing: bool = False
    committing: bool = False
    last_finished: int = -1

    def finished(self, batch: int) -> bool:
        """Whether this batch is committed, empty or void."""
        return batch <= self.last_finished

    def works(self, cell: CellId) -> bool:
        """Whether the cell holds a claim, or commits the batch."""
        held = self.ledger is not None and self.ledger.holds(cell)
        return held or (self.committing and cell == self.core)

    def owes(self, cell: CellId) -> bool:
        """Whether the cell holds a contribution, made or being made, that the core has not added yet."""
        return cell in self.contributions or cell in self.flushing

    # ---- opening ------------------------------------------------------------------------------------------------

    def open(self, batch: int, core: CellId, version: Version, makes: Version) -> None:
        """A new batch of weights `version` that steps to `makes`; nobody participates yet."""
        self.ledger = ClaimsLedger(batch)
        self.core, self.version, self.makes, self.executions = core, version, makes, 0
        self.participants, self.waiting, self.flushing, self.survived_by = set(), set(), set(), set()
        self.refused, self.contributions, self.closing, self.committing = set(), {}, False, False

    def add_group(self, group: GroupId, refs: tuple[MicroStepRef, ...], executions: int) -> None:
        """The schedule gave a slot to a ready group."""
        ledger = self._open_ledger()
        if group in ledger.groups:
            return
        ledger.add_group(group, refs)
        self.executions += executions
        self._counts()
        self._wake()

    def enrol(self, cell: CellId) -> bool:
        """Let a training cell claim. False when it must wait (no snapshot of this version yet, or it contributed)."""
        ledger = self._open_ledger()
        if self.closing or any(
            cell in those for those in (self.participants, self.contributions, self.refused)
        ):
            return False
        weights: Manifest | None = None
        if cell != self.core and self.trainer_version.get(cell) != self.version:
            if self.snapshot is None or self.snapshot.version != self.version:
                return False
            if self.unpulled.get(cell) == self.snapshot:
                return False
            weights = self.snapshot
            self.trainer_version.pop(cell, None)
        self.participants.add(cell)
        self.hooks.joined(cell, ledger.batch, ledger.first_claim_taken)
        self.hooks.send(cell, StartBatch(ledger.batch, self.version, weights))
        return True

    def postponed(self, cell: CellId, batch: int) -> None:
        """The cell could not pull the snapshot: it may claim once there is another one."""
        if self.ledger is None or self.ledger.batch != batch or cell not in self.participants:
            log.info("cell-%d: late StartPostponed of batch %d, dropped", cell, batch)
            return
        self.participants.discard(cell)
        if self.snapshot is not None:
            self.unpulled[cell] = self.snapshot

    # ---- claims -------------------------------------------------------------------------------------------------

    def claim(self, cell: CellId, batch: int) -> None:
        """Answer a cell's Claim. A claim for another batch (late message) is answered with None."""
        ledger = self.ledger
        if ledger is None or ledger.batch != batch or cell not in self.participants or cell in self.flushing:
            self.hooks.send(cell, Claimed(batch, None))
            return
        self.trainer_version[cell] = self.version
        ref = ledger.claim(cell)
        self.hooks.send(cell, Claimed(batch, ref))
        if ref is None:
            self.waiting.add(cell)
        else:
            self._counts()

    def done(self, cell: CellId, batch: int, micro_step: str) -> bool:
        """A micro-step's gradient is in the cell's accumulator. False for a late message."""
        ledger = self.ledger
        if ledger is None or ledger.batch != batch or cell not in self.participants:
            return False
        ledger.done(cell, micro_step)
        self._counts()
        return True

    def unavailable(self, cell: CellId, batch: int, micro_step: str) -> MicroStepRef | None:
        """The cell could not pull what it claimed: unclaimed until published again. None for a late message."""
        ledger = self.ledger
        if ledger is None or ledger.batch != batch or cell not in self.participants:
            return None
        ref = ledger.withhold(cell, micro_step)
        self._counts()
        return ref

    def published_again(self, refs: tuple[MicroStepRef, ...]) -> None:
        """Micro-steps of the open batch lie at other places."""
        if self.ledger is not None:
            self.ledger.replace_refs(refs)
            self._wake()

    # ---- closing ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """All micro-steps are done: collect contributions, or report an empty batch."""
        ledger = self._open_ledger()
        self.closing = True
        if not ledger.workers():
            self.release()
            self.hooks.empty()
            return
        self._flush(set(ledger.workers()) - {self.core})
        self._commit_when_complete()

    def flush_leaver(self, cell: CellId) -> bool:
        """The cell leaves training in the middle of the batch. True when its contribution must be awaited."""
        ledger = self.ledger
        if ledger is None or cell == self.core or cell not in self.participants:
            return False
        if cell in self.contributions or not (ledger.done_by(cell) or ledger.holds(cell)):
            self.participants.discard(cell)
            return False
        self._flush({cell})
        return True

    def _flush(self, cells: set[CellId]) -> None:
        ledger = self._open_ledger()
        for cell in sorted(cells - set(self.contributions) - self.flushing):
            self.flushing.add(cell)
            self.waiting.discard(cell)
            self.hooks.send(cell, FlushContribution(ledger.batch))

    def contribution(self, cell: CellId, message: Contribution) -> bool:
        """Take a satellite's one contribution. False for a late one. Raises Contradiction on unknown work."""
        ledger = self.ledger
        if ledger is None or ledger.batch != message.batch or cell not in self.flushing:
            return False
        done = set(ledger.done_by(cell))
        if set(message.micro_steps) != done or bool(done) != (message.manifest is not None):
            raise Contradiction(
                f"cell {cell} contributes {sorted(message.micro_steps)} to batch {ledger.batch},"
                f" the ledger has {sorted(done)}"
            )
        self.flushing.discard(cell)
        if done:
            self.contributions[cell] = message
        else:
            self.participants.discard(cell)
        self._commit_when_complete()
        return True

    def _commit_when_complete(self) -> None:
        ledger = self._open_ledger()
        complete = set(ledger.workers()) <= set(self.contributions) | {self.core}
        if not self.closing or self.committing or not complete or ledger.unclaimed or ledger.open:
            return
        assert self.core is not None
        self.committing = True
        manifests = tuple(
            (cell, message.manifest)
            for cell, message in sorted(self.contributions.items())
            if message.manifest is not None
        )
        self.hooks.send(self.core, CommitBatch(ledger.batch, self.makes, self.executions, manifests))

    def commit_failed(self, cell: CellId, batch: int) -> None:
        """The core could not pull this contribution: its work is unclaimed again, for others.

        Late for any batch but the committing. Raises Contradiction where the cell has made none.
        """
        if self.ledger is None or self.ledger.batch != batch or not self.committing:
            log.info("late CommitFailed of batch %d, dropped", batch)
            return
        if cell not in self.contributions:
            raise Contradiction(
                f"cell {self.core} could not pull a contribution of cell {cell}, which made none"
            )
        self.committing = False
        self.hooks.send(cell, ContributionCommitted(batch))
        self._withdraw(cell)
        if cell in self.survived_by:
            self.refused.discard(cell)

    def release(self) -> None:
        """Committed or void: contributions may be freed, the batch is over."""
        ledger = self.ledger
        if ledger is None:
            return
        for cell in sorted(self.participants | set(self.contributions)):
            if cell != self.core:
                self.hooks.send(cell, ContributionCommitted(ledger.batch))
        self.last_finished = ledger.batch
        self.ledger = None
        self.participants, self.waiting, self.flushing, self.contributions = set(), set(), set(), {}
        self.closing = self.committing = False

    # ---- losses -------------------------------------------------------------------------------------------------

    def cell_lost(self, cell: CellId) -> None:
        """Return everything the cell claimed or did, unless the core has been told to commit it."""
        self.trainer_version.pop(cell, None)
        self.unpulled.pop(cell, None)
        if self.ledger is None:
            return
        if self.committing and cell in self.contributions:
            self.survived_by.add(cell)
            return
        self._withdraw(cell)
        self.refused.discard(cell)

    def _withdraw(self, cell: CellId) -> None:
        """Return what the cell did. The schedule hears of it at once and enrols whoever trains: not this one."""
        ledger = self._open_ledger()
        self.refused.add(cell)
        self.participants.discard(cell)
        self.waiting.discard(cell)
        self.flushing.discard(cell)
        self.contributions.pop(cell, None)
        if ledger.return_claims(cell):
            self.closing = False
            self._counts()
            self._wake()

    def snapshot_ready(self, manifest: Manifest) -> None:
        """The core exposes the weights of `manifest.version`."""
        self.snapshot = manifest

    # ---- helpers ------------------------------------------------------------------------------------------------

    def _counts(self) -> None:
        ledger = self._open_ledger()
        self.hooks.counts(MicroSteps(ledger.unclaimed, ledger.open, ledger.batch, len(ledger.groups)))

    def _wake(self) -> None:
        ledger = self._open_ledger()
        if not ledger.claimable:
            return
        for cell in sorted(self.waiting):
            self.hooks.send(cell, WorkReady(ledger.batch))
        self.waiting = set()

    def _open_ledger(self) -> ClaimsLedger:
        if self.ledger is None:
            raise IllegalTransition("no batch is open")
        return self.ledger
