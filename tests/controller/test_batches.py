"""A training batch: joining, contributing, losing cells, committing once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gyre_hpc.controller.training.batches import BatchHooks, BatchRunner
from gyre_hpc.controller.training.claims import Contradiction
from gyre_hpc.records import CellId, GroupId, Version
from gyre_hpc.transport import messages as msg
from tests.controller.test_claims import ref

CORE, SAT, LATE = CellId(0), CellId(1), CellId(2)


class World:
    """A batch runner whose messages are kept."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, msg.Message]] = []
        self.counts: list[tuple[int, int]] = []
        self.empty = 0
        self.joins: list[tuple[int, bool]] = []
        self.runner = BatchRunner(
            BatchHooks(
                send=lambda cell, message: self.sent.append((cell, message)),
                counts=lambda event: self.counts.append((event.unclaimed, event.open)),
                empty=self._empty,
                joined=lambda cell, batch, mid: self.joins.append((cell, mid)),
            )
        )
        self.runner.snapshot_ready(manifest("weights", 3))
        self.runner.open(0, CORE, Version(3), Version(4))

    def _empty(self) -> None:
        self.empty += 1

    def enrol_when_counted(self, *cells: CellId) -> None:
        """As the controller does: the schedule hears the counts at once, and whoever trains may claim."""
        self.runner.hooks = replace(
            self.runner.hooks, counts=lambda event: [self.runner.enrol(cell) for cell in cells] and None
        )

    def of(self, kind: type[msg.Message]) -> list[tuple[int, msg.Message]]:
        return [(cell, message) for cell, message in self.sent if isinstance(message, kind)]

    def work(self, cell: CellId) -> str:
        self.runner.claim(cell, 0)
        claimed = self.of(msg.Claimed)[-1][1]
        assert isinstance(claimed, msg.Claimed) and claimed.micro_step is not None
        self.runner.done(cell, 0, claimed.micro_step.id)
        return claimed.micro_step.id


def manifest(name: str, version: int) -> msg.Manifest:
    return msg.Manifest(msg.RegionKind.GRADIENT, name, version, "", "cell-1", "127.0.0.1:1", ())


def group(number: int, count: int) -> tuple[GroupId, tuple[msg.MicroStepRef, ...], int]:
    return GroupId(number), tuple(ref(number, index) for index in range(count)), 8


def test_a_satellite_pulls_the_snapshot_before_it_claims() -> None:
    world = World()
    assert world.runner.enrol(CORE) and world.runner.enrol(SAT)
    starts = dict(world.of(msg.StartBatch))
    assert starts[CORE].weights is None  # type: ignore[attr-defined]
    assert starts[SAT].weights.version == 3  # type: ignore[attr-defined]


def test_without_a_snapshot_of_this_version_a_satellite_waits() -> None:
    world = World()
    world.runner.release()
    world.runner.open(1, CORE, Version(4), Version(5))
    assert not world.runner.enrol(SAT)
    world.runner.snapshot_ready(manifest("weights", 4))
    assert world.runner.enrol(SAT)


def test_after_an_undone_step_satellites_load_what_the_core_restored() -> None:
    world = World()
    world.runner.enrol(SAT)
    world.runner.trainer_version[SAT] = Version(4)
    world.runner.release()
    world.runner.open(1, CORE, Version(3), Version(5))
    assert world.runner.enrol(SAT)
    start = world.of(msg.StartBatch)[-1][1]
    assert start.weights.version == 3  # type: ignore[attr-defined]
    world.runner.add_group(*group(1, 1))
    world.runner.enrol(CORE)
    world.runner.claim(CORE, 1)
    world.runner.done(CORE, 1, "1.0")
    world.runner.close()
    [(_, commit)] = world.of(msg.CommitBatch)
    assert commit.version == 5  # type: ignore[attr-defined]


def test_a_leaver_that_could_not_pull_its_only_micro_step_contributes_nothing() -> None:
    world = World()
    world.runner.add_group(*group(1, 1))
    world.runner.enrol(SAT)
    world.runner.claim(SAT, 0)
    assert world.runner.flush_leaver(SAT)
    world.runner.unavailable(SAT, 0, "1.0")
    assert world.runner.contribution(SAT, msg.Contribution(0, (), None))
    assert SAT not in world.runner.contributions and SAT not in world.runner.participants


