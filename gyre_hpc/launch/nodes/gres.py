"""Slurm's generic resources as text ("gpu:a100:4,nvme") and as counts."""

from __future__ import annotations

import re


def gres_counts(gres: str) -> dict[str, int]:
    """ "gpu:a100:4,nvme" as {"gpu:a100": 4, "nvme": 1}; a leading "gres:" (squeue's) and an index list are dropped."""
    counts: dict[str, int] = {}
    for word in re.sub(r"\([^)]*\)", "", gres).split(","):
        word = word.strip().removeprefix("gres:").removeprefix("gres/")
        name, _, count = word.rpartition(":")
        if word and (not name or not count.isdigit()):
            name, count = word, "1"
        if word:
            counts[name] = counts.get(name, 0) + int(count)
    return counts


def times(gres: str, factor: int) -> str:
    """`gres` with every count multiplied."""
    return ",".join(f"{name}:{count * factor}" for name, count in gres_counts(gres).items())


def held(gres: str, name: str) -> int:
    """How many `name` (a kind, or kind:type) of `gres`; a kind has all its types."""
    return sum(
        count for held, count in gres_counts(gres).items() if held == name or held.startswith(f"{name}:")
    )
