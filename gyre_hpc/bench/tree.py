"""`gyre bench tree`: build the tree of a long execution and select its paths, full prompts per call, no parent hints.

The execution: a main agent whose context only grows, two sub-agents working in between, a replaced retry now and then;
350 calls, 26 million tokens of prompts and outputs in all. The bound is comparing those bytes once with np.array_equal.
A second figure: one agent of 1,500 calls whose history grows to a million tokens (750 million tokens of prompts).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from gyre_hpc.bench.figure import Figure
from gyre_hpc.records import (
    CallRecord,
    Delivery,
    ExecutionId,
    FinishReason,
    Int32,
    LeafRole,
)
from gyre_hpc.trajectories.selection import select
from gyre_hpc.trajectories.strands import Strands
from gyre_hpc.trajectories.tree import build_tree

CALLS = 350
CALL_TOKENS = 26_000_000
AIM = 500e6
REPEATS = 5
LONG_CALLS, LONG_TOKENS = 1500, 1_000_000
VOCABULARY = 151_000


def call_record(
    ordinal: int,
    prompt: Int32,
    output: Int32,
    *,
    call: str = "",
    role: LeafRole = LeafRole.MAIN,
    delivery: Delivery = Delivery.COMPLETE,
    accepted: bool = True,
    constrained: bool = False,
    execution: int = 0,
    attempt: int = 0,
) -> CallRecord:
    """A synthetic call; log-probabilities and versions are made up but differ by call."""
    return CallRecord(
        call=call or f"c{ordinal}",
        execution=ExecutionId(execution),
        attempt=attempt,
        ordinal=ordinal,
        prompt_ids=prompt,
        output_ids=output,
        logprobs=np.full(len(output), -0.5 - ordinal / 1024, np.float32),
        versions=np.full(len(output), ordinal, np.int32),
        finish=FinishReason.STOP,
        delivery=delivery,
        accepted=accepted,
        constrained=constrained,
        role_hint=role,
        started=float(ordinal),
        finished=float(ordinal) + 0.5,
        held_s=0.0,
        recomputed_tokens=0,
        dialect="openai-chat",
    )


def long_execution(
    calls: int = CALLS, call_tokens: int = CALL_TOKENS
) -> tuple[list[CallRecord], list[Int32]]:
    """The calls, and for each the longest path of its agent (what its prompt is a prefix of)."""
    random = np.random.default_rng(0)
    turn = 2 * call_tokens // (calls * calls) + 85
    system = random.integers(0, VOCABULARY, 2000).astype(np.int32)
    agents = [(LeafRole.MAIN, 1)] + [(LeafRole.SUB_AGENT, 10)] * 2
    contexts = [np.concatenate([system, _text(random, 200)]) for _ in agents]
    records: list[CallRecord] = []
    owners: list[int] = []
    while len(records) < calls:
        for agent, (role, every) in enumerate(agents):
            if len(records) % every or len(records) >= calls:
                continue
            output = _text(random, turn // 3)
            if len(records) % 25 == 24:
                lost = _text(random, turn // 3)
                records.append(
                    call_record(len(records), contexts[agent].copy(), lost, role=role, accepted=False)
                )
                owners.append(agent)
            records.append(call_record(len(records), contexts[agent].copy(), output, role=role))
            owners.append(agent)
            contexts[agent] = np.concatenate([contexts[agent], output, _text(random, turn - turn // 3)])
    return records[:calls], [contexts[agent] for agent in owners[:calls]]


def _text(random: np.random.Generator, size: int) -> Int32:
    return random.integers(0, VOCABULARY, size).astype(np.int32)


def _best_cpu_seconds(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS):
        before = time.process_time()
        work()
        seconds.append(time.process_time() - before)
    return min(seconds)


def _build_and_select(records: list[CallRecord]) -> None:
    strands = Strands()
    for record in records:
        strands.add(record)
    select(build_tree(strands), ExecutionId(0), run_seed=0, j_max=5)


def long_lineage(calls: int = LONG_CALLS, tokens: int = LONG_TOKENS) -> tuple[float, float]:
    """Call tokens per CPU second: laying the calls down and building the tree; comparing each prompt once."""
    random = np.random.default_rng(0)
    history = _text(random, tokens)
    each = tokens // calls
    strands, ours, bound, total = Strands(), 0.0, 0.0, 0
    for ordinal in range(calls):
        end = (ordinal + 1) * each
        prompt, output = history[: end - each // 3].copy(), history[end - each // 3 : end].copy()
        record = call_record(ordinal, prompt, output)
        times = [time.process_time()]
        strands.add(record)
        times.append(time.process_time())
        np.array_equal(prompt, history[: len(prompt)])
        times.append(time.process_time())
        ours, bound = ours + times[1] - times[0], bound + times[2] - times[1]
        total += len(prompt) + len(output)
    started = time.process_time()
    select(build_tree(strands), ExecutionId(0), run_seed=0, j_max=5)
    return total / (ours + time.process_time() - started), total / bound


def run() -> dict[str, Figure]:
    """Call tokens (prompts and outputs) per CPU second, best of five."""
    records, paths = long_execution()
    tokens = sum(len(record.prompt_ids) + len(record.output_ids) for record in records)
    ours = tokens / _best_cpu_seconds(lambda: _build_and_select(records))
    pairs = [
        (record.prompt_ids, path[: len(record.prompt_ids)])
        for record, path in zip(records, paths, strict=True)
    ]
    bound = tokens / _best_cpu_seconds(lambda: [np.array_equal(prompt, path) for prompt, path in pairs])
    long, long_bound = long_lineage()
    return {
        "call_tokens_per_cpu_second": Figure(
            value=ours,
            unit="tokens/s",
            better="higher",
            aim=AIM,
            bound=bound,
            against="np.array_equal over the same bytes",
        ),
        "call_tokens_per_cpu_second_1m": Figure(
            value=long,
            unit="tokens/s",
            better="higher",
            aim=AIM,
            bound=long_bound,
            against=f"np.array_equal over the same bytes; {LONG_CALLS} calls on {LONG_TOKENS} tokens",
        ),
    }
