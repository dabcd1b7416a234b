"""`gyre shards stats RUN` and `gyre shards show RUN EXECUTION`: what lies in the shards, as plain data to render."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gyre_hpc.errors import MissingInput
from gyre_hpc.layout import RunLayout
from gyre_hpc.records import ExecutionId, LeafRole
from gyre_hpc.shards.encode import ExecutionRecord, decode, flat, forks_of, kv_version_of, ragged
from gyre_hpc.shards.format import ENUMS, Table, Tables, value_of
from gyre_hpc.shards.manifest import read_manifest
from gyre_hpc.shards.reader import find_tables, open_shards


@dataclass(frozen=True)
class Stats:
    """Totals over all shards of a run; calls, tokens and paths include those of superseded attempts.

    `call_tokens` = prompts and outputs as the engines saw them.
    """

    shards: int
    bytes: int
    executions: int
    superseded: int
    by_reason: dict[str, int]
    rewards: int
    reward_mean: float | None
    calls: int
    forks_by_reason: dict[str, int]
    """Calls whose history is not in recorded ids throughout, by reason; those of a broken token law are never trained."""
    call_tokens: int
    unique_tokens: int
    sampled_tokens: int
    target_tokens: int
    """In kept paths."""
    calls_by_role: dict[str, int]
    """A call of unknown role is trained last."""
    paths: int
    paths_by_role: dict[str, int]


@dataclass(frozen=True)
class ShownCall:
    """One call of an execution; `node` is where it ends in the tree (-1: nowhere)."""

    call: str
    ordinal: int
    role: str
    prompt_tokens: int
    output_tokens: int
    finish: str
    delivery: str
    accepted: bool
    constrained: bool
    versions: tuple[int, ...]
    kv_version: int | None
    """Oldest weights that may have computed KV it was sampled with."""
    held_s: float
    forks: tuple[str, ...]


@dataclass(frozen=True)
class ShownNode:
    """One node of the tree; `call` indexes the calls, -1 for context."""

    parent: int
    start: int
    size: int
    call: int
    target: bool


@dataclass(frozen=True)
class ShownPath:
    """One kept path and the nodes that are its targets."""

    leaf: int
    role: str
    targets: tuple[int, ...]
    target_tokens: int


@dataclass(frozen=True)
class Shown:
    """Everything about one attempt; `record` has reason, assessment and the calls themselves."""

    record: ExecutionRecord
    calls: list[ShownCall]
    nodes: list[ShownNode]
    paths: list[ShownPath]


def stats(run_dir: Path) -> Stats:
    """Totals, one shard in memory at a time."""
    lines = read_manifest(RunLayout(run_dir))
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    roles: Counter[str] = Counter()
    callers: Counter[str] = Counter()
    forks: Counter[str] = Counter()
    rewards: list[float] = []
    for shard in open_shards(run_dir):
        whole = shard.whole()
        live = ~flat(whole["raw/executions"], "superseded").astype(bool)
        counts["superseded"] += int((~live).sum())
        reasons += Counter(itertools.compress(_enum_texts(whole, "raw/executions", "reason"), live))
        forks.update(_forks(whole["raw/calls"]))
        roles += Counter(_enum_texts(whole, "derived/paths", "role"))
        callers += Counter(_enum_texts(whole, "raw/calls", "role"))
        counted = live & (flat(whole["raw/executions"], "incomplete") == 0)
        scores = flat(whole["raw/executions"], "score")[counted]
        rewards += scores[~np.isnan(scores)].tolist()
        counts += _sums(whole)
    return Stats(
        shards=len(lines),
        bytes=sum(line.bytes for line in lines),
        executions=reasons.total(),
        superseded=counts["superseded"],
        by_reason=dict(reasons),
        rewards=len(rewards),
        reward_mean=float(np.mean(rewards)) if rewards else None,
        calls=counts["calls"],
        forks_by_reason=dict(forks),
        call_tokens=counts["call_tokens"],
        unique_tokens=counts["unique_tokens"],
        sampled_tokens=counts["sampled_tokens"],
        target_tokens=counts["target_tokens"],
        calls_by_role=dict(callers),
        paths=roles.total(),
        paths_by_role=dict(roles),
    )


def show(run_dir: Path, execution: int, attempt: int | None = None) -> Shown:
    """One execution; by default the attempt that counts. Raises MissingInput if it is not at rest."""
    tables = find_tables(run_dir, ExecutionId(execution), attempt)
    if tables is None:
        raise MissingInput(
            f"{run_dir}: execution {execution} is in no shard",
            fix="list what is there with gyre shards stats; a running execution is sealed after it closes",
        )
    nodes = _nodes(tables["derived/nodes"])
    return Shown(decode(tables), _calls(tables["raw/calls"]), nodes, _paths(tables["derived/paths"], nodes))


def _sums(tables: Tables) -> Counter[str]:
    calls, derived = tables["raw/calls"], tables["derived/executions"]
    sampled = len(ragged(calls, "versions").values)
    return Counter(
        calls=len(calls["ordinal"]),
        call_tokens=int(flat(calls, "prompt_tokens").sum(dtype=np.int64)) + sampled,
        unique_tokens=int(flat(derived, "unique_tokens").sum()),
        sampled_tokens=sampled,
        target_tokens=int(flat(derived, "target_tokens").sum()),
    )


def _forks(calls: Table) -> Iterator[str]:
    """The reasons of all calls, without looking at calls where the column is empty throughout."""
    if "forks" in calls and len(ragged(calls, "forks").values):
        for at in range(len(calls["ordinal"])):
            yield from forks_of(calls, at)


def _enum_texts(tables: Tables, table: str, column: str) -> list[str]:
    kind = ENUMS[f"{table}/{column}"]
    return [str(value_of(kind, code) or "none") for code in flat(tables[table], column).tolist()]


def _calls(table: Table) -> list[ShownCall]:
    texts = {
        name: _enum_texts({"raw/calls": table}, "raw/calls", name) for name in ("role", "finish", "delivery")
    }
    return [
        ShownCall(
            call=ragged(table, "call").text(at),
            ordinal=int(flat(table, "ordinal")[at]),
            role=texts["role"][at],
            prompt_tokens=int(flat(table, "prompt_tokens")[at]),
            output_tokens=len(ragged(table, "versions").row(at)),
            finish=texts["finish"][at],
            delivery=texts["delivery"][at],
            accepted=bool(flat(table, "accepted")[at]),
            constrained=bool(flat(table, "constrained")[at]),
            versions=tuple(np.unique(ragged(table, "versions").row(at)).tolist()),
            kv_version=kv_version_of(table, at),
            held_s=float(flat(table, "held_s")[at]),
            forks=forks_of(table, at),
        )
        for at in range(len(table["ordinal"]))
    ]


def _nodes(table: Table) -> list[ShownNode]:
    columns = [flat(table, name).tolist() for name in ("parent", "start", "size", "call", "target")]
    return [
        ShownNode(p, start, size, call, bool(t)) for p, start, size, call, t in zip(*columns, strict=True)
    ]


def _paths(table: Table, nodes: list[ShownNode]) -> list[ShownPath]:
    found = []
    for at, leaf in enumerate(flat(table, "leaf").tolist()):
        targets = tuple(ragged(table, "targets").row(at).tolist())
        role = str(value_of(LeafRole, int(flat(table, "role")[at])))
        found.append(ShownPath(leaf, role, targets, sum(nodes[node].size for node in targets)))
    return found