def test_a_join_after_the_first_claim_is_mid_batch() -> None:
    world = World()
    world.runner.add_group(*group(1, 3))
    world.runner.enrol(CORE)
    world.work(CORE)
    world.runner.enrol(LATE)
    assert world.joins == [(CORE, False), (LATE, True)]


def test_the_core_commits_contributions_in_cell_order() -> None:
    world = World()
    world.runner.add_group(*group(1, 3))
    for cell in (CORE, SAT, LATE):
        world.runner.enrol(cell)
    names = {cell: world.work(cell) for cell in (LATE, SAT, CORE)}
    world.runner.close()
    assert [cell for cell, _ in world.of(msg.FlushContribution)] == [SAT, LATE]
    for cell in (LATE, SAT):
        world.runner.contribution(cell, msg.Contribution(0, (names[cell],), manifest(f"g{cell}", 3)))
    [(target, commit)] = world.of(msg.CommitBatch)
    assert target == CORE and isinstance(commit, msg.CommitBatch)
    assert [cell for cell, _ in commit.contributions] == [SAT, LATE]
    assert (commit.version, commit.executions) == (4, 8)


def test_a_satellite_lost_after_its_contribution_returns_its_work_to_the_core() -> None:
    world = World()
    world.runner.add_group(*group(1, 2))
    world.runner.enrol(CORE)
    world.runner.enrol(SAT)
    world.runner.enrol(LATE)
    world.work(SAT)
    name = world.work(LATE)
    world.runner.claim(CORE, 0)
    world.runner.close()
    world.runner.contribution(LATE, msg.Contribution(0, (name,), manifest("g2", 3)))
    world.runner.cell_lost(LATE)
    assert world.counts[-1] == (1, 0)
    assert (CORE, msg.WorkReady(0)) in world.sent
    assert not world.of(msg.CommitBatch)


def test_a_contribution_that_names_other_work_is_refused() -> None:
    world = World()
    world.runner.add_group(*group(1, 1))
    world.runner.enrol(SAT)
    world.work(SAT)
    world.runner.close()
    with pytest.raises(Contradiction, match=r"9\.9"):
        world.runner.contribution(SAT, msg.Contribution(0, ("9.9",), manifest("g", 3)))


def test_a_batch_without_micro_steps_closes_without_a_step() -> None:
    world = World()
    world.runner.add_group(GroupId(1), (), 8)
    world.runner.enrol(CORE)
    world.runner.close()
    assert world.empty == 1 and not world.of(msg.CommitBatch)
    assert world.runner.finished(0)


def test_a_contribution_the_core_could_not_pull_is_worked_again() -> None:
    world = World()
    world.runner.add_group(*group(1, 1))
    world.runner.enrol(CORE)
    world.runner.enrol(SAT)
    name = world.work(SAT)
    world.runner.close()
    world.runner.contribution(SAT, msg.Contribution(0, (name,), manifest("g1", 3)))
    world.runner.commit_failed(SAT, 0)
    assert world.counts[-1] == (1, 0)
    assert (SAT, msg.ContributionCommitted(0)) in world.sent, "its gradient is of no use: it is freed"
    assert not world.runner.enrol(SAT), "what it contributes next would lie at the same place"
    assert world.work(CORE) == name
    world.runner.close()
    commits = world.of(msg.CommitBatch)
    assert len(commits) == 2 and commits[-1][1].contributions == ()  # type: ignore[attr-defined]
    world.runner.release()
    world.runner.open(1, CORE, Version(3), Version(4))
    assert world.runner.enrol(SAT)


def test_a_cell_whose_contribution_failed_is_not_enrolled_by_the_return_of_its_work() -> None:
    world = World()
    world.runner.add_group(*group(1, 1))
    world.runner.enrol(CORE)
    world.runner.enrol(SAT)
    name = world.work(SAT)
    world.runner.close()
    world.runner.contribution(SAT, msg.Contribution(0, (name,), manifest("g1", 3)))
    world.enrol_when_counted(CORE, SAT, LATE)
    world.runner.commit_failed(SAT, 0)
    assert world.runner.participants == {CORE, LATE}


