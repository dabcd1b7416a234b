"""The unit of training work: a prefix forest of tokens and the list of targets predicted inside it.

Invariants (asserted by `validate`, relied on by training):
- tokens lie node by node in depth-first order, a parent before its children; `tin`, `tout` are the Euler interval of a
  token's node and `pos` its depth, so query token j sees key token k iff tin[k] <= tin[j] < tout[k] and pos[k] <= pos[j];
- `row` is the token whose hidden state predicts the target: its predecessor on the path, so the last token of a node
  predicts the first token of each of its children and one row can carry several targets;
- every path has at least one target and all its targets lie in this micro-step; a path belongs to one execution.

`trajectories.packing` makes micro-steps, the processor publishes their arrays, `training` consumes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gyre_hpc.errors import CorruptRecord
from gyre_hpc.records import Float32, Int32

TOKEN_FIELDS = ("ids", "tin", "tout", "pos")
TARGET_FIELDS = ("row", "target", "path", "weight", "advantage", "behaviour_logprob", "version")
_DTYPES: dict[str, type[np.generic]] = {
    "ids": np.int32,
    "tin": np.int32,
    "tout": np.int32,
    "pos": np.int32,
    "row": np.int32,
    "target": np.int32,
    "path": np.int32,
    "weight": np.float32,
    "advantage": np.float32,
    "behaviour_logprob": np.float32,
    "version": np.int32,
    "path_execution": np.int32,
}


@dataclass(frozen=True)
class Segment:
    """Tokens [start, end) of one node and the spans of its ancestors, root first, adjacent spans merged."""

    start: int
    end: int
    ancestors: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class NodeTargets:
    """Targets named by place: token `index` of node `node`, in the order they get in the micro-step. All shapes [M]."""

    node: Int32
    index: Int32
    path: Int32
    weight: Float32
    advantage: Float32
    behaviour_logprob: Float32
    version: Int32


@dataclass(frozen=True)
class MicroStep:
    """Shapes: token arrays [S], target arrays [M], `path_execution` [P]."""

    id: str
    """ "<group>.<index>"."""
    group: int
    ids: Int32
    tin: Int32
    tout: Int32
    pos: Int32
    row: Int32
    target: Int32
    path: Int32
    weight: Float32
    """1/n_tok(execution): each execution weighs 1 over all its kept targets."""
    advantage: Float32
    behaviour_logprob: Float32
    """Recorded log-probability; NaN marks a supervised target (loss -weight * logpi, no ratio)."""
    version: Int32
    """Weight version that sampled the target."""
    path_execution: Int32

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def targets(self) -> int:
        return len(self.row)

    @property
    def paths(self) -> int:
        return len(self.path_execution)

    def to_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays by field name, as published in a region."""
        return {name: getattr(self, name) for name in _DTYPES}

    @classmethod
    def from_arrays(cls, id: str, group: int, arrays: Mapping[str, npt.NDArray[Any]]) -> MicroStep:
        """The inverse of `to_arrays`. Raises CorruptRecord naming the micro-step and the field at fault."""
        missing = sorted(set(_DTYPES) - set(arrays))
        if missing:
            raise CorruptRecord(f"micro-step {id}: no array {missing[0]}", fix="pull the region again")
        step = cls(id=id, group=group, **{name: arrays[name] for name in _DTYPES})
        step.validate()
        return step

    def validate(self) -> None:
        """Raises CorruptRecord naming the first invariant that does not hold."""
        for problem in (self._shape_problem, self._forest_problem, self._target_problem):
            text = problem()
            if text:
                raise CorruptRecord(
                    f"micro-step {self.id}: {text}", fix="pull the region again, or rebuild it from the calls"
                )

    def _shape_problem(self) -> str:
        for name, dtype in _DTYPES.items():
            array = getattr(self, name)
            if array.dtype != dtype or array.ndim != 1:
                return f"{name} is {array.dtype}[{array.ndim}d], not {np.dtype(dtype)}[1d]"
        for names in (TOKEN_FIELDS, TARGET_FIELDS):
            sizes = {name: len(getattr(self, name)) for name in names}
            if len(set(sizes.values())) != 1:
                return f"sizes differ: {sizes}"
        return "" if self.tokens else "no tokens"

    def _forest_problem(self) -> str:
        starts = self.node_starts()
        tin, tout = self.tin[starts], self.tout[starts]
        if not np.array_equal(tin, np.arange(len(starts))):
            return "nodes are not in depth-first order"
        ends = np.append(starts[1:], self.tokens)
        if not np.array_equal(np.repeat(tout, ends - starts), self.tout):
            return "tout differs inside a node"
        if np.any(tout <= tin) or np.any(tout > len(starts)):
            return "an Euler interval is empty or leaves the forest"
        inner = np.ones(self.tokens, bool)
        inner[starts] = False
        if np.any(np.diff(self.pos)[inner[1:]] != 1):
            return "positions do not run on inside a node"
        for node, parent in enumerate(parents_of(tout)):
            if parent >= 0 and tout[node] > tout[parent]:
                return f"node {node} overlaps node {parent}"
            if parent >= 0 and self.pos[starts[node]] != self.pos[ends[parent] - 1] + 1:
                return f"node {node} does not start where its parent {parent} ends"
        return "" if np.all(self.pos >= 0) else "a position is negative"

    def _target_problem(self) -> str:
        ranges = (("row", self.row, self.tokens), ("path", self.path, self.paths))
        for name, array, limit in ranges:
            if np.any(array < 0) or np.any(array >= limit):
                return f"{name} leaves [0, {limit})"
        if not np.array_equal(np.unique(self.path), np.arange(self.paths)):
            return "a path has no target"
        if not (np.all(np.isfinite(self.weight)) and np.all(self.weight > 0)):
            return "a weight is not positive"
        if not np.all(np.isfinite(self.advantage)):
            return "an advantage is not finite"
        return "a recorded log-probability is above 0" if np.any(self.behaviour_logprob > 0) else ""

    def node_starts(self) -> npt.NDArray[np.int64]:
        """First token of every node, [nodes]."""
        return np.flatnonzero(np.diff(self.tin, prepend=-1))

    def segments(self) -> list[Segment]:
        """One per node, in token order, for attention by node: a node attends to its ancestors and causally to itself."""
        starts = self.node_starts()
        ends = np.append(starts[1:], self.tokens)
        found: list[Segment] = []
        for node, parent in enumerate(parents_of(self.tout[starts])):
            above = _join(found[parent]) if parent >= 0 else ()
            found.append(Segment(int(starts[node]), int(ends[node]), above))
        return found


