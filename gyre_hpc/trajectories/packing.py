"""Kept paths of one group -> micro-steps.

Invariants: a piece (a path, or one part of a path that had to be cut) lies with its context in one micro-step of at most
`tokens` tokens; paths of one execution in one micro-step share their common prefix; weights are 1/n_tok(execution)
however the pieces are laid out. Bundles (pieces of one execution kept together) go to micro-steps largest first into
the emptiest one, so micro-steps of a group are alike in size.

A path longer than `tokens` is cut behind a call; each part is a path of its own (its own targets in the sequence ratio),
and a later part sees as many whole calls before it as fit. This changes the objective and is counted (`paths_cut`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gyre_hpc.errors import ConfigError
from gyre_hpc.records import ExecutionId, GroupId, Int32
from gyre_hpc.trajectories.micro_steps import MicroStep, NodeTargets, build
from gyre_hpc.trajectories.selection import KeptPath, target_tokens
from gyre_hpc.trajectories.tree import Tree


@dataclass(frozen=True)
class Member:
    """One execution of the group with kept paths."""

    execution: ExecutionId
    tree: Tree
    paths: list[KeptPath]
    advantage: float


@dataclass(frozen=True)
class Packing:
    """How to pack. `rows` lays every path down on its own (for layers that cannot follow a tree)."""

    tokens: int
    min_micro_steps: int
    rows: bool = False


@dataclass(frozen=True)
class Piece:
    """A stretch of a path: nodes in order, the first `skip` tokens of the first one left out."""

    nodes: tuple[int, ...]
    targets: tuple[int, ...]
    skip: int = 0

    def tokens(self, tree: Tree) -> int:
        return int(tree.sizes[list(self.nodes)].sum()) - self.skip


@dataclass(frozen=True)
class Bundle:
    """Pieces of one execution that share a micro-step."""

    member: Member
    pieces: tuple[Piece, ...]
    rows: bool

    def shares(self, piece: Piece) -> bool:
        """Whether the piece starts at a root and may be merged with others."""
        return not self.rows and piece.skip == 0 and self.member.tree.parent[piece.nodes[0]] < 0

    @property
    def tokens(self) -> int:
        tree = self.member.tree
        shared = sorted({node for piece in self.pieces if self.shares(piece) for node in piece.nodes})
        alone = sum(piece.tokens(tree) for piece in self.pieces if not self.shares(piece))
        return int(tree.sizes[shared].sum()) + alone


def pack(group: GroupId, members: Sequence[Member], packing: Packing) -> tuple[list[MicroStep], int]:
    """Micro-steps of the group and the number of paths that had to be cut."""
    bundles: list[Bundle] = []
    cut = 0
    for member in members:
        pieces = [
            cut_path(member.tree, path, packing.tokens)
            for path in sorted(member.paths, key=lambda p: p.nodes)
        ]
        cut += sum(len(parts) > 1 for parts in pieces)
        bundles += _bundles(member, list(itertools.chain(*pieces)), packing)
    bundles = _split_to(bundles, packing.min_micro_steps)
    bins = _distribute(bundles, packing)
    return [_micro_step(f"{group}.{index}", group, content) for index, content in enumerate(bins)], cut


def cut_path(tree: Tree, path: KeptPath, limit: int) -> list[Piece]:
    """The path as one piece, or as pieces of at most `limit` tokens cut behind calls, each target in one of them."""
    starts = tree.start[list(path.nodes)].tolist()
    ends = (tree.start + tree.sizes)[list(path.nodes)].tolist()
    samplers = [*tree.call[list(path.nodes)].tolist(), -1]
    calls = [at for at in range(len(starts)) if samplers[at] >= 0 and samplers[at] != samplers[at + 1]]
    aims = set(path.targets)
    waiting = [at for at, node in enumerate(path.nodes) if node in aims]
    pieces: list[Piece] = []
    while waiting:
        closing = [at for at in calls if at >= waiting[0]]
        need = starts[waiting[0]] - 1
        first = 0 if not pieces and ends[closing[0]] <= limit else need
        fitting = [at for at in closing if ends[at] - first <= limit]
        if not fitting:
            raise ConfigError(
                f"trainer.tokens_per_micro_step={limit}: one answer needs {ends[closing[0]] - need} tokens",
                fix=f"set trainer.tokens_per_micro_step={ends[closing[0]] - need} or more",
            )
        last = fitting[-1]
        here = [at for at in waiting if at <= last]
        waiting = waiting[len(here) :]
        begin = _context_start(ends[last] - limit, starts[here[0]] - 1, [ends[at] for at in calls])
        pieces.append(_piece(path.nodes, starts, begin, here))
    return pieces


def _context_start(earliest: int, latest: int, boundaries: list[int]) -> int:
    """Where a piece begins: at the root if that fits, else behind the first call that lets it fit, else mid-way."""
    if earliest <= 0:
        return 0
    return next((end for end in boundaries if earliest <= end <= latest), earliest)


def _piece(nodes: tuple[int, ...], starts: list[int], begin: int, targets: list[int]) -> Piece:
    first = max(at for at, start in enumerate(starts) if start <= begin)
    kept = nodes[first : targets[-1] + 1]
    return Piece(kept, tuple(nodes[at] for at in targets), begin - starts[first])


def _bundles(member: Member, pieces: list[Piece], packing: Packing) -> list[Bundle]:
    """Neighbouring pieces together as long as they fit one micro-step."""
    bundles: list[Bundle] = []
    for piece in pieces:
        alone = Bundle(member, (piece,), packing.rows)
        if bundles:
            joined = Bundle(member, (*bundles[-1].pieces, piece), packing.rows)
            if joined.tokens <= packing.tokens:
                bundles[-1] = joined
                continue
        bundles.append(alone)
    return bundles


def _split_to(bundles: list[Bundle], count: int) -> list[Bundle]:
    """Split the largest bundles until there are `count`, or each holds one piece."""
    bundles = list(bundles)
    while len(bundles) < count:
        divisible = [at for at, bundle in enumerate(bundles) if len(bundle.pieces) > 1]
        if not divisible:
            break
        at = max(divisible, key=lambda index: bundles[index].tokens)
        bundles[at : at + 1] = _halves(bundles[at])
    return bundles


def _halves(bundle: Bundle) -> list[Bundle]:
    """The cut between pieces that leaves the smaller larger half."""
    options = [
        [Bundle(bundle.member, part, bundle.rows) for part in (bundle.pieces[:cut], bundle.pieces[cut:])]
        for cut in range(1, len(bundle.pieces))
    ]
    return min(options, key=lambda halves: max(half.tokens for half in halves))


def _distribute(bundles: list[Bundle], packing: Packing) -> list[list[Bundle]]:
    """Largest first into the emptiest micro-step with room; a new one where none has room."""
    sizes = [bundle.tokens for bundle in bundles]
    count = max(min(packing.min_micro_steps, len(bundles)), -(-sum(sizes) // packing.tokens))
    loads = [0] * count
    content: list[list[int]] = [[] for _ in range(count)]
    for at in sorted(range(len(bundles)), key=lambda at: -sizes[at]):
        place = min(range(len(loads)), key=lambda index: loads[index])
        if loads[place] + sizes[at] > packing.tokens:
            place = len(loads)
            loads.append(0)
            content.append([])
        loads[place] += sizes[at]
        content[place].append(at)
    return [[bundles[at] for at in sorted(places)] for places in content if places]


class _Forest:
    """Nodes and targets of one micro-step under construction."""

    def __init__(self) -> None:
        self.parents: list[int] = []
        self.tokens: list[Int32] = []
        self.first_pos: dict[int, int] = {}
        self.targets: list[NodeTargets] = []
        self.path_execution: list[int] = []

    def add(self, bundle: Bundle) -> None:
        tree = bundle.member.tree
        shared = [piece for piece in bundle.pieces if bundle.shares(piece)]
        places = self._lay({node for piece in shared for node in piece.nodes}, tree)
        for piece in bundle.pieces:
            self._aim(bundle.member, piece, places if bundle.shares(piece) else self._lay_alone(piece, tree))

    def _lay(self, used: set[int], tree: Tree) -> dict[int, tuple[int, int]]:
        """Lay tree nodes down, chains merged into one node; returns (node, offset) of each."""
        children = Counter(int(tree.parent[node]) for node in used)
        places: dict[int, tuple[int, int]] = {}
        chains: dict[int, list[int]] = {}
        for node in sorted(used):
            parent = int(tree.parent[node])
            if parent >= 0 and children[parent] == 1:
                above = chains[places[parent][0]]
                places[node] = (places[parent][0], int(tree.start[node] - tree.start[above[0]]))
                above.append(node)
            else:
                places[node] = (len(self.parents), 0)
                chains[len(self.parents)] = [node]
                self.parents.append(places[parent][0] if parent >= 0 else -1)
        self.tokens += [np.concatenate([tree.ids(node) for node in chain]) for chain in chains.values()]
        return places

    def _lay_alone(self, piece: Piece, tree: Tree) -> dict[int, tuple[int, int]]:
        """A root of its own that holds the piece."""
        root = len(self.parents)
        begin = int(tree.start[piece.nodes[0]]) + piece.skip
        self.parents.append(-1)
        self.tokens.append(np.concatenate([tree.ids(node) for node in piece.nodes])[piece.skip :])
        self.first_pos[root] = begin
        return {node: (root, int(tree.start[node]) - begin) for node in piece.nodes}

    def _aim(self, member: Member, piece: Piece, places: dict[int, tuple[int, int]]) -> None:
        """Append the piece's targets as the next path."""
        tree = member.tree
        weight = 1.0 / target_tokens(tree, member.paths)
        for node in piece.targets:
            logprobs, versions = tree.recorded(node)
            size = len(logprobs)
            self.targets.append(
                NodeTargets(
                    node=np.full(size, places[node][0], np.int32),
                    index=places[node][1] + np.arange(size, dtype=np.int32),
                    path=np.full(size, len(self.path_execution), np.int32),
                    weight=np.full(size, weight, np.float32),
                    advantage=np.full(size, member.advantage, np.float32),
                    behaviour_logprob=logprobs,
                    version=versions,
                )
            )
        self.path_execution.append(member.execution)


def _micro_step(id: str, group: GroupId, bundles: list[Bundle]) -> MicroStep:
    forest = _Forest()
    for bundle in bundles:
        forest.add(bundle)
    names = NodeTargets.__dataclass_fields__
    joined = {name: np.concatenate([getattr(part, name) for part in forest.targets]) for name in names}
    execution = np.array(forest.path_execution, np.int32)
    return build(id, group, forest.parents, forest.tokens, NodeTargets(**joined), execution, forest.first_pos)
