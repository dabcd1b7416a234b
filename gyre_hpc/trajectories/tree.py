"""The trajectory tree of one execution: nodes cut from strands at forks and call boundaries.

Invariants: a parent stands before its children; a node is never empty; a node is either context or sampled by one call;
every call ends at the end of a node, and so does every prompt. A node is a *target* iff its call was accepted and
unconstrained; of a partly delivered call only what a later prompt echoed is one (its targets end where delivery ended).
Text that an execution sampled and later shows under another parent is context there.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from gyre_hpc.records import CallRecord, Delivery, Float32, Int32, Int64
from gyre_hpc.trajectories.strands import ROOT, Strands

Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Tree:
    """Shapes: node arrays [n], `offsets` [n+1] into `tokens` [U], call arrays [c]."""

    parent: Int32
    """-1 for roots."""
    offsets: Int64
    tokens: Int32
    start: Int32
    """Path position of the node's first token."""
    call: Int32
    """Index into `calls` of the call that sampled the node, -1 for context."""
    target: Bool
    tip: Int32
    """Node at whose end each call ends, -1 for a call without tokens."""
    calls: tuple[CallRecord, ...]
    """The calls without their ids; `prompt_tokens` says where each output begins."""
    prompt_tokens: Int32

    @property
    def nodes(self) -> int:
        return len(self.parent)

    @cached_property
    def sizes(self) -> Int64:
        return np.diff(self.offsets)

    def ids(self, node: int) -> Int32:
        return self.tokens[self.offsets[node] : self.offsets[node + 1]]

    def leaves(self) -> list[int]:
        """Nodes without children, in order."""
        inner = np.zeros(self.nodes, bool)
        inner[self.parent[self.parent >= 0]] = True
        return np.flatnonzero(~inner).tolist()

    def path(self, node: int) -> list[int]:
        """Nodes from the root to `node`."""
        nodes: list[int] = []
        while node >= 0:
            nodes.append(node)
            node = int(self.parent[node])
        return nodes[::-1]

    def recorded(self, node: int) -> tuple[Float32, Int32]:
        """Log-probabilities and versions of a sampled node, [size] each."""
        call = int(self.call[node])
        begin = int(self.start[node] - self.prompt_tokens[call])
        span = slice(begin, begin + int(self.offsets[node + 1] - self.offsets[node]))
        return self.calls[call].logprobs[span], self.calls[call].versions[span]


def build_tree(strands: Strands) -> Tree:
    """Cut the strands of one attempt (laid down in canonical order) into nodes."""
    strands = strands.canonical()
    cutter = _Cutter(strands)
    stack = [ROOT]
    while stack:
        index = stack.pop()
        cutter.cut(index)
        branches = strands.strands[index].branches
        stack += [
            branch for position in sorted(branches, reverse=True) for branch in branches[position][::-1]
        ]
    return cutter.tree()


class _Cutter:
    """Collects nodes strand by strand, a strand after the one it leaves."""

    def __init__(self, strands: Strands) -> None:
        self.strands = strands
        self.parent: list[int] = []
        self.start: list[int] = []
        self.call: list[int] = []
        self.pieces: list[Int32] = []
        self.echoed: list[bool] = []
        self.node_at: dict[tuple[int, int], int] = {(ROOT, 0): -1}

    def cut(self, index: int) -> None:
        strand = self.strands.strands[index]
        parent = self.node_at[(strand.parent, strand.fork)] if strand.parent >= 0 else -1
        samplers = {start: (end, call) for start, end, call in strand.sampled}
        cuts = {strand.fork, strand.end, *strand.branches, *strand.prompt_ends, *samplers}
        cuts |= {end for end, _ in samplers.values()}
        positions = sorted(cuts)
        sampled_until, sampler = -1, -1
        for start, end in itertools.pairwise(positions):
            sampled_until, sampler = samplers.get(start, (sampled_until, sampler))
            self.start.append(start)
            self.parent.append(parent)
            self.call.append(sampler if start < sampled_until else -1)
            self.pieces.append(strand.ids(start, end))
            self.echoed.append(end in strand.prompt_ends)
            parent = self.node_at[(index, end)] = len(self.start) - 1

    def tree(self) -> Tree:
        calls = self.strands.calls
        self._spread_echo()
        sizes = [len(piece) for piece in self.pieces]
        return Tree(
            parent=np.array(self.parent, np.int32),
            offsets=np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64),
            tokens=np.concatenate(self.pieces) if self.pieces else np.zeros(0, np.int32),
            start=np.array(self.start, np.int32),
            call=np.array(self.call, np.int32),
            target=np.array([self._is_target(node) for node in range(len(self.call))], bool),
            tip=np.array([self.node_at[(laid.strand, laid.end)] for laid in calls], np.int32),
            calls=tuple(laid.record for laid in calls),
            prompt_tokens=np.array([laid.prompt_tokens for laid in calls], np.int32),
        )

    def _spread_echo(self) -> None:
        for node in range(len(self.parent) - 1, -1, -1):
            if self.echoed[node] and self.parent[node] >= 0:
                self.echoed[self.parent[node]] = True

    def _is_target(self, node: int) -> bool:
        if self.call[node] < 0:
            return False
        record = self.strands.calls[self.call[node]].record
        delivered = record.delivery is not Delivery.PARTIAL or self.echoed[node]
        return record.accepted and not record.constrained and delivered