def test_what_a_lost_cell_had_contributed_in_vain_does_not_keep_out_its_next_incarnation() -> None:
    world = World()
    world.runner.add_group(*group(1, 1))
    world.runner.enrol(CORE)
    world.runner.enrol(SAT)
    name = world.work(SAT)
    world.runner.close()
    world.runner.contribution(SAT, msg.Contribution(0, (name,), manifest("g1", 3)))
    world.runner.cell_lost(SAT)
    world.runner.commit_failed(SAT, 0)
    assert world.runner.enrol(SAT)


def test_a_lost_cell_is_not_enrolled_by_the_return_of_its_work_but_may_come_again() -> None:
    world = World()
    world.runner.add_group(*group(1, 1))
    world.runner.enrol(CORE)
    world.runner.enrol(SAT)
    world.work(SAT)
    world.enrol_when_counted(CORE, SAT)
    world.runner.cell_lost(SAT)
    assert world.runner.participants == {CORE} and len(world.of(msg.StartBatch)) == 2
    assert world.runner.enrol(SAT), "its next incarnation"


def test_a_contribution_that_nobody_made_cannot_fail() -> None:
    world = World()
    world.runner.add_group(*group(1, 1))
    world.runner.enrol(CORE)
    world.runner.enrol(SAT)
    world.work(CORE)
    world.runner.close()
    with pytest.raises(Contradiction, match="cell 0 could not pull a contribution of cell 1"):
        world.runner.commit_failed(SAT, 0)


def test_a_snapshot_counts_as_loaded_only_once_the_satellite_claims_with_it() -> None:
    """The core dies while it is pulled and is restored at the same version: the satellite still holds older weights."""
    world = World()
    world.runner.trainer_version[SAT] = Version(2)
    world.runner.enrol(SAT)
    world.runner.release()
    world.runner.snapshot_ready(manifest("weights of the restored core", 3))
    world.runner.open(1, LATE, Version(3), Version(4))
    world.runner.postponed(SAT, 0)
    assert world.runner.enrol(SAT)
    start = world.of(msg.StartBatch)[-1][1]
    assert start.weights.name == "weights of the restored core"  # type: ignore[attr-defined]
    world.runner.claim(SAT, 1)
    world.runner.release()
    world.runner.open(2, LATE, Version(3), Version(4))
    world.runner.enrol(SAT)
    assert world.of(msg.StartBatch)[-1][1].weights is None  # type: ignore[attr-defined]


@pytest.mark.parametrize(("batch", "committing"), [(7, True), (0, False)])
def test_a_late_failure_of_a_commit_costs_nobody_his_work(batch: int, committing: bool) -> None:
    world = World()
    world.runner.add_group(*group(1, 2))
    world.runner.enrol(CORE)
    world.runner.enrol(SAT)
    names = {cell: world.work(cell) for cell in (CORE, SAT)}
    world.runner.close()
    if committing:
        world.runner.contribution(SAT, msg.Contribution(0, (names[SAT],), manifest("g1", 3)))
    world.runner.commit_failed(SAT, batch)
    assert world.counts[-1] == (0, 0) and world.runner.committing is committing


def test_a_satellite_that_could_not_pull_the_snapshot_claims_once_there_is_another() -> None:
    world = World()
    world.runner.enrol(SAT)
    world.runner.postponed(SAT, 0)
    assert not world.runner.enrol(SAT), "the same snapshot would only fail again"
    world.runner.snapshot_ready(manifest("weights of the restored core", 3))
    assert world.runner.enrol(SAT)
    start = world.of(msg.StartBatch)[-1][1]
    assert start.weights.name == "weights of the restored core"  # type: ignore[attr-defined]


def test_a_late_word_of_an_earlier_batch_costs_nobody_its_place() -> None:
    world = World()
    world.runner.enrol(SAT)
    world.runner.postponed(SAT, -1)
    assert SAT in world.runner.participants
