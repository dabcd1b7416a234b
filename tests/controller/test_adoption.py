"""Survivors of a dead controller: each execution ends once, nothing runs twice, and what both hold goes on as it was."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_hpc.controller.controller import Controller
from gyre_hpc.controller.journal.entries import AttemptOpened, Happened, Outcome
from gyre_hpc.controller.journal.history import read_history
from gyre_hpc.controller.journal.journal import read_journal
from gyre_hpc.controller.peers.adoption import Holdings
from gyre_hpc.controller.train import schedule_settings
from gyre_hpc.records import ExecutionId
from gyre_hpc.schedule.protocol import Terminated
from gyre_hpc.transport import messages as msg
from tests.controller.outlasting import OutlastingPeers, Services
from tests.controller.world import Interrupt, make_controller, small_run

ATTEMPT = (ExecutionId(7), 2)
DEATHS = st.lists(
    st.tuples(st.integers(1, 120), st.booleans(), st.booleans(), st.integers(0, 30)), max_size=4
)
"""(messages sent before the controller dies, whether gateway and runner survive, steps they take without one)."""


async def live(folder: Path, services: Services, epoch: int, oversample: int, messages: int = 0) -> bool:
    """One controller, dead before the `messages`-th message leaves it; whether it came to the end of the run."""
    left = messages

    def watch(controller: Controller, message: msg.Message) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise Interrupt

    config = small_run(2)
    config.schedule.oversample = oversample
    controller = make_controller(folder, config, epoch, watch, lambda heard: OutlastingPeers(heard, services))
    try:
        assert await controller.run() is None
        return True
    except Interrupt:
        return False
    finally:
        services.tell = None


async def run_through(
    folder: Path, dice: random.Random, deaths: list[tuple[int, bool, bool, int]], oversample: int = 0
) -> Services:
    services = Services(dice)
    for epoch, (messages, gateway, runner, alone) in enumerate(deaths, start=1):
        if await live(folder, services, epoch, oversample, messages):
            return services
        services.gateway = services.gateway if gateway else None
        services.runner = services.runner if runner else None
        for _ in range(alone):
            services.advance()
    assert await live(folder, services, len(deaths) + 1, oversample)
    return services


def check_laws(folder: Path, oversample: int) -> None:
    """Read back: one end and one outcome for each execution, of an attempt that was opened; the ledger replays."""
    entries = list(read_journal(folder / "journal"))
    ended = Counter(
        item.event.id for item in entries if isinstance(item, Happened) and isinstance(item.event, Terminated)
    )
    outcomes = [item.outcome for item in entries if isinstance(item, Outcome)]
    assert set(ended.values()) == {1} and sorted(item.execution for item in outcomes) == sorted(ended)
    opened = [(item.execution, item.attempt) for item in entries if isinstance(item, AttemptOpened)]
    assert len(opened) == len(set(opened))
    for outcome in outcomes:
        assert outcome.attempt == 0 or (outcome.execution, outcome.attempt) in opened
        if outcome.assessment is not None:
            assert outcome.assessment.reason == f"attempt {outcome.attempt}"
    config = small_run(2)
    config.schedule.oversample = oversample
    state = read_history(folder / "journal", schedule_settings(config)).state
    assert state.terminated == state.launched == state.dispatched == len(ended)


@settings(max_examples=30, deadline=None)
@given(deaths=DEATHS, seed=st.integers(0, 1 << 30), oversample=st.sampled_from([0, 1]))
def test_however_often_controllers_and_services_die_each_execution_ends_once(
    tmp_path_factory: pytest.TempPathFactory,
    deaths: list[tuple[int, bool, bool, int]],
    seed: int,
    oversample: int,
) -> None:
    folder = tmp_path_factory.mktemp("run")
    asyncio.run(run_through(folder, random.Random(seed), deaths, oversample))
    check_laws(folder, oversample)


@settings(max_examples=30, deadline=None)
@given(
    deaths=st.lists(st.tuples(st.integers(1, 120), st.integers(0, 30)), max_size=4), seed=st.integers(0, 99)
)
def test_while_both_services_live_no_execution_is_started_a_second_time(
    tmp_path_factory: pytest.TempPathFactory, deaths: list[tuple[int, int]], seed: int
) -> None:
    folder = tmp_path_factory.mktemp("run")
    lives = [(messages, True, True, alone) for messages, alone in deaths]
    services = asyncio.run(run_through(folder, random.Random(seed), lives))
    check_laws(folder, 0)
    assert len(services.started) >= 16
    both = Counter(id for id, _ in set(services.started))
    cut = [id for id, count in both.items() if count > 1]
    assert not cut, f"{cut} were running at both"


@pytest.mark.parametrize(
    ("gateway", "runner", "closed", "sealed", "kept"),
    [
        (True, True, False, False, True),
        (True, False, False, False, False),
        (False, True, False, False, False),
        (True, False, True, False, True),
        (False, True, True, False, False),
        (False, False, True, True, True),
    ],
)
def test_an_attempt_goes_on_where_all_that_is_needed_of_it_is_there(
    gateway: bool, runner: bool, closed: bool, sealed: bool, kept: bool
) -> None:
    holdings = Holdings(
        gateway=frozenset([ATTEMPT]) if gateway else None, runner=frozenset([ATTEMPT] if runner else [])
    )
    assert holdings.keeps(ATTEMPT, closed=closed, sealed=sealed) is kept
