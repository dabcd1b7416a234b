"""The attempts one runner works on: order in, reports out.

    StartExecution -> ExecutionStarted -> ExecutionClosed -> ExecutionAssessed (scored reasons only)
                                       -> ExecutionInterrupted (ended after a signal to the whole step)

Invariants: an attempt is started at most once, whatever is repeated; every started order is closed exactly once; a scored
closing is assessed exactly once. What was reported is kept until the execution's outcome is recorded (ForgetExecution) and
all work on it is done, so that a controller that comes back can be told again. A fault of task code ends its attempt, not
the runner.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import os
import signal
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from gyre_hpc.config import RunConfig
from gyre_hpc.errors import GyreError, StorageFull
from gyre_hpc.executions.evaluation import Evaluator, invalid, remove, save_assessment
from gyre_hpc.executions.forkserver import LaunchSpec
from gyre_hpc.executions.harness import Harness
from gyre_hpc.executions.launcher import Launcher
from gyre_hpc.executions.sandbox import Sandbox
from gyre_hpc.executions.supervisor import Closing, Limits, Supervision
from gyre_hpc.executions.tasks import Task, TaskSource
from gyre_hpc.layout import RunLayout
from gyre_hpc.records import SCORED_REASONS, Assessment, ClosingReason, ExecutionId
from gyre_hpc.transport.messages import (
    AssessExecution,
    CancelExecution,
    ExecutionAssessed,
    ExecutionClosed,
    ExecutionInterrupted,
    ExecutionStarted,
    ForgetExecution,
    HeldBack,
    Message,
    StartExecution,
)

log = logging.getLogger(__name__)

Key = tuple[ExecutionId, int]
BY_ITSELF = (ClosingReason.COMPLETED, ClosingReason.FAILED)
"""Reasons of a program that ended without having been ended."""
BY_SIGTERM = (-signal.SIGTERM, 128 + signal.SIGTERM)
SIGNAL_S = 2.0
"""Slurm signals the processes of a step one after the other; within this the runner has its own."""
LEAST_FREE_BYTES = 1 << 20
"""With less free space on the run's file system an execution is not judged."""


@dataclass(frozen=True)
class Services:
    """What every attempt of the run shares."""

    config: RunConfig
    layout: RunLayout
    launcher: Launcher
    sandbox: Sandbox
    harness: Harness
    tasks: TaskSource
    evaluator: Evaluator


@dataclass
class Attempt:
    """One order: `supervision` is None for an assessment alone. `reports` in the order they were sent."""

    key: Key
    folder: Path
    supervision: Supervision | None
    reports: list[Message]
    signalled: asyncio.Event = field(default_factory=asyncio.Event)
    """Its program got a signal that was not meant for it."""
    work: asyncio.Task[None] = field(init=False)