def parents_of(tout: npt.NDArray[np.integer[Any]]) -> list[int]:
    """Parent of every node (-1 for roots) from the interval ends of nodes in depth-first order."""
    parents: list[int] = []
    open_nodes: list[int] = []
    for node in range(len(tout)):
        while open_nodes and tout[open_nodes[-1]] <= node:
            open_nodes.pop()
        parents.append(open_nodes[-1] if open_nodes else -1)
        open_nodes.append(node)
    return parents


def _join(parent: Segment) -> tuple[tuple[int, int], ...]:
    """Ancestor spans of a child of `parent`."""
    if parent.ancestors and parent.ancestors[-1][1] == parent.start:
        return (*parent.ancestors[:-1], (parent.ancestors[-1][0], parent.end))
    return (*parent.ancestors, (parent.start, parent.end))


def build(
    id: str,
    group: int,
    parents: Sequence[int],
    tokens: Sequence[Int32],
    targets: NodeTargets,
    path_execution: Int32,
    first_pos: Mapping[int, int] | None = None,
) -> MicroStep:
    """Lay out nodes (a parent before its children, -1 for roots; no empty node) and place the targets.

    `first_pos` gives the position of a root that does not start at 0 (a path that was cut). Raises ValueError for a
    target that is the first token of a root, since nothing predicts it.
    """
    order, last = _depth_first(parents)
    sizes = np.array([len(tokens[node]) for node in order], np.int64)
    begins = np.zeros(len(parents), np.int64)
    begins[order] = np.cumsum(sizes) - sizes
    depth = np.zeros(len(parents), np.int64)
    rank = np.empty(len(parents), np.int64)
    rank[order] = np.arange(len(order))
    last_row = np.full(len(parents), -1, np.int64)
    for node, parent in enumerate(parents):
        depth[node] = depth[parent] + len(tokens[parent]) if parent >= 0 else (first_pos or {}).get(node, 0)
        last_row[node] = begins[parent] + len(tokens[parent]) - 1 if parent >= 0 else -1
    places = begins[targets.node] + targets.index
    rows = np.where(targets.index > 0, places - 1, last_row[targets.node])
    if np.any(rows < 0):
        raise ValueError(f"micro-step {id}: the first token of a root is a target")
    ids = np.concatenate([tokens[node] for node in order]).astype(np.int32, copy=False)
    within = np.arange(len(ids)) - np.repeat(begins[order], sizes)
    return MicroStep(
        id=id,
        group=group,
        ids=ids,
        tin=np.repeat(rank[order], sizes).astype(np.int32),
        tout=np.repeat(np.array([last[node] for node in order]), sizes).astype(np.int32),
        pos=(np.repeat(depth[order], sizes) + within).astype(np.int32),
        row=rows.astype(np.int32),
        target=ids[places],
        path=targets.path,
        weight=targets.weight,
        advantage=targets.advantage,
        behaviour_logprob=targets.behaviour_logprob,
        version=targets.version,
        path_execution=path_execution,
    )


def _depth_first(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """Nodes in depth-first order, and per node the rank just after its subtree."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        if parent >= node:
            raise ValueError(f"node {node} stands before its parent {parent}")
        children.setdefault(parent, []).append(node)
    order: list[int] = []
    stack = children.get(-1, [])[::-1]
    while stack:
        node = stack.pop()
        order.append(node)
        stack += children.get(node, [])[::-1]
    size = [1] * len(parents)
    for node in range(len(parents) - 1, -1, -1):
        if parents[node] >= 0:
            size[parents[node]] += size[node]
    last = [0] * len(parents)
    for rank, node in enumerate(order):
        last[node] = rank + size[node]
    return order, last
