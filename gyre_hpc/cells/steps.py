"""The steps of a role switch inside a cell: timed, bounded, told one by one as they end.

A step that is not complete within its own deadline raises StepOverdue, which leaves the cell BLOCKED or QUARANTINED like
any other failure of it. Waiting ends then, not the work: the incarnation is ended by the controller.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from gyre_hpc.errors import GyreError
from gyre_hpc.records import CellId
from gyre_hpc.transport.messages import DONE, Serial, StepDone, StepName

RELEASE_S = 150.0
"""Seconds in which the engine must have given its memory back."""
TRAINER_S = 600.0
"""Seconds in which the trainer must have taken its memory, loaded a snapshot, or given its memory back."""


class StepOverdue(GyreError):
    """A step was not complete within its deadline (names both)."""


@dataclass(frozen=True)
class Step:
    """A step that has ended: Unix seconds, bytes moved, DONE or why not."""

    name: StepName
    start: float
    end: float
    bytes: int
    outcome: str


class Phases(dict[StepName, float]):
    """Seconds by name of a switch's step; `told` is called with each step as it ends."""

    def __init__(self, told: Callable[[Step], None] = lambda step: None) -> None:
        super().__init__()
        self._told = told
        self._bytes: dict[StepName, int] = {}

    def moved(self, name: StepName, count: int) -> None:
        """The step under way has moved so many bytes."""
        self._bytes[name] = self._bytes.get(name, 0) + count

    def ended(self, name: StepName, start: float, seconds: float, outcome: str) -> None:
        self[name] = self.get(name, 0.0) + seconds
        self._told(Step(name, start, start + seconds, self._bytes.pop(name, 0), outcome))


@contextlib.contextmanager
def timed(phases: Phases, name: StepName) -> Iterator[None]:
    """The block is step `name`."""
    start, began, outcome = time.time(), time.monotonic(), DONE
    try:
        yield
    except BaseException as error:
        outcome = f"{type(error).__name__}: {error}"
        raise
    finally:
        phases.ended(name, start, time.monotonic() - began, outcome)


@contextlib.asynccontextmanager
async def within(phases: Phases, name: StepName, deadline_s: float) -> AsyncIterator[None]:
    """The block is step `name` and has so long. Raises StepOverdue."""
    with timed(phases, name):
        try:
            async with asyncio.timeout(deadline_s) as limit:
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise StepOverdue(
                f"step {name} is not complete after {deadline_s:g} s", fix="see the cell's log"
            ) from error


def step_done(cell: CellId, serial: Serial, step: Step) -> StepDone:
    """What the controller is told of a step of the switch `serial`."""
    return StepDone(
        cell, serial, step.name, start=step.start, end=step.end, bytes=step.bytes, outcome=step.outcome
    )
