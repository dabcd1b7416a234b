"""Whether what a run left behind agrees: journal, call logs and shards tell the same story of every execution."""

from __future__ import annotations

from gyre_hpc.controller.journal.entries import Outcome, Sealed
from gyre_hpc.gateway.call_log import CallLogReader, ExecutionEnd, call_logs
from gyre_hpc.shards.manifest import read_manifest
from gyre_hpc.shards.reader import ShardReader
from gyre_hpc.shards.verify import verify
from tests.end_to_end.runs import Run

Attempts = dict[tuple[int, int], int]
"""(execution, attempt) -> model calls."""


def check_agreement(run: Run) -> None:
    """Every outcome is at rest exactly once, with as many calls as gateway and journal counted."""
    outcomes = {entry.outcome.execution: entry.outcome for entry in run.entries(Outcome)}
    decided = {(id, outcome.attempt) for id, outcome in outcomes.items()}
    journaled = {
        (entry.sealed.execution, entry.sealed.attempt): entry.sealed.calls for entry in run.entries(Sealed)
    }
    logged, at_rest = in_call_logs(run), in_shards(run)
    assert set(at_rest) == decided
    assert journaled.items() <= logged.items()
    assert {key: calls for key, calls in at_rest.items() if key in journaled} == {
        key: calls for key, calls in journaled.items() if key in decided
    }


def in_call_logs(run: Run) -> Attempts:
    """Sealed attempts of all gateways."""
    ends: list[ExecutionEnd] = []
    for path in call_logs(run.layout):
        ends += [item for item in CallLogReader(path).poll() if isinstance(item, ExecutionEnd)]
    found = {(end.execution, end.attempt): end.calls for end in ends}
    assert len(found) == len(ends)
    return found


def in_shards(run: Run) -> Attempts:
    """Attempts that count; fails when shards are damaged or hold one twice."""
    assert verify(run.folder).ok
    found: Attempts = {}
    for line in read_manifest(run.layout):
        with ShardReader(run.layout.shards / line.file) as shard:
            for index, sealed in enumerate(line.executions):
                if not sealed.superseded:
                    assert (sealed.execution, sealed.attempt) not in found
                    found[sealed.execution, sealed.attempt] = len(shard.record(index).strands.calls)
    return found
