"""A whole controller, among peers that only answer: what it holds is bounded by what is live, however long the run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from gyre_hpc.controller.controller import Controller
from gyre_hpc.controller.journal.entries import Happened, Outcome, StepTaken
from gyre_hpc.controller.journal.journal import read_journal
from gyre_hpc.records import Version
from gyre_hpc.schedule.protocol import EvaluationDue
from gyre_hpc.transport import messages as msg
from tests.controller.world import Interrupt, make_controller, nothing, small_run

GROUPS, MEMBERS, HELDOUT = 2, 4, 3


class Watch:
    """The most that a controller held at any message, by table; and what the runner was told to forget."""

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()
        self.forgotten: Counter[int] = Counter()

    def __call__(self, controller: Controller, message: msg.Message) -> None:
        if isinstance(message, msg.ForgetExecution):
            self.forgotten[message.execution] += 1
        sizes = {
            "executions": len(controller.executions.executions),
            "processed": len(controller.processing.processed),
            "evaluations": len(controller.history.evaluations.points),
            "history": len(controller.history.attempts) + len(controller.history.outcomes),
        }
        self.held |= Counter(sizes)


async def finish(folder: Path, steps: int, epoch: int = 1) -> Watch:
    watch = Watch()
    controller = make_controller(folder, small_run(steps, heldout=HELDOUT), epoch, watch)
    assert await controller.run() is None
    assert not controller.executions.executions and not controller.history.evaluations.points
    return watch


def outcomes(folder: Path) -> list[int]:
    return [
        entry.outcome.execution for entry in read_journal(folder / "journal") if isinstance(entry, Outcome)
    ]


def versions(folder: Path) -> list[int]:
    return [entry.version for entry in read_journal(folder / "journal") if isinstance(entry, StepTaken)]


async def test_what_a_controller_holds_does_not_grow_with_the_executions_ever_run(tmp_path: Path) -> None:
    short, long = await finish(tmp_path / "short", 4), await finish(tmp_path / "long", 32)
    assert long.held == short.held
    assert long.held["executions"] <= 2 * GROUPS * MEMBERS + HELDOUT
    ids = outcomes(tmp_path / "long")
    assert sorted(ids) == list(range(len(ids))) and len(ids) >= 32 * GROUPS * MEMBERS
    assert long.forgotten == Counter(ids), "each outcome lets the runner forget its execution, once"


async def interrupted(folder: Path, steps: int, epoch: int, after: int) -> None:
    """A controller that dies before its `after`-th message leaves it."""
    left = after

    def watch(controller: Controller, message: msg.Message) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise Interrupt

    controller = make_controller(folder, small_run(steps, heldout=HELDOUT), epoch, watch)
    with pytest.raises(Interrupt):
        await controller.run()


@pytest.mark.parametrize("after", [1, 40, 150, 300, 500, 700])
async def test_a_resumed_controller_holds_what_is_live_and_takes_up_nothing_twice(
    tmp_path: Path, after: int
) -> None:
    await interrupted(tmp_path, steps=8, epoch=1, after=after)
    watch = await finish(tmp_path, steps=8, epoch=2)
    assert watch.held["executions"] <= 2 * GROUPS * MEMBERS + 2 * HELDOUT
    ids = outcomes(tmp_path)
    assert sorted(ids) == list(range(len(ids)))
    assert versions(tmp_path) == list(range(1, len(versions(tmp_path)) + 1))


async def test_a_death_between_the_last_publication_and_its_evaluation_loses_no_evaluation(
    tmp_path: Path,
) -> None:
    controller = make_controller(tmp_path, small_run(4, heldout=HELDOUT), 1, nothing)
    evaluate = controller.steps.evaluate

    def dies(version: Version) -> None:
        if version == 4:
            raise Interrupt
        evaluate(version)

    controller.steps.evaluate = dies  # type: ignore[method-assign]
    with pytest.raises(Interrupt):
        await controller.run()
    await finish(tmp_path, 4, epoch=2)
    due = [
        entry.event.version
        for entry in read_journal(tmp_path / "journal")
        if isinstance(entry, Happened) and isinstance(entry.event, EvaluationDue)
    ]
    assert due.count(Version(4)) == 1
