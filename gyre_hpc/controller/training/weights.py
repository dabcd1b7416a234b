"""The core's weights from the controller's side: restore, snapshot, publication, checkpoints.

`snapshot` is the newest region satellites may pull; `checkpoint` the newest complete folder on disk, the place a lost
core or a resumed run starts from, named relative to the run folder. A publication is complete when every live rollout
engine has confirmed the version; the schedule is told exactly once.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gyre_hpc.controller.cells.cell_table import CellTable
from gyre_hpc.controller.journal.entries import CheckpointWritten
from gyre_hpc.controller.journal.journal import Journal
from gyre_hpc.controller.training.batches import BatchRunner
from gyre_hpc.controller.training.claims import Contradiction
from gyre_hpc.layout import RunLayout
from gyre_hpc.records import CellId, Version
from gyre_hpc.schedule.state import State
from gyre_hpc.transport.messages import (
    Manifest,
    Message,
    PublishWeights,
    RestoreTrainer,
    TrainerRestored,
    WeightsPublished,
)

log = logging.getLogger(__name__)


def unsaved(state: State, checkpoint: Version) -> Version | None:
    """The version that the core holds and `checkpoint`, the newest on disk, does not; None when there is no such."""
    if state.core is None or state.restoring or state.core_version == checkpoint:
        return None
    return state.core_version


@dataclass
class WeightKeeper:
    """What the core holds and what is on disk."""

    layout: RunLayout
    journal: Journal
    cells: CellTable
    batches: BatchRunner
    send: Callable[[CellId, Message], None]
    published: Callable[[Version], None]
    checkpoint: tuple[Version, str]
    every: int
    keep: int
    publications: Callable[[], int]
    """How many have ended; a publication that is lost with its core is none."""
    restored: tuple[CellId, TrainerRestored] | None = None
    restoring: CellId | None = None
    publishing: Version | None = None
    took: Callable[[float], None] = lambda seconds: None
    """Called with the seconds from asking for a checkpoint to its end."""
    _asked_at: dict[Version, float] = field(default_factory=dict)
    _tidying: set[asyncio.Task[None]] = field(default_factory=set)

    # ---- restore ------------------------------------------------------------------------------------------------

    def restore(self, cell: CellId) -> None:
        """Have the cell's trainer load the newest checkpoint."""
        self.restoring = cell
        version, folder = self.checkpoint
        self.send(cell, RestoreTrainer(folder, version))

    def trainer_restored(self, cell: CellId, message: TrainerRestored) -> bool:
        """False for a late one: another cell was told to restore since. Raises Contradiction on another version."""
        if self.restoring != cell:
            log.info("cell-%d: late TrainerRestored of version %d, dropped", cell, message.version)
            return False
        if message.version != self.checkpoint[0]:
            raise Contradiction(
                f"cell {cell} restored version {message.version}, asked was {self.checkpoint[0]}"
            )
        self.restored, self.restoring = (cell, message), None
        self.batches.snapshot_ready(message.weights)
        self.batches.trainer_version[cell] = message.version
        return True

    @property
    def available(self) -> Manifest | None:
        """Weights an engine may load before the first publication of this controller."""
        return self.restored[1].weights if self.restored is not None else None

    def cell_lost(self, cell: CellId, core: bool) -> None:
        """What the cell held in memory is gone."""
        if self.restored is not None and self.restored[0] == cell:
            self.restored = None
        if self.restoring == cell:
            self.restoring = None
        if core:
            self.publishing = self.cells.publishing = None

    # ---- publication --------------------------------------------------------------------------------------------

    def publish(self, core: CellId, version: Version, *, last: bool) -> None:
        """Write the core's weights as `version`, with a checkpoint every `every` publications and at the end.

        One that is on disk is not written again, as when a restored core publishes what the lost one had saved: it
        would be missing while it is replaced.
        """
        self.publishing = version
        due = last or (self.publications() + 1) % self.every == 0
        self._ask(core, version, checkpoint=due and version != self.checkpoint[0])

    def save(self, core: CellId, version: Version) -> None:
        """Write a checkpoint of a version that is not published by it."""
        self._ask(core, version, checkpoint=True)

    def _ask(self, core: CellId, version: Version, *, checkpoint: bool) -> None:
        if checkpoint:
            self._asked_at[version] = time.monotonic()
        self.send(core, PublishWeights(version, checkpoint))

    def expose(self, core: CellId, version: Version) -> None:
        """A later step of the burst: satellites need the new snapshot, engines do not."""
        if self.publishing is None:
            self.send(core, PublishWeights(version, checkpoint=False))

    def weights_published(self, message: WeightsPublished) -> None:
        self.batches.snapshot_ready(message.weights)
        if message.checkpoint:
            asked_at = self._asked_at.pop(message.version, None)
            if asked_at is not None:
                self.took(time.monotonic() - asked_at)
            self.checkpointed(message.version, message.checkpoint)
        if self.publishing == message.version:
            self.publishing = None
            self.cells.publish(message.weights)
            self.finish_publication()

    def finish_publication(self) -> None:
        """To be called whenever a cell may have been the last one loading."""
        if self.cells.publication_complete() and self.cells.weights is not None:
            self.published(Version(self.cells.weights.version))

    def checkpointed(self, version: Version, folder: str) -> None:
        """A checkpoint is on disk: journal it, then, beside the loop, remove the oldest beyond `keep`."""
        before = self.layout.checkpoint(self.checkpoint[0])
        self.checkpoint = (version, folder)
        self.journal.append(CheckpointWritten(time.time(), version, folder))
        task = asyncio.create_task(self._tidy(self.layout.root / folder, before))
        self._tidying.add(task)
        task.add_done_callback(self._tidying.discard)

    async def _tidy(self, newest: Path, before: Path) -> None:
        """Nothing goes before the journal names `newest` even if this host is lost."""
        await self.journal.sync()
        await asyncio.to_thread(remove_older, newest, before, self.keep)

    async def tidied(self) -> None:
        """Wait for removals under way. What a full disk stopped is left for the next checkpoint."""
        await asyncio.gather(*self._tidying, return_exceptions=True)


def remove_older(newest: Path, before: Path, keep: int) -> None:
    """Remove the checkpoints before `newest`, but for the last of them that make `keep` with it.

    `before` is the one that the journal named last before it. What lies between is of cores that were lost before they told
    of it: it goes, as their drafts do. What is being written is of a later version.
    """
    older = sorted(path for path in newest.parent.glob("v*") if path.name < newest.name)
    named = [path for path in older if path.name <= before.name]
    drafts = [path for path in newest.parent.glob(".v*.*") if path.name.split(".")[1] <= newest.name]
    for path in [*drafts, *older[len(named) :], *named[: max(0, len(named) + 1 - keep)]]:
        shutil.rmtree(path, ignore_errors=True)
