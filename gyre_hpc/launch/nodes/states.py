"""What sinfo says of nodes."""

from __future__ import annotations

from typing import Final

USABLE: Final = frozenset({"alloc", "comp", "idle", "mix", "plnd", "resv"})
"""Node states, as sinfo's %t has them without a suffix, of nodes that a job gets sooner or later."""


def node_states(lines: str) -> dict[str, dict[str, str]]:
    """sinfo's "%N %t %P" as state by node by partition; "" is the default partition. A node that is silent has no state."""
    states: dict[str, dict[str, str]] = {}
    for line in lines.splitlines():
        node, state, partition = line.split()
        name = partition.removesuffix("*")
        for key in {name, ""} if partition.endswith("*") else {name}:
            states.setdefault(key, {})[node] = "" if state.endswith("*") else state.rstrip("~#!%$@^-+")
    return states
