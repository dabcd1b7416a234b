"""Every execution from launch to final outcome, joined from what runner and gateway say.

An attempt is opened at the gateway, started by the runner, closed by the runner, sealed by the gateway and, for scored
reasons, assessed by the runner; in that order but for the last two. The schedule hears of it exactly twice: launched,
terminated. A repeat of any message changes nothing. An attempt cut short by the death of runner, gateway or controller is
followed by another attempt under the same execution id; the ledger does not move. What does not fit into the rest of the job
is held: it counts as launched, and the next job starts it. A harness needs the gateway's address:
while there is none, launches wait.

The table holds what somebody may still ask for: executions without an outcome, and finished ones of groups that live in the
schedule. The runner forgets an execution with its outcome.

Pure but for the `send` callables it is given; the caller journals what the callbacks report.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field

from gyre_hpc.controller.executions.walltime import RUN, Permit
from gyre_hpc.records import SCORED_REASONS, Assessment, ClosingReason, ExecutionId, GroupId
from gyre_hpc.transport.messages import (
    AssessExecution,
    CancelExecution,
    CloseExecution,
    ExecutionAssessed,
    ExecutionClosed,
    ExecutionInterrupted,
    ExecutionOutcome,
    ExecutionSealed,
    ExecutionStarted,
    ForgetExecution,
    Message,
    OpenExecution,
    StartExecution,
)

MAX_ATTEMPTS = 4
"""Attempts of one execution under one controller before it is closed as infrastructure: two restarts of a service and one node
loss. Attempts that ended with their job do not count: the next one starts it again."""


@dataclass
class Execution:
    """One execution. `outcome` is final; the fields before it belong to the current attempt."""

    id: ExecutionId
    group: GroupId | None
    query: str
    attempt: int = 0
    walltime_s: float = 0.0
    """Time limit by the end of the job; 0.0 = none."""
    repeats: int = 0
    """Attempts that were cut short under this controller."""
    launched: bool = False
    withdrawn: bool = False
    """Surplus: no further attempt."""
    terminated: bool = False
    closed: ExecutionClosed | None = None
    sealed: ExecutionSealed | None = None
    assessment: Assessment | None = None
    outcome: ExecutionOutcome | None = None

    @property
    def evaluation(self) -> bool:
        return self.group is None


@dataclass(frozen=True)
class ExecutionHooks:
    """What the table asks of its owner. `runner` and `gateway` send; the rest report upward."""

    runner: Callable[[Message], None]
    gateway: Callable[[Message], None]
    key: Callable[[ExecutionId, int], str]
    gateway_url: Callable[[], str]
    """Where the gateway is reached; "" while it is not."""
    harness_seed: Callable[[ExecutionId], int]
    opened: Callable[[Execution], None]
    closed: Callable[[ExecutionClosed], None]
    launched: Callable[[ExecutionId], None]
    terminated: Callable[[ExecutionId, ClosingReason], None]
    sealed: Callable[[ExecutionSealed], None]
    outcome: Callable[[Execution], None]
    permit: Callable[[], Permit] = lambda: RUN
    """May one start now, and with which time limit?"""


@dataclass
class ExecutionTable:
    """Executions by id."""

    hooks: ExecutionHooks
    executions: dict[ExecutionId, Execution] = field(default_factory=dict)
    waiting: dict[ExecutionId, None] = field(default_factory=dict)
    """Launches that wait for a gateway, in order."""
    used: dict[ExecutionId, int] = field(default_factory=dict)
    """Numbers of attempts that survivors know and the journal may not: the next attempt has a higher one."""
    held: dict[ExecutionId, None] = field(default_factory=dict)
    """Launches that do not fit into what is left of the job, in order."""

    # ---- upward: decisions of the schedule --------------------------------------------------------------------

    def register(self, id: ExecutionId, group: GroupId | None, query: str) -> Execution:
        """An execution was dispatched; it waits for its launch."""
        return self.executions.setdefault(id, Execution(id, group, query))

    def launch(self, id: ExecutionId) -> None:
        """Open a new attempt at gateway and runner, as soon as there is a gateway."""
        execution = self.executions[id]
        if not self.hooks.gateway_url():
            self.waiting[id] = None
            return
        permit = self.hooks.permit()
        if not permit.start:
            self.held[id] = None
            return
        execution.attempt = max(execution.attempt, self.used.pop(id, 0)) + 1
        execution.closed = execution.sealed = execution.assessment = None
        self.hooks.opened(execution)
        self._open_at_gateway(execution)
        execution.walltime_s = permit.limit_s
        self._start_at_runner(execution)

    def launch_held(self) -> None:
        """Try again what did not fit: estimates fall, time limits are raised."""
        if self.held and self.hooks.permit().start:
            held, self.held = self.held, {}
            for id in held:
                self.launch(id)

    def withdraw(self, id: ExecutionId) -> None:
        """Surplus: one that does not run never starts, a running one is cancelled. Each is terminated once."""
        execution = self.executions[id]
        execution.withdrawn = True
        waits = id in self.waiting or id in self.held
        self.waiting.pop(id, None)
        self.held.pop(id, None)
        if execution.attempt == 0 or waits:
            self._end(execution, ClosingReason.CANCELLED_SURPLUS)
        elif execution.outcome is None and execution.closed is None:
            self._cancel_surplus(execution)

    # ---- downward: messages of runner and gateway --------------------------------------------------------------

    def started(self, message: ExecutionStarted) -> None:
        execution = self._current(message.execution, message.attempt)
        if execution is not None:
            self._mark_launched(execution)

    def closed(self, message: ExecutionClosed) -> None:
        execution = self._current(message.execution, message.attempt)
        if execution is None or execution.closed is not None:
            return
        self._mark_launched(execution)
        execution.closed = message
        self.hooks.closed(message)
        self.hooks.gateway(CloseExecution(execution.id, execution.attempt))

    def gateway_sealed(self, message: ExecutionSealed) -> None:
        execution = self._current(message.execution, message.attempt)
        if execution is None or execution.closed is None or execution.sealed is not None:
            return
        execution.sealed = message
        self.hooks.sealed(message)
        self._terminate(execution, self._reason(execution))
        self._settle(execution)

    def assessed(self, message: ExecutionAssessed) -> None:
        execution = self._current(message.execution, message.attempt)
        if execution is None:
            return
        execution.assessment = message.assessment
        self._settle(execution)

    def interrupted(self, message: ExecutionInterrupted) -> None:
        """Its program got a signal that was not meant for it."""
        execution = self._current(message.execution, message.attempt)
        if execution is not None and execution.closed is None:
            self.repeat(execution)

    # ---- deaths ------------------------------------------------------------------------------------------------

    def runner_lost(self) -> None:
        """Everything the runner held is gone: running attempts are repeated, unassessed ones assessed again."""
        for execution in self.started_and_unfinished():
            if execution.closed is None:
                self.repeat(execution)
            elif execution.assessment is None and execution.closed.reason in SCORED_REASONS:
                self.assess_again(execution)

    def runner_returned(self) -> None:
        """The same runner over another link: orders may have gone down with the one before."""
        for execution in self.started_and_unfinished():
            if execution.closed is None:
                self._start_at_runner(execution)
                if execution.withdrawn:
                    self._cancel_surplus(execution)
            elif execution.assessment is None and execution.closed.reason in SCORED_REASONS:
                self.assess_again(execution)

    def gateway_lost(self) -> None:
        """Another gateway is there: harnesses of the one before cannot reach it, records it had not sealed are cut."""
        for execution in self.started_and_unfinished():
            if execution.sealed is None:
                if execution.closed is None:
                    reason = ClosingReason.INFRASTRUCTURE
                    self.hooks.runner(CancelExecution(execution.id, execution.attempt, reason))
                self.repeat(execution)

    def gateway_returned(self) -> None:
        """A restarted gateway worker at the same address: tell it again who may call."""
        for execution in self.started_and_unfinished():
            if execution.sealed is None:
                self._open_at_gateway(execution)
            if execution.closed is not None and execution.sealed is None:
                self.hooks.gateway(CloseExecution(execution.id, execution.attempt))

    def gateway_up(self) -> None:
        """Launch what waited for a gateway."""
        waiting, self.waiting = self.waiting, {}
        for id in waiting:
            self.launch(id)

    def repeat(self, execution: Execution) -> None:
        """Another attempt under the same id; none for surplus, or when too many were cut short."""
        if execution.withdrawn:
            self._end(execution, ClosingReason.CANCELLED_SURPLUS)
        elif execution.repeats + 1 < MAX_ATTEMPTS:
            execution.repeats += 1
            self.launch(execution.id)
        else:
            self._end(execution, ClosingReason.INFRASTRUCTURE)

    def close_again(self, execution: Execution, reason: ClosingReason) -> None:
        """An attempt that was terminated for `reason` before its outcome was recorded (resume)."""
        if execution.closed is None or execution.sealed is None:
            self._end(execution, reason)
            return
        self._settle(execution)
        if execution.outcome is None:
            self.assess_again(execution)

    def take_up(
        self, execution: Execution, closed: ExecutionClosed | None, sealed: ExecutionSealed | None
    ) -> None:
        """Its attempt outlived the controller and goes on under its number; `closed`, `sealed`: as far as is journaled.

        Orders that may have been lost are repeated: gateway and runner do nothing twice.
        """
        execution.closed, execution.sealed = closed, sealed
        if closed is None:
            if execution.withdrawn:
                self._cancel_surplus(execution)
            return
        if sealed is None:
            self.hooks.gateway(CloseExecution(execution.id, execution.attempt))
        else:
            self._terminate(execution, self._reason(execution))
            self._settle(execution)
        if execution.outcome is None and closed.reason in SCORED_REASONS:
            self.assess_again(execution)

    def end_at_survivors(self, id: ExecutionId, attempt: int) -> None:
        """An attempt does not go on where it outlived the controller; what is heard of it counts no more."""
        self.used[id] = max(attempt, self.used.get(id, 0))
        self.hooks.runner(CancelExecution(id, attempt, ClosingReason.INFRASTRUCTURE))
        self.hooks.gateway(CloseExecution(id, attempt))

    def assess_again(self, execution: Execution) -> None:
        """The workspace is preserved: only the assessment is missing."""
        self.hooks.runner(AssessExecution(execution.id, execution.attempt, execution.query))

    def outcomes(self) -> dict[ExecutionId, ExecutionOutcome]:
        """Of the finished executions that are held."""
        return {id: item.outcome for id, item in self.executions.items() if item.outcome is not None}

    def forget(self, execution: Execution) -> None:
        """Nobody can ask for this execution again; its outcome is journaled."""
        assert execution.outcome is not None
        del self.executions[execution.id]

    def forget_all_but(self, live: Container[GroupId]) -> None:
        """Drop finished executions whose group is not `live`."""
        for execution in list(self.executions.values()):
            if execution.outcome is not None and execution.group not in live:
                self.forget(execution)

    def unfinished(self) -> Iterable[Execution]:
        """Executions with an attempt but without an outcome, oldest first."""
        return [item for _, item in sorted(self.executions.items()) if item.attempt and item.outcome is None]

    def started_and_unfinished(self) -> Iterable[Execution]:
        """Unfinished executions whose next attempt waits neither for a gateway nor for another job."""
        return [
            item for item in self.unfinished() if item.id not in self.waiting and item.id not in self.held
        ]

    # ---- steps -------------------------------------------------------------------------------------------------

    def _current(self, id: ExecutionId, attempt: int) -> Execution | None:
        execution = self.executions.get(id)
        if execution is None or execution.attempt != attempt or execution.outcome is not None:
            return None
        return execution

    def _open_at_gateway(self, execution: Execution) -> None:
        key = self.hooks.key(execution.id, execution.attempt)
        self.hooks.gateway(OpenExecution(execution.id, execution.attempt, key, execution.evaluation))

    def _start_at_runner(self, execution: Execution) -> None:
        url = f"{self.hooks.gateway_url()}/x/{self.hooks.key(execution.id, execution.attempt)}"
        self.hooks.runner(
            StartExecution(
                execution=execution.id,
                attempt=execution.attempt,
                query=execution.query,
                base_url=url,
                seed=self.hooks.harness_seed(execution.id),
                evaluation=execution.evaluation,
                walltime_s=execution.walltime_s,
            )
        )

    def _cancel_surplus(self, execution: Execution) -> None:
        reason = ClosingReason.CANCELLED_SURPLUS
        self.hooks.runner(CancelExecution(execution.id, execution.attempt, reason))

    def _mark_launched(self, execution: Execution) -> None:
        if not execution.launched:
            execution.launched = True
            self.hooks.launched(execution.id)

    def _terminate(self, execution: Execution, reason: ClosingReason) -> None:
        if not execution.terminated:
            execution.terminated = True
            self.hooks.terminated(execution.id, reason)

    def _end(self, execution: Execution, reason: ClosingReason) -> None:
        """Terminated without a sealed attempt: excluded."""
        cut_short = execution.attempt > 0
        if reason is not ClosingReason.CANCELLED_SURPLUS:
            self._mark_launched(execution)
        self._terminate(execution, reason)
        self._finish(execution, reason, 0.0, incomplete=cut_short)

    @staticmethod
    def _reason(execution: Execution) -> ClosingReason:
        """Zero model calls or a lost call = infrastructure, a broken token law is that, whatever the harness says."""
        assert execution.closed is not None and execution.sealed is not None
        cancelled = execution.closed.reason is ClosingReason.CANCELLED_SURPLUS
        if not cancelled and (execution.sealed.calls == 0 or execution.sealed.calls_lost):
            return ClosingReason.INFRASTRUCTURE
        if not cancelled and execution.sealed.law_breaks:
            return ClosingReason.TOKEN_LAW
        return execution.closed.reason

    def _settle(self, execution: Execution) -> None:
        if execution.closed is None or execution.sealed is None:
            return
        reason = self._reason(execution)
        if execution.closed.reason in SCORED_REASONS and execution.assessment is None:
            return
        self._finish(execution, reason, execution.closed.wall_s, incomplete=execution.sealed.incomplete)

    def _finish(
        self, execution: Execution, reason: ClosingReason, wall_s: float, *, incomplete: bool
    ) -> None:
        kept = reason in SCORED_REASONS and not incomplete
        execution.outcome = ExecutionOutcome(
            execution=execution.id,
            attempt=execution.attempt,
            group=execution.group,
            query=execution.query,
            reason=reason,
            wall_s=wall_s,
            incomplete=incomplete,
            assessment=execution.assessment if kept else None,
        )
        self.hooks.outcome(execution)
        if execution.attempt:
            self.hooks.runner(ForgetExecution(execution.id))
