"""How an execution ends, and which reason it is closed with."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from gyre_hpc.executions.forkserver import LaunchSpec
from gyre_hpc.executions.launcher import Launcher
from gyre_hpc.executions.sandbox import Sandbox
from gyre_hpc.executions.supervisor import Closing, Limits, Supervision
from gyre_hpc.records import SCORED_REASONS, ClosingReason
from tests.executions.alive import Alive

AMPLE = Limits(harness_s=120, overall_s=240)
FOREVER = "setsid sleep 1000 & echo up; wait"


class Bench:
    """Supervises shell scripts."""

    def __init__(self, launcher: Launcher, sandbox: Sandbox, workspace: Path) -> None:
        self.launcher, self.sandbox, self.workspace = launcher, sandbox, workspace
        self.log = workspace.parent / "harness.log"
        self.started = 0

    def _start(self) -> None:
        self.started += 1

    def spec(self, text: str) -> Callable[[], LaunchSpec]:
        return lambda: self.sandbox.command(["/bin/sh", "-c", text], workspace=self.workspace)

    async def run(
        self, supervision: Supervision, prepare: str | Callable[[], LaunchSpec], log: Path | None = None
    ) -> Closing:
        ready = self.spec(prepare) if isinstance(prepare, str) else prepare
        return await supervision.run(self.launcher, ready, log or self.log, self._start)


@pytest.fixture
def bench(launcher: Launcher, sandbox: Sandbox, workspace: Path) -> Bench:
    return Bench(launcher, sandbox, workspace)


async def test_exit_zero_is_completed(bench: Bench) -> None:
    closing = await bench.run(Supervision(AMPLE), "echo done")
    assert (closing.reason, closing.exit_code, bench.started) == (ClosingReason.COMPLETED, 0, 1)
    assert bench.log.read_text() == "done\n"


async def test_another_exit_is_failed_scored_and_quotes_the_last_line(bench: Bench) -> None:
    closing = await bench.run(Supervision(AMPLE), "echo first; echo the cause >&2; exit 3")
    assert (closing.reason, closing.exit_code) == (ClosingReason.FAILED, 3)
    assert closing.detail == "exit code 3: the cause"
    assert closing.reason in SCORED_REASONS


async def test_the_harness_limit_is_scored_and_leaves_no_process(bench: Bench, alive: Alive) -> None:
    closing = await bench.run(Supervision(Limits(0.3, 240)), FOREVER, alive.path)
    assert (closing.reason, closing.exit_code) == (ClosingReason.HARNESS_TIMEOUT, None)
    assert closing.reason in SCORED_REASONS
    assert closing.wall_s >= 0.3
    assert alive.none_left()


async def test_the_overall_limit_is_excluded_and_leaves_no_process(bench: Bench, alive: Alive) -> None:
    await bench.run(
        Supervision(AMPLE), "true"
    )  # the first start takes long; what is not started in time is infrastructure
    closing = await bench.run(Supervision(Limits(120, 4.0)), FOREVER, alive.path)
    assert closing.reason is ClosingReason.OVERALL_TIMEOUT
    assert closing.reason not in SCORED_REASONS
    assert alive.none_left()


@pytest.mark.parametrize("reason", [ClosingReason.CANCELLED_SURPLUS, ClosingReason.WALLTIME])
async def test_a_cancelled_execution_closes_with_the_reason_given_first(
    bench: Bench, alive: Alive, reason: ClosingReason
) -> None:
    supervision = Supervision(AMPLE)
    running = asyncio.create_task(bench.run(supervision, FOREVER, alive.path))
    await asyncio.to_thread(alive.wait_for, b"up")
    supervision.cancel(reason)
    supervision.cancel(ClosingReason.INFRASTRUCTURE)
    assert (await running).reason is reason
    assert alive.none_left()


async def test_a_cancel_before_the_start_is_not_lost(bench: Bench) -> None:
    supervision = Supervision(AMPLE)
    supervision.cancel(ClosingReason.CANCELLED_SURPLUS)
    assert (await bench.run(supervision, FOREVER)).reason is ClosingReason.CANCELLED_SURPLUS


async def test_a_missing_program_is_infrastructure(bench: Bench) -> None:
    def prepare() -> LaunchSpec:
        return bench.sandbox.command(["no-such-harness"], workspace=bench.workspace)

    closing = await bench.run(Supervision(AMPLE), prepare)
    assert closing.reason is ClosingReason.INFRASTRUCTURE
    assert "no-such-harness" in closing.detail
    assert bench.started == 0


async def test_a_workspace_that_cannot_be_made_is_infrastructure(bench: Bench) -> None:
    def prepare() -> LaunchSpec:
        raise OSError(28, "No space left on device")

    closing = await bench.run(Supervision(AMPLE), prepare)
    assert closing.reason is ClosingReason.INFRASTRUCTURE
    assert "No space left" in closing.detail


async def test_what_the_gateway_held_is_not_the_harness_s_time(bench: Bench) -> None:
    limits = Limits(harness_s=0.2, overall_s=240, max_stall_credit_s=120)
    held = Supervision(limits)
    held.held(60.0)
    assert (await bench.run(held, "sleep 0.5")).reason is ClosingReason.COMPLETED


async def test_credit_that_comes_while_the_program_runs_counts(bench: Bench) -> None:
    limits = Limits(harness_s=1.0, overall_s=240, max_stall_credit_s=120)
    held = Supervision(limits)
    asyncio.get_running_loop().call_later(0.1, held.held, 60.0)
    assert (await bench.run(held, "sleep 1.5")).reason is ClosingReason.COMPLETED


async def test_the_credit_for_holding_is_bounded(bench: Bench) -> None:
    limits = Limits(harness_s=0.2, overall_s=240, max_stall_credit_s=0.2)
    held = Supervision(limits)
    held.held(math.inf)
    closing = await bench.run(held, "sleep 1000")
    assert closing.reason is ClosingReason.HARNESS_TIMEOUT
    assert closing.wall_s >= 0.4


async def test_stopping_the_supervisor_leaves_no_process(bench: Bench, alive: Alive) -> None:
    running = asyncio.create_task(bench.run(Supervision(AMPLE), FOREVER, alive.path))
    await asyncio.to_thread(alive.wait_for, b"up")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert alive.none_left()
