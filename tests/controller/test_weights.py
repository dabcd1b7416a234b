"""Weights on disk and in service: what must be saved before a run ends, and when a publication counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from gyre_hpc.config import ModelConfig, RunConfig
from gyre_hpc.controller.driver import Driver
from gyre_hpc.controller.journal.entries import CheckpointWritten, Happened
from gyre_hpc.controller.journal.history import History, read_history
from gyre_hpc.controller.journal.journal import Journal, read_journal
from gyre_hpc.controller.steps import Steps
from gyre_hpc.controller.training.claims import Contradiction
from gyre_hpc.controller.training.weights import WeightKeeper, remove_older, unsaved
from gyre_hpc.layout import RunLayout
from gyre_hpc.records import CellId, Version
from gyre_hpc.schedule.machine import initial_state
from gyre_hpc.schedule.protocol import EndBurst, EvaluationDue, MicroSteps, Publish, Published
from gyre_hpc.schedule.settings import Settings
from gyre_hpc.schedule.state import Phase, State
from gyre_hpc.transport.messages import (
    Manifest,
    PublishWeights,
    RegionKind,
    RestoreTrainer,
    TrainerRestored,
)


def state(**changes: Any) -> State:
    return msgspec.structs.replace(initial_state(Settings((4, 4), steps=5)), started=True, **changes)


def test_a_step_without_a_checkpoint_is_saved_before_the_run_ends() -> None:
    assert unsaved(state(version=Version(3)), Version(2)) == 3
    assert unsaved(state(version=Version(3)), Version(3)) is None


def test_an_undone_step_is_never_saved_under_its_version() -> None:
    assert unsaved(state(version=Version(3), undone=(Version(3),)), Version(2)) is None


def test_a_core_that_still_loads_its_checkpoint_has_nothing_to_save() -> None:
    assert unsaved(state(version=Version(3), restoring=True), Version(2)) is None
    assert unsaved(state(version=Version(3), core=None), Version(2)) is None


def evaluations_due(folder: Path, before: State) -> list[int]:
    """Versions whose evaluation the end of a publication of version 1 makes due."""
    journal = Journal(folder, 1)
    driver = Driver(before, journal, lambda: None, lambda decision: None, lambda: None)
    config = RunConfig(model=ModelConfig(path="package:patchkit"))
    config.tasks.evaluate_every = 1
    weights: Any = SimpleNamespace(publications=lambda: 1)
    observer: Any = SimpleNamespace(published=lambda version: None)
    nobody: Any = None
    Steps(config, driver, nobody, nobody, weights, nobody, observer).version_served(Version(1))
    journal.close()
    events = [entry.event for entry in read_journal(folder) if isinstance(entry, Happened)]
    return [event.version for event in events if isinstance(event, EvaluationDue)]


def test_a_publication_that_counts_is_evaluated(tmp_path: Path) -> None:
    assert evaluations_due(tmp_path, state(phase=Phase.PUBLISHING, version=Version(1))) == [1]


def test_a_publication_overtaken_by_the_loss_of_the_core_is_not_evaluated(tmp_path: Path) -> None:
    before = state(phase=Phase.PUBLISHING, version=Version(1), core=None, restoring=True)
    assert evaluations_due(tmp_path, before) == []


def keeper(run: Path, keep: int, *, every: int = 1, publications: Callable[[], int] = int) -> WeightKeeper:
    layout, nobody = RunLayout(run), cast(Any, None)
    layout.checkpoints.mkdir(parents=True)
    journal = Journal(layout.journal, 1)
    start = (Version(0), "model")
    return WeightKeeper(
        layout,
        journal,
        nobody,
        nobody,
        nobody,
        nobody,
        start,
        every=every,
        keep=keep,
        publications=publications,
    )


@pytest.mark.parametrize(("keep", "left"), [(1, ["v000003"]), (2, ["v000002", "v000003"])])
async def test_checkpoints_beyond_those_kept_go_once_the_journal_names_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int, left: list[str]
) -> None:
    weights, on_disk = keeper(tmp_path, keep), []
    folders = [weights.layout.checkpoint(Version(version)) for version in (1, 2, 3)]

    def fsync(descriptor: int) -> None:
        on_disk.append(sorted(path.name for path in weights.layout.checkpoints.iterdir()))

    monkeypatch.setattr("gyre_hpc.controller.journal.journal.os.fsync", fsync)
    for folder in folders:
        folder.mkdir()
    weights.checkpoint = (Version(2), weights.layout.named(folders[1]))
    weights.checkpointed(Version(3), weights.layout.named(folders[2]))
    await weights.tidied()
    assert on_disk == [["v000001", "v000002", "v000003"]]
    assert sorted(path.name for path in weights.layout.checkpoints.iterdir()) == left
    weights.journal.close()


def test_a_checkpoint_that_the_journal_does_not_name_costs_no_other_its_place(tmp_path: Path) -> None:
    """1, 2 and 4 are named; a core was lost before it told of 3, another one writes 5."""
    for version in (1, 2, 3, 4, 5):
        (tmp_path / f"v{version:06d}").mkdir()
    remove_older(tmp_path / "v000004", tmp_path / "v000002", keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v000002", "v000004", "v000005"]


def test_drafts_of_cores_that_were_lost_go_with_the_next_checkpoint(tmp_path: Path) -> None:
    for name in ("v000002", ".v000002.draft-7", ".v000001.replaced-8", ".v000003.draft-9", "v000001"):
        (tmp_path / name).mkdir()
    remove_older(tmp_path / "v000002", tmp_path / "v000001", keep=2)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".v000003.draft-9", "v000001", "v000002"], "a later version is being written"


async def test_a_checkpoint_that_is_on_disk_is_not_written_again(tmp_path: Path) -> None:
    """A restored core publishes what the lost one had saved and not yet published."""
    weights, sent = keeper(tmp_path, keep=1), list[Any]()
    weights.send = lambda cell, message: sent.append(message)
    weights.publish(CellId(0), Version(3), last=False)
    weights.layout.checkpoint(Version(3)).mkdir()
    weights.checkpointed(Version(3), "checkpoints/v000003")
    weights.publish(CellId(1), Version(3), last=True)
    assert sent == [PublishWeights(Version(3), checkpoint=True), PublishWeights(Version(3), checkpoint=False)]
    await weights.tidied()
    weights.journal.close()


def test_a_publication_that_is_lost_with_its_core_shifts_no_checkpoint(tmp_path: Path) -> None:
    history, sent = History(state()), list[Any]()
    weights = keeper(tmp_path, keep=1, every=2, publications=lambda: history.publications)
    weights.send = lambda cell, message: sent.append(message)
    for made, ended in ((1, False), (2, True), (3, True)):
        version = Version(made)
        history.note(Happened(0.0, MicroSteps(0, 0), (Publish(version),)))
        weights.publish(CellId(0), version, last=False)
        if ended:
            history.note(Happened(0.0, Published(version), (EndBurst(version),)))
    history.note(Happened(0.0, MicroSteps(0, 0), (EndBurst(None),)))
    assert [message.checkpoint for message in sent] == [False, False, True]
    assert history.publications == 2
    weights.journal.close()


async def test_a_run_folder_that_was_moved_goes_on_from_its_own_checkpoint(tmp_path: Path) -> None:
    before = keeper(tmp_path / "before", keep=2)
    folder = before.layout.checkpoint(Version(3))
    folder.mkdir()
    before.checkpointed(Version(3), before.layout.named(folder))
    await before.tidied()
    before.journal.close()
    moved = RunLayout((tmp_path / "before").rename(tmp_path / "after"))
    checkpoint = read_history(moved.journal, Settings((4, 4))).checkpoint
    assert checkpoint == (3, "checkpoints/v000003") and (moved.root / checkpoint[1]).is_dir()


def test_a_journal_with_absolute_paths_goes_on_wherever_its_run_folder_is(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 1)
    journal.append(CheckpointWritten(0.0, Version(3), "/somewhere/else/run/checkpoints/v000003"))
    journal.close()
    assert read_history(tmp_path, Settings((4, 4))).checkpoint == (3, "checkpoints/v000003")


def test_a_core_is_told_its_checkpoint_relative_to_the_run_folder(tmp_path: Path) -> None:
    sent: list[Any] = []
    weights = keeper(tmp_path, keep=1)
    weights.send = lambda cell, message: sent.append(message)
    weights.restore(CellId(1))
    assert sent == [RestoreTrainer("model", Version(0))]
    weights.journal.close()


def test_weights_of_a_cell_that_is_not_to_be_the_core_any_more_are_not_offered(tmp_path: Path) -> None:
    weights, nobody = keeper(tmp_path, keep=1), CellId(0)
    weights.send = lambda cell, message: None
    region = Manifest(RegionKind.WEIGHTS, "policy", 0, "", "cell-0", "127.0.0.1:1", ())
    weights.restore(nobody)
    weights.restore(CellId(1))
    assert not weights.trainer_restored(nobody, TrainerRestored(Version(0), region))
    assert weights.available is None and weights.restoring == 1
    weights.journal.close()


def test_a_core_that_restores_another_version_than_it_was_told_contradicts_itself(tmp_path: Path) -> None:
    weights = keeper(tmp_path, keep=1)
    weights.send = lambda cell, message: None
    region = Manifest(RegionKind.WEIGHTS, "policy", 5, "", "cell-0", "127.0.0.1:1", ())
    weights.restore(CellId(0))
    with pytest.raises(Contradiction, match="cell 0 restored version 5"):
        weights.trainer_restored(CellId(0), TrainerRestored(Version(5), region))
    weights.journal.close()


def test_a_publication_that_outlives_its_core_is_nobodys(tmp_path: Path) -> None:
    weights = keeper(tmp_path, keep=1)
    cells: Any = SimpleNamespace(publishing=Version(5))
    weights.cells, weights.publishing = cells, Version(5)
    weights.cell_lost(CellId(1), core=False)
    assert (weights.publishing, cells.publishing) == (5, 5)
    weights.cell_lost(CellId(0), core=True)
    assert [weights.publishing, cells.publishing] == [None, None]
    weights.journal.close()
