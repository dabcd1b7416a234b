"""Which paths of an execution are trained, and which of its sampled tokens each of them carries.

In the highest role that has untrained sampled tokens draw a leaf with probability proportional to them, keep its
root-to-leaf path, mask it, repeat up to `j_max` times (paper section 5.4). Hence a sampled token is a target of the
first kept path drawn through it and context in the later ones. The draw depends on (run seed, execution) and the tree
alone, so whoever repeats it gets the same paths.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gyre_hpc.records import ExecutionId, Int64, LeafRole
from gyre_hpc.trajectories.roles import ROLES, leaf_roles
from gyre_hpc.trajectories.tree import Tree


@dataclass(frozen=True)
class KeptPath:
    """Nodes from the root to the last target (what follows is never computed); `targets` are nodes of it, in order."""

    leaf: int
    role: LeafRole
    nodes: tuple[int, ...]
    targets: tuple[int, ...]


def select(tree: Tree, execution: ExecutionId, run_seed: int, j_max: int) -> list[KeptPath]:
    """Kept paths in the order drawn."""
    roles = leaf_roles(tree)
    by_role = {role: [leaf for leaf, own in roles.items() if own is role] for role in ROLES}
    random = np.random.default_rng((run_seed, execution))
    untrained = np.where(tree.target, tree.sizes, 0)
    kept: list[KeptPath] = []
    while len(kept) < j_max:
        on_path = _tokens_on_path(tree, untrained)
        role = next((role for role in ROLES if any(on_path[leaf] for leaf in by_role[role])), None)
        if role is None:
            break
        steps = np.cumsum(on_path[by_role[role]])
        leaf = by_role[role][int(np.searchsorted(steps, random.integers(steps[-1]), side="right"))]
        path = tree.path(leaf)
        targets = [node for node in path if untrained[node]]
        untrained[path] = 0
        kept.append(KeptPath(leaf, role, tuple(path[: path.index(targets[-1]) + 1]), tuple(targets)))
    return kept


def target_tokens(tree: Tree, paths: list[KeptPath]) -> int:
    """n_tok(e): targets over all kept paths."""
    sizes = tree.sizes
    return int(sum(sizes[node] for path in paths for node in path.targets))


def _tokens_on_path(tree: Tree, tokens: Int64) -> Int64:
    """Per node, the sum of `tokens` from the root to it."""
    total = tokens.tolist()
    for node, parent in enumerate(tree.parent.tolist()):
        if parent >= 0:
            total[node] += total[parent]
    return np.array(total, np.int64)
