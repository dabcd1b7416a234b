"""Roles of leaves, from what the dialects said about the calls that end there.

A role belongs to a leaf, never to an inner node: a shared prefix serves every leaf below it. Where several calls end at
one leaf the highest role counts. A call whose dialect could not tell stays UNKNOWN, the lowest class.
"""

from __future__ import annotations

from gyre_hpc.records import LeafRole
from gyre_hpc.trajectories.tree import Tree

ROLES = tuple(LeafRole)
"""Highest priority first (paper section 5.4)."""
RANK = {role: rank for rank, role in enumerate(ROLES)}


def leaf_roles(tree: Tree) -> dict[int, LeafRole]:
    """Role of every leaf, in leaf order."""
    roles = dict.fromkeys(tree.leaves(), LeafRole.UNKNOWN)
    for call, tip in zip(tree.calls, tree.tip.tolist(), strict=True):
        if tip in roles and RANK[call.role_hint] < RANK[roles[tip]]:
            roles[tip] = call.role_hint
    return roles
