"""Stalls of an engine: warned of once each, counted, and the cut stays where it is."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from gyre_hpc.gateway.rendering import Rendering
from gyre_hpc.gateway.watch import SilenceWatch

from .fakes import RunningGateway


class Clock:
    """A loop's clock and its one timer, moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due: float | None = None

    def time(self) -> float:
        return self.now

    def call_at(self, due: float, look: object) -> Clock:
        self.due, self.look = due, look
        return self

    def cancel(self) -> None:
        self.due = None

    def go(self, seconds: float) -> None:
        end = self.now + seconds
        while self.due is not None and self.due <= end:
            self.now, self.due = self.due, None
            self.look()  # type: ignore[operator]
        self.now = end


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: clock)
    return clock


def test_each_stall_is_told_once_and_the_last_one_ends_the_stream(clock: Clock) -> None:
    told: list[float] = []
    ended: list[float] = []
    watch = SilenceWatch(100, 180, told.append, lambda: ended.append(clock.now))
    clock.go(60)
    watch.heard()
    clock.go(99)
    assert told == []
    clock.go(50)
    assert told == [100] and ended == []
    watch.heard()
    clock.go(179)
    assert told == [100, 100] and ended == []
    clock.go(1)
    assert ended == [389]
    clock.go(1000)
    assert (len(told), len(ended)) == (2, 1)


def test_a_stopped_watch_says_nothing(clock: Clock) -> None:
    told: list[float] = []
    watch = SilenceWatch(100, 180, told.append, lambda: told.append(-1))
    watch.stop()
    clock.go(1000)
    assert told == []


def test_an_alarm_later_than_the_cut_is_never_given(clock: Clock) -> None:
    told: list[float] = []
    SilenceWatch(500, 180, told.append, lambda: told.append(-1))
    clock.go(1000)
    assert told == [-1]


async def test_a_stalled_call_is_named_and_counted_and_goes_on(
    rendering: Rendering, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await RunningGateway.start(rendering, tmp_path, stall_alarm_s=0.05)
    gateway.script.answers = ["an answer<|im_end|>"]
    engine = gateway.engine(3, pause_after=2)
    asking = asyncio.create_task(gateway.chat([{"role": "user", "content": "go"}]))
    await engine.waiting.wait()
    (call,) = gateway.app.executions[7, 1].calls.values()
    while not call.stalls:
        await asyncio.sleep(0.005)
    engine.go.set()
    assert (await asking)["status"] == 200
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and warnings[0].startswith("cell 3: no token of call e7a1c0 for ")
    account, _ = await gateway.app.close_execution(7, 1)
    assert (account.stalls, account.calls_rerouted) == (1, 0) and gateway.faults == []
    await gateway.stop()