class Attempts:
    """All attempts of this runner. `send` queues a report for the controller."""

    def __init__(self, services: Services, send: Callable[[Message], None]) -> None:
        self._services = services
        self._send = send
        self._attempts: dict[ExecutionId, dict[int, Attempt]] = {}

    def __len__(self) -> int:
        """Attempts that are held."""
        return sum(map(len, self._attempts.values()))

    def start(self, order: StartExecution) -> None:
        """Begin an attempt; a repeated order changes nothing."""
        harness = self._services.config.harness
        credit = self._services.config.gateway.max_stall_credit_s
        walltime = order.walltime_s or math.inf
        limits = Limits(harness.timeout_s, harness.overall_timeout_s, credit, walltime)
        self._begin(order, Supervision(limits), lambda attempt: self._execute(attempt, order))

    def assess(self, order: AssessExecution) -> None:
        """Assess a preserved workspace whose assessment did not reach the controller; repeats change nothing."""
        self._begin(order, None, lambda attempt: self._assess_again(attempt, order.query))

    def cancel(self, order: CancelExecution) -> None:
        """End a running attempt with the given reason; one that has closed stays as it is."""
        attempt = self._held(order)
        if attempt is not None and attempt.supervision is not None:
            attempt.supervision.cancel(order.reason)

    def held_back(self, message: HeldBack) -> None:
        """Our side holds calls of a running attempt: its harness clock gets as much credit."""
        attempt = self._held(message)
        if attempt is not None and attempt.supervision is not None:
            attempt.supervision.held(message.seconds)

    def forget(self, order: ForgetExecution) -> None:
        """Nobody asks for any attempt of the execution again."""
        for attempt in self._attempts.get(order.execution, {}).values():
            attempt.work.add_done_callback(functools.partial(self._drop, attempt.key))

    def held(self) -> tuple[Key, ...]:
        """Every attempt that is worked on or was reported, and not forgotten."""
        return tuple(attempt.key for attempt in self._all())

    def orphaned(self) -> None:
        """There is no controller to pass on what the gateway holds: harness clocks stand still."""
        for attempt in self._all():
            if attempt.supervision is not None:
                attempt.supervision.orphaned()

    def adopted(self) -> None:
        """There is one again."""
        for attempt in self._all():
            if attempt.supervision is not None:
                attempt.supervision.adopted()

    def signalled(self) -> None:
        """SIGTERM went to every process of the step, programs too: how one of these ends says nothing any more."""
        for attempt in self._all():
            attempt.signalled.set()

    def repeat_reports(self) -> None:
        """Tell a controller that came back everything that was reported so far."""
        for attempt in self._all():
            for message in attempt.reports:
                self._send(message)

    async def close(self) -> None:
        """End all attempts without closing messages; returns when no process of theirs is left."""
        work = [attempt.work for attempt in self._all()]
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)

    def _begin(
        self,
        order: StartExecution | AssessExecution,
        supervision: Supervision | None,
        work: Callable[[Attempt], Coroutine[Any, Any, None]],
    ) -> None:
        if self._held(order) is not None:
            return
        key = (order.execution, order.attempt)
        attempt = Attempt(key, self._services.layout.execution(*key), supervision, [])
        attempt.work = asyncio.create_task(work(attempt))
        self._attempts.setdefault(order.execution, {})[order.attempt] = attempt

    def _held(self, order: StartExecution | AssessExecution | CancelExecution | HeldBack) -> Attempt | None:
        return self._attempts.get(order.execution, {}).get(order.attempt)

    def _all(self) -> list[Attempt]:
        return [attempt for attempts in self._attempts.values() for attempt in attempts.values()]

    def _drop(self, key: Key, work: asyncio.Task[None]) -> None:
        execution, number = key
        attempts = self._attempts.get(execution, {})
        attempts.pop(number, None)
        if not attempts:
            self._attempts.pop(execution, None)

    def _report(self, attempt: Attempt, message: Message) -> None:
        attempt.reports.append(message)
        self._send(message)

    async def _execute(self, attempt: Attempt, order: StartExecution) -> None:
        closing = self._excused(await self._supervised(attempt, order))
        if await self._interrupted(attempt, closing):
            log.warning(
                "execution %d attempt %d: void, it ended after a signal to the whole step", *attempt.key
            )
            self._report(attempt, ExecutionInterrupted(*attempt.key))
            await asyncio.to_thread(self._clean, attempt.folder)
            return
        log.info("execution %d attempt %d: %s %s", *attempt.key, closing.reason, closing.detail)
        self._report(
            attempt,
            ExecutionClosed(*attempt.key, closing.reason, closing.wall_s, closing.exit_code, closing.detail),
        )
        if closing.reason in SCORED_REASONS:
            assert attempt.supervision is not None
            await self._assessed(attempt, order.query, attempt.supervision.overall_left_s())
        await asyncio.to_thread(self._clean, attempt.folder)

    async def _interrupted(self, attempt: Attempt, closing: Closing) -> bool:
        """Whether a signal to the whole step ended the program. It may reach the program first, and us a little later."""
        if closing.exit_code in BY_SIGTERM and self._services.config.cluster.kind == "slurm":
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(attempt.signalled.wait(), SIGNAL_S)
        return attempt.signalled.is_set() and closing.reason in BY_ITSELF

    async def _supervised(self, attempt: Attempt, order: StartExecution) -> Closing:
        assert attempt.supervision is not None
        try:
            task = self._services.tasks.task(order.query)
            return await attempt.supervision.run(
                self._services.launcher,
                lambda: self._prepare(task, attempt.folder, order),
                attempt.folder / "harness.log",
                lambda: self._report(attempt, ExecutionStarted(*attempt.key)),
            )
        except Exception as error:  # task code of any family: its fault ends this attempt alone
            log.exception("execution %d attempt %d", *attempt.key)
            detail = error.message if isinstance(error, GyreError) else f"{type(error).__name__}: {error}"
            return Closing(ClosingReason.INFRASTRUCTURE, None, detail, 0.0)

    def _excused(self, closing: Closing) -> Closing:
        """What an agent did on a full disk says nothing about the policy."""
        disk = os.statvfs(self._services.layout.root)
        if closing.reason in SCORED_REASONS and disk.f_bavail * disk.f_frsize < LEAST_FREE_BYTES:
            detail = f"no space left in {self._services.layout.root}; {closing.detail}"
            return replace(closing, reason=ClosingReason.INFRASTRUCTURE, detail=detail)
        return closing

    def _prepare(self, task: Task, folder: Path, order: StartExecution) -> LaunchSpec:
        """Make the attempt's folder and the command. The folder must not exist: no workspace is ever used twice."""
        workspace, home = folder / "workspace", folder / "home"
        folder.mkdir(parents=True)
        workspace.mkdir()
        home.mkdir()
        task.prepare(workspace)
        services = self._services
        call = services.harness.fill(
            base_url=order.base_url,
            workspace=services.sandbox.seen(workspace),
            instruction=task.instruction,
            seed=order.seed,
        )
        call.write_files(home)
        return services.sandbox.command(
            call.argv, workspace=workspace, home=home, readonly=services.harness.readonly, env=call.env
        )

    async def _assess_again(self, attempt: Attempt, query: str) -> None:
        saved = attempt.folder / "assessment.json"
        if saved.is_file():
            assessment = msgspec.json.decode(saved.read_bytes(), type=Assessment)
            self._report(attempt, ExecutionAssessed(*attempt.key, assessment))
            return
        await self._assessed(attempt, query, self._services.config.harness.overall_timeout_s)

    async def _assessed(self, attempt: Attempt, query: str, within_s: float) -> None:
        try:
            task = self._services.tasks.task(query)
            assessment = await self._services.evaluator.assess(task, attempt.folder, within_s)
        except Exception as error:  # task code of any family: its fault makes this assessment invalid
            log.exception("assessment of execution %d attempt %d", *attempt.key)
            assessment = invalid(f"evaluator of {query} failed: {type(error).__name__}: {error}")
        workspace = (attempt.folder / "workspace").relative_to(self._services.layout.root)
        assessment = msgspec.structs.replace(assessment, workspace=str(workspace))
        try:
            save_assessment(assessment, attempt.folder / "assessment.json")
        except StorageFull as error:  # the controller has the verdict; a resume would assess again
            log.error("%s", error)
        self._report(attempt, ExecutionAssessed(*attempt.key, assessment))

    def _clean(self, folder: Path) -> None:
        """Keep the log, the assessment and, if asked, the workspace."""
        remove(folder / "home")
        if not self._services.config.tasks.keep_workspaces:
            remove(folder / "workspace")
