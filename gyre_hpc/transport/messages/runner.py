"""Controller and runner: executions started, ended and assessed."""

from __future__ import annotations

from gyre_hpc.records import Assessment, ClosingReason, ExecutionId
from gyre_hpc.transport.messages.base import Message


class StartExecution(Message, frozen=True):
    """Prepare the workspace of `query` and start the harness against `base_url`."""

    execution: ExecutionId
    attempt: int
    query: str
    base_url: str
    seed: int
    evaluation: bool
    walltime_s: float = 0.0
    """Seconds after which it is ended because the job ends, with reason WALLTIME; 0 = no such limit."""


class CancelExecution(Message, frozen=True):
    """End the execution now with this reason; no assessment follows for surplus."""

    execution: ExecutionId
    attempt: int
    reason: ClosingReason


class AssessExecution(Message, frozen=True):
    """Assess the preserved workspace of an attempt that closed before its assessment was recorded (resume)."""

    execution: ExecutionId
    attempt: int
    query: str


class ForgetExecution(Message, frozen=True):
    """The outcome of the execution is recorded: nobody asks for any attempt of it again."""

    execution: ExecutionId


class ExecutionStarted(Message, frozen=True):
    """The harness process runs."""

    execution: ExecutionId
    attempt: int


class ExecutionInterrupted(Message, frozen=True):
    """The program ended after a signal to every process of the runner's step: its end says nothing, the attempt is void."""

    execution: ExecutionId
    attempt: int


class ExecutionClosed(Message, frozen=True):
    """The harness has ended and will make no further call. `wall_s` is real, `exit_code` None if killed."""

    execution: ExecutionId
    attempt: int
    reason: ClosingReason
    wall_s: float
    exit_code: int | None
    detail: str


class ExecutionAssessed(Message, frozen=True):
    """The final assessment (after retries). Not sent for reasons outside SCORED_REASONS."""

    execution: ExecutionId
    attempt: int
    assessment: Assessment
