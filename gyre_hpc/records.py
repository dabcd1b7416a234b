"""The core nouns that cross package borders: ids, closed sets, and the record of one model call.

Ids are small integers minted by the schedule (running indices) and never reused inside a run. Records are frozen
msgspec structs; arrays are little-endian numpy arrays, encoded on disk by the package that stores them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NewType

import msgspec
import numpy as np
import numpy.typing as npt

CellId = NewType("CellId", int)
"""Position of a cell in the launch plan, 0..K-1; from K on, guests in the order of their coming. The schedule's order starts
as this order; index 0 is the first core."""
GroupId = NewType("GroupId", int)
"""A rollout group: N executions of one query."""
ExecutionId = NewType("ExecutionId", int)
"""One attempt of the agent at a query. Evaluation executions draw from the same counter."""
Version = NewType("Version", int)
"""Optimizer steps ever taken, undone ones included; monotonic for ever. 0 is the warm start."""

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]


class KvPolicy(enum.StrEnum):
    """Which KV a call may be continued on (engine.kv_policy)."""

    STRICT = "strict"
    """Only that of the weights it is sampled from."""
    KEEP_EXECUTION = "keep_execution"
    """That of its execution, of whatever weights."""

    @property
    def keeps_calls(self) -> bool:
        """Running calls go on over a publication, on the KV they have."""
        return self is KvPolicy.KEEP_EXECUTION


class ClosingReason(enum.StrEnum):
    """Why an execution ended, set by the supervisor (design section 8)."""

    COMPLETED = "completed"
    HARNESS_TIMEOUT = "harness_timeout"
    OVERALL_TIMEOUT = "overall_timeout"
    FAILED = "failed"
    INFRASTRUCTURE = "infrastructure"
    WALLTIME = "walltime"
    CANCELLED_SURPLUS = "cancelled_surplus"
    TOKEN_LAW = "token_law"
    """A call broke the token law: nothing of the execution is trained."""


SCORED_REASONS = frozenset(
    {ClosingReason.COMPLETED, ClosingReason.HARNESS_TIMEOUT, ClosingReason.FAILED, ClosingReason.WALLTIME}
)
"""Reasons whose preserved workspace is assessed; the others are excluded without an assessment."""


class Assessment(msgspec.Struct, frozen=True):
    """The evaluator's word on one execution. `score` is None whenever `valid` is False: invalid is never 0."""

    score: float | None
    valid: bool
    reason: str
    evidence: str = ""
    workspace: str = ""

    def __post_init__(self) -> None:
        if self.valid != (self.score is not None):
            raise ValueError(f"assessment: valid={self.valid} but score={self.score}")


class LeafRole(enum.StrEnum):
    """Role of a trajectory leaf, highest priority first (paper section 5.4)."""

    MAIN = "main"
    MAIN_SUMMARY = "main-summary"
    SUB_AGENT = "sub-agent"
    SUB_AGENT_SUMMARY = "sub-agent-summary"
    UNKNOWN = "unknown"


class Delivery(enum.StrEnum):
    """How much of a call's answer its client received."""

    NONE = "none"
    PARTIAL = "partial"
    COMPLETE = "complete"


LAW_BREAKS = frozenset({"token_law", "engine_prompt"})
"""Reasons in `CallRecord.forks` after which nothing of the execution is trained: a past output was not continued in its
recorded ids; an engine says that it was given other ids than were sent."""


class FinishReason(enum.StrEnum):
    """Why a generation ended. ABORT marks a call that was never completed (lost or abandoned)."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ABORT = "abort"


@dataclass(frozen=True)
class CallRecord:
    """One model call as recorded by the gateway: exactly what the engine was given and what it sampled.

    Shapes: prompt_ids [P], output_ids [T], logprobs [T] (temperature-1 log-probability under the sampling policy),
    versions [T] (weight version that sampled each token). `ordinal` orders the calls of one attempt by start.
    """

    call: str
    execution: ExecutionId
    attempt: int
    ordinal: int
    prompt_ids: Int32
    output_ids: Int32
    logprobs: Float32
    versions: Int32
    finish: FinishReason
    delivery: Delivery
    accepted: bool
    """Complete, or a later request echoed a handle this call minted. Not accepted = never a target."""
    constrained: bool
    """Sampled under a grammar: never a target."""
    role_hint: LeafRole
    """The dialect's reading of who asked (headers, system prompt, tools); UNKNOWN when it cannot tell."""
    started: float
    """Unix seconds."""
    finished: float
    held_s: float
    """Seconds the gateway held the call (queue, re-route, publication); not the harness's time."""
    recomputed_tokens: int
    """Prompt and received tokens prefilled again because the call moved."""
    dialect: str
    forks: tuple[str, ...] = ()
    """Why parts of the prompt's history are not in recorded ids (gateway.lineage.Mismatch), and how the token law was broken."""
    deliver: str = "answer"
    """When it left: `answer` in one piece, `blocks` part by part while it was generated."""
    kv_version: Version | None = None
    """Oldest weights that may have computed KV its tokens were sampled with since it went on last, where that is known."""

    @property
    def lawful(self) -> bool:
        """The prompt is what the token law says, and the engine was given just that."""
        return LAW_BREAKS.isdisjoint(self.forks)
