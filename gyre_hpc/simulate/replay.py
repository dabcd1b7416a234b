"""Feeds a live run's journal to the schedule, event by event: the same decisions in the same order as were journaled?

That they are is what makes a simulation of the schedule a statement about runs: both are `schedule.machine.decide`, and
nothing but events told it what to do. Unlike the controller, which refuses to resume over a difference, this names it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gyre_hpc.config import load_run_config
from gyre_hpc.controller.journal.entries import AnyEntry, Happened
from gyre_hpc.controller.journal.journal import read_journal
from gyre_hpc.layout import RunLayout
from gyre_hpc.schedule.machine import decide, initial_state
from gyre_hpc.schedule.protocol import AnyDecision, AnyEvent
from gyre_hpc.schedule.settings import Settings
from gyre_hpc.schedule.state import State


@dataclass(frozen=True)
class Difference:
    """The first event after which the schedule decides otherwise; `position` counts events from 0."""

    position: int
    event: AnyEvent
    journaled: tuple[AnyDecision, ...]
    decided: tuple[AnyDecision, ...]

    def __str__(self) -> str:
        return f"event {self.position}, {self.event}: journaled {self.journaled}, decided {self.decided}"


@dataclass(frozen=True)
class Replay:
    """`state` after the last event that was replayed; `difference` is None when all decisions were the same."""

    state: State
    events: int
    decisions: int
    difference: Difference | None


def replay(entries: Iterable[AnyEntry], settings: Settings) -> Replay:
    """Replay a journal up to the first difference. Raises IllegalTransition for events no caller may send."""
    state, events, count = initial_state(settings), 0, 0
    for entry in entries:
        if not isinstance(entry, Happened):
            continue
        state, decisions = decide(state, entry.event)
        if tuple(decisions) != entry.decisions:
            difference = Difference(events, entry.event, entry.decisions, tuple(decisions))
            return Replay(state, events, count, difference)
        events += 1
        count += len(decisions)
    return Replay(state, events, count, None)


def replay_run(run: Path) -> Replay:
    """Replay the journal of a run folder. Raises MissingInput without one, CorruptRecord for a damaged journal."""
    from gyre_hpc.controller.train import schedule_settings

    return replay(read_journal(RunLayout(run).journal), schedule_settings(load_run_config(run)))
