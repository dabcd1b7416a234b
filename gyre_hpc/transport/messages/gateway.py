"""Controller and gateway: executions opened and sealed, engines routed and unrouted."""

from __future__ import annotations

from gyre_hpc.records import CellId, ExecutionId, Version
from gyre_hpc.transport.messages.base import Message, Serial


class OpenExecution(Message, frozen=True):
    """Accept calls under `key` (unguessable; the base URL is <gateway address>/x/<key>)."""

    execution: ExecutionId
    attempt: int
    key: str
    evaluation: bool


class CloseExecution(Message, frozen=True):
    """Refuse further calls of this execution, abandon running ones, answer with ExecutionSealed."""

    execution: ExecutionId
    attempt: int


class Route(Message, frozen=True):
    """Send calls to this cell's engine at `address`; it serves `version`."""

    cell: CellId
    address: str
    capacity: int
    version: Version
    serial: Serial
    port: str = ""
    """Address of the cell's page port; "" = its KV pages do not move."""
    place: int = 0
    """In the order in which cells leave rollout: what moves goes to the last that has room."""
    weights: str = ""
    """Digest of the weights it serves: a version may be made again with others, when the host that journaled it is lost."""


class Unroute(Message, frozen=True):
    """Stop sending calls to the cell; let running calls finish for `drain_s`, then cut and re-route them.

    `gone` means the engine is dead: nothing can be asked of it. `moves`: its KV pages are good elsewhere. Answered with
    Unrouted.
    """

    cell: CellId
    drain_s: float
    cause: str
    serial: Serial
    gone: bool = False
    moves: bool = False


class Unrouted(Message, frozen=True):
    """No call of before the Unroute `serial` runs on the cell any more; `cut` calls were cut at a token boundary and moved."""

    cell: CellId
    cut: int
    serial: Serial


class EngineFault(Message, frozen=True):
    """The engine of the Route `serial` refused or reset; its calls have been re-routed."""

    cell: CellId
    cause: str
    serial: Serial


class ExecutionSealed(Message, frozen=True):
    """All records of the attempt are durable. `calls` counts generations begun for it."""

    execution: ExecutionId
    attempt: int
    calls: int
    calls_rerouted: int
    calls_lost: int
    tokens_sampled: int
    tokens_recomputed: int
    prompt_tokens: int
    held_s: float
    incomplete: bool
    budget_exhausted: bool
    pages_due: int = 0
    """Full KV pages that moved calls had on the cells they left, those alive when they left."""
    pages_found: int = 0
    """Of these, the ones they found where they went on."""
    kv_lag: int = 0
    """Most versions that a token was sampled ahead of the oldest KV it saw; 0 under kv_policy=strict."""
    tokens_on_old_kv: int = 0
    """Tokens sampled by newer weights than the oldest KV they may have seen; 0 under kv_policy=strict."""
    tokens_cached: int = 0
    """Prompt tokens that had their KV before their call began."""
    calls_over_versions: int = 0
    """Calls that a publication met under way: sampled by more than one version."""
    stalls: int = 0
    """Silences of an engine under a call of the attempt of `gateway.stall_alarm_s` and more."""
    calls_unknown: int = 0
    """Calls whose role no rule could tell."""
    law_breaks: int = 0
    """How often calls broke the token law: once is enough that nothing of the attempt is trained."""


class HeldBack(Message, frozen=True):
    """Seconds so far for which our side held calls of the attempt. The controller passes it on to the runner.

    Growing; sent about once a second while it grows. The runner gives the harness clock as much credit.
    """

    execution: ExecutionId
    attempt: int
    seconds: float


class GatewayStatus(Message, frozen=True):
    """Every second: calls running per cell, calls waiting for a route, tokens sampled so far."""

    running: dict[int, int]
    waiting: int
    tokens: int
