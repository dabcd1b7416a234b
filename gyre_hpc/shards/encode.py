"""One closed execution <-> tables. `encode` and `decode` are inverse; `derive` depends on raw, run seed and j_max alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gyre_hpc.records import (
    Assessment,
    CallRecord,
    ClosingReason,
    Delivery,
    ExecutionId,
    FinishReason,
    GroupId,
    Int32,
    LeafRole,
    Version,
)
from gyre_hpc.shards.format import Array, Column, Ragged, Table, Tables, code, value_of
from gyre_hpc.trajectories.selection import select, target_tokens
from gyre_hpc.trajectories.strands import Strands, join_path
from gyre_hpc.trajectories.tree import build_tree


@dataclass(frozen=True)
class ExecutionRecord:
    """One attempt at rest. `reason` is None for an attempt that never closed (superseded by a re-launch)."""

    execution: ExecutionId
    attempt: int
    group: GroupId | None
    """None for a held-out execution."""
    query: str
    reason: ClosingReason | None
    wall_s: float
    incomplete: bool
    superseded: bool
    assessment: Assessment | None
    strands: Strands

    @property
    def lawful(self) -> bool:
        """No call broke the token law."""
        return all(laid.record.lawful for laid in self.strands.calls)

    @property
    def reward(self) -> float | None:
        """The score, where it counts."""
        usable = self.lawful and not (self.incomplete or self.superseded)
        valid = self.assessment is not None and usable
        return self.assessment.score if valid and self.assessment else None


@dataclass(frozen=True)
class Derivation:
    """What `derive` needs besides the calls; kept in the attributes of a shard."""

    seed: int
    j_max: int


def encode(record: ExecutionRecord, derivation: Derivation) -> Tables:
    """All tables of one execution."""
    strands = record.strands.canonical()
    raw = {
        "raw/executions": _execution_row(record),
        "raw/strands": _strand_rows(strands),
        "raw/calls": _call_rows(strands),
    }
    return raw | derive(strands, record.execution, derivation)


def derive(strands: Strands, execution: ExecutionId, derivation: Derivation) -> Tables:
    """Tree, roles and kept paths as tables."""
    tree = build_tree(strands)
    paths = select(tree, execution, derivation.seed, derivation.j_max)
    return {
        "derived/executions": {
            "target_tokens": np.array([target_tokens(tree, paths)], np.int64),
            "unique_tokens": np.array([len(tree.tokens)], np.int64),
        },
        "derived/nodes": {
            "parent": tree.parent,
            "start": tree.start,
            "size": tree.sizes.astype(np.int32),
            "call": tree.call,
            "target": tree.target.astype(np.uint8),
        },
        "derived/paths": {
            "leaf": np.array([path.leaf for path in paths], np.int32),
            "role": _codes([path.role for path in paths]),
            "targets": Ragged.of([np.array(path.targets, np.int32) for path in paths], np.int32),
        },
    }


def decode(tables: Tables) -> ExecutionRecord:
    """The execution as it was handed to `encode`, its calls laid down afresh from their full prompts."""
    row = tables["raw/executions"]
    strands = Strands()
    for call in decode_calls(tables):
        strands.add(call)
    group = int(flat(row, "group")[0])
    return ExecutionRecord(
        execution=ExecutionId(int(flat(row, "execution")[0])),
        attempt=int(flat(row, "attempt")[0]),
        group=GroupId(group) if group >= 0 else None,
        query=ragged(row, "query").text(0),
        reason=value_of(ClosingReason, int(flat(row, "reason")[0])),
        wall_s=float(flat(row, "wall_s")[0]),
        incomplete=bool(flat(row, "incomplete")[0]),
        superseded=bool(flat(row, "superseded")[0]),
        assessment=_assessment(row),
        strands=strands,
    )


def decode_calls(tables: Tables) -> Iterator[CallRecord]:
    """The recorded calls by ordinal, one full prompt in memory at a time."""
    execution, calls, strands = tables["raw/executions"], tables["raw/calls"], tables["raw/strands"]
    parent, fork, tokens = flat(strands, "parent"), flat(strands, "fork"), ragged(strands, "tokens")

    def look_up(strand: int) -> tuple[int, int, Int32]:
        return int(parent[strand]), int(fork[strand]), tokens.row(strand)

    for at in range(len(calls["ordinal"])):
        ids = join_path(int(flat(calls, "strand")[at]), int(flat(calls, "end")[at]), look_up)
        prompt = int(flat(calls, "prompt_tokens")[at])
        yield CallRecord(
            call=ragged(calls, "call").text(at),
            execution=ExecutionId(int(flat(execution, "execution")[0])),
            attempt=int(flat(execution, "attempt")[0]),
            ordinal=int(flat(calls, "ordinal")[at]),
            prompt_ids=ids[:prompt],
            output_ids=ids[prompt:],
            logprobs=ragged(calls, "logprobs").row(at),
            versions=ragged(calls, "versions").row(at),
            finish=value_of(FinishReason, int(flat(calls, "finish")[at])) or FinishReason.ABORT,
            delivery=value_of(Delivery, int(flat(calls, "delivery")[at])) or Delivery.NONE,
            accepted=bool(flat(calls, "accepted")[at]),
            constrained=bool(flat(calls, "constrained")[at]),
            role_hint=value_of(LeafRole, int(flat(calls, "role")[at])) or LeafRole.UNKNOWN,
            started=float(flat(calls, "started")[at]),
            finished=float(flat(calls, "finished")[at]),
            held_s=float(flat(calls, "held_s")[at]),
            recomputed_tokens=int(flat(calls, "recomputed_tokens")[at]),
            dialect=ragged(calls, "dialect").text(at),
            forks=forks_of(calls, at),
            deliver=_deliver_of(calls, at),
            kv_version=kv_version_of(calls, at),
        )


def forks_of(calls: Table, at: int) -> tuple[str, ...]:
    """`CallRecord.forks` of a row; a shard written before the column existed has none."""
    text = ragged(calls, "forks").text(at) if "forks" in calls else ""
    return tuple(text.split(",")) if text else ()


def _deliver_of(calls: Table, at: int) -> str:
    """`CallRecord.deliver` of a row; a shard written before the column existed has whole answers alone."""
    return ragged(calls, "deliver").text(at) if "deliver" in calls else "answer"


def kv_version_of(calls: Table, at: int) -> Version | None:
    """`CallRecord.kv_version` of a row; a shard written before the column existed does not know it."""
    version = int(flat(calls, "kv_version")[at]) if "kv_version" in calls else -1
    return Version(version) if version >= 0 else None


def flat(table: Table, name: str) -> Array:
    """A column of single values."""
    column: Column = table[name]
    assert not isinstance(column, Ragged), name
    return column


def ragged(table: Table, name: str) -> Ragged:
    """A column of rows."""
    column: Column = table[name]
    assert isinstance(column, Ragged), name
    return column


def _execution_row(record: ExecutionRecord) -> Table:
    assessment = record.assessment or Assessment(score=None, valid=False, reason="")
    score = np.nan if assessment.score is None else assessment.score
    return {
        "execution": np.array([record.execution], np.int64),
        "attempt": np.array([record.attempt], np.int32),
        "group": np.array([-1 if record.group is None else record.group], np.int64),
        "reason": np.array([code(record.reason)], np.uint8),
        "wall_s": np.array([record.wall_s], np.float64),
        "incomplete": np.array([record.incomplete], np.uint8),
        "superseded": np.array([record.superseded], np.uint8),
        "assessed": np.array([record.assessment is not None], np.uint8),
        "score": np.array([score], np.float64),
        "query": Ragged.texts([record.query]),
        "assessment_reason": Ragged.texts([assessment.reason]),
        "evidence": Ragged.texts([assessment.evidence]),
        "workspace": Ragged.texts([assessment.workspace]),
    }


def _assessment(row: Table) -> Assessment | None:
    if not flat(row, "assessed")[0]:
        return None
    score = float(flat(row, "score")[0])
    texts = [ragged(row, name).text(0) for name in ("assessment_reason", "evidence", "workspace")]
    return Assessment(None if np.isnan(score) else score, not np.isnan(score), *texts)


def _strand_rows(strands: Strands) -> Table:
    return {
        "parent": np.array([strand.parent for strand in strands.strands], np.int32),
        "fork": np.array([strand.fork for strand in strands.strands], np.int32),
        "tokens": Ragged.of([strand.ids(strand.fork, strand.end) for strand in strands.strands], np.int32),
    }


def _call_rows(strands: Strands) -> Table:
    calls = strands.calls
    records = [laid.record for laid in calls]
    return {
        "call": Ragged.texts([record.call for record in records]),
        "dialect": Ragged.texts([record.dialect for record in records]),
        "forks": Ragged.texts([",".join(record.forks) for record in records]),
        "deliver": Ragged.texts([record.deliver for record in records]),
        "ordinal": np.array([record.ordinal for record in records], np.int32),
        "strand": np.array([laid.strand for laid in calls], np.int32),
        "end": np.array([laid.end for laid in calls], np.int32),
        "prompt_tokens": np.array([laid.prompt_tokens for laid in calls], np.int32),
        "logprobs": Ragged.of([record.logprobs for record in records], np.float32),
        "versions": Ragged.of([record.versions for record in records], np.int32),
        "kv_version": np.array(
            [-1 if record.kv_version is None else record.kv_version for record in records], np.int32
        ),
        "finish": _codes([record.finish for record in records]),
        "delivery": _codes([record.delivery for record in records]),
        "role": _codes([record.role_hint for record in records]),
        "accepted": np.array([record.accepted for record in records], np.uint8),
        "constrained": np.array([record.constrained for record in records], np.uint8),
        "started": np.array([record.started for record in records], np.float64),
        "finished": np.array([record.finished for record in records], np.float64),
        "held_s": np.array([record.held_s for record in records], np.float64),
        "recomputed_tokens": np.array([record.recomputed_tokens for record in records], np.int64),
    }


def _codes(values: Sequence[FinishReason | Delivery | LeafRole]) -> Array:
    return np.array([code(value) for value in values], np.uint8)
