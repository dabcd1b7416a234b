"""`python long_lineage.py CALLS TOKENS`: the call log of one execution, taken through the processor's path to a shard.

Prints one JSON line: the memory by which the process grew at most (MB), calls, unique tokens, strands.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sys
import tempfile
from pathlib import Path

import numpy as np

from gyre_hpc.engines.wire import ids_xxh3
from gyre_hpc.gateway.call_log import CallLog, call_log_path
from gyre_hpc.gateway.frames import (
    AttemptOpened,
    AttemptSealed,
    CallDelivered,
    CallFinished,
    CallOpened,
    TokensReceived,
    encode_float32,
    encode_int32,
)
from gyre_hpc.layout import RunLayout
from gyre_hpc.records import Assessment, ClosingReason, Delivery, ExecutionId, GroupId
from gyre_hpc.shards.encode import Derivation, ExecutionRecord
from gyre_hpc.shards.writer import ShardWriter
from gyre_hpc.trajectories.call_book import CallBook
from gyre_hpc.trajectories.packing import Packing
from gyre_hpc.trajectories.process import Attempt, Settings, process_group
from gyre_hpc.trajectories.tree import build_tree
from tests.gateway.long_lineage import forget_peak, peak_mb

KEY = (ExecutionId(1), 1)
CHUNK = 8


def write_log(layout: RunLayout, calls: int, tokens: int) -> None:
    """Each call continues the one before; a third of its tokens are sampled."""
    asyncio.run(_write_log(layout, calls, tokens))


async def _write_log(layout: RunLayout, calls: int, tokens: int) -> None:
    log, random = CallLog(call_log_path(layout, 1), 1000), np.random.default_rng(0)
    log.append(AttemptOpened(*KEY, "key"))
    each = tokens // calls
    sampled, history = each // 3, np.zeros(0, np.int32)
    base = ""
    for ordinal in range(calls):
        call, shared = f"e1a1c{ordinal}", len(history)
        delta, output = (random.integers(0, 150_000, n).astype(np.int32) for n in (each - sampled, sampled))
        history = np.concatenate([history, delta])
        opened = CallOpened(
            call, *KEY, ordinal, base, shared, encode_int32(delta), b"", b"", 4096, (), False, "main", "openai-chat",
            1.0, {}, (), ids_xxh3(history),
        )  # fmt: skip
        log.append(opened)
        for at in range(0, sampled, CHUNK):
            ids = output[at : at + CHUNK]
            logprobs = encode_float32([-0.5] * len(ids))
            log.append(TokensReceived(call, encode_int32(ids), logprobs, encode_int32([3])))
        log.append(CallFinished(call, "stop", sampled, 2.0, 0.0, 0, 0, ""))
        log.append(CallDelivered(call, Delivery.COMPLETE))
        base, history = call, np.concatenate([history, output])
    log.append(AttemptSealed(*KEY, calls, {}))
    log.close()


def measure(folder: Path, calls: int, tokens: int) -> dict[str, float]:
    layout = RunLayout(folder)
    layout.create()
    writer = multiprocessing.get_context("spawn").Process(target=write_log, args=(layout, calls, tokens))
    writer.start()
    writer.join()
    assert writer.exitcode == 0
    shards = ShardWriter(layout, "run", Derivation(0, 5))
    forget_peak()
    before = peak_mb()
    book = CallBook(layout, shards.sealed)
    book.read()
    strands = book.strands(KEY)
    assert book.complete(KEY)
    tree = build_tree(strands)
    attempts = [Attempt(ExecutionId(e), float(e), "", tree) for e in (1, 2)]
    group = process_group(GroupId(1), attempts, Settings(0, 5, 0.1, True, Packing(2 * tokens, 1)))
    assert group.trained_tokens == 2 * calls * (tokens // calls // 3)
    assessment = Assessment(1.0, True, "")
    record = ExecutionRecord(
        KEY[0], KEY[1], GroupId(1), "q", ClosingReason.COMPLETED, 1.0, False, False, assessment, strands
    )
    shards.add(record, 0.0)
    shards.seal()
    return {
        "grown_mb": peak_mb() - before,
        "calls": len(strands.calls),
        "tokens": strands.unique_tokens,
        "strands": len(strands.strands),
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        sys.stdout.write(json.dumps(measure(Path(name), int(sys.argv[1]), int(sys.argv[2]))) + "\n")
