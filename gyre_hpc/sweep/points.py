"""The points of a sweep: which words Hydra swept over, what makes two points the same, how a run is named (pure)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hydra.core.override_parser.overrides_parser import OverridesParser

from gyre_hpc.launch.job.profiles import OF_THE_JOB

NAME_LENGTH: Final = 100
"""A folder's name may have 255 bytes, and a time stamp follows."""


@dataclass(frozen=True)
class Point:
    """One combination of overrides: all its words, and those of them that were swept over."""

    overrides: tuple[str, ...]
    swept: tuple[str, ...]

    @property
    def label(self) -> str:
        """The swept words as a person reads them."""
        return " ".join(self.swept or self.overrides) or "(no overrides)"

    @property
    def identity(self) -> frozenset[str]:
        """Equal for the same point in a later call of the same sweep, whatever job is asked for."""
        return frozenset(
            word
            for word in self.overrides
            if word in self.swept or not word.lstrip("+").startswith(OF_THE_JOB)
        )


def points_of(combinations: Sequence[Sequence[str]], given: Sequence[str]) -> list[Point]:
    """Hydra's combinations as points; `given` are the words of the command line: one that is not there was swept.

    Hydra writes a word of a combination in its own way (cluster.job.time=12\\:00), so those given are brought to it.
    """
    parsed = OverridesParser.create().parse_overrides(list(given))
    fixed = [word for word in parsed if not word.is_sweep_override()]
    kept = {f"{word.get_key_element()}={word.get_value_element_as_str()}" for word in fixed}
    return [Point(tuple(words), tuple(word for word in words if word not in kept)) for words in combinations]


def run_name(name: str, point: Point) -> str:
    """Name of the point's run: quickstart-schedule_gyre-j_max_5. Safe in paths, in Slurm and in Hydra's grammar."""
    pairs = [word.lstrip("+~").partition("=") for word in point.swept]
    parts = [f"{_clean(key.rpartition('.')[2])}_{_clean(value)}" for key, _, value in pairs]
    return "-".join([_clean(name), *parts])[:NAME_LENGTH]


def _clean(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "_", text).strip("_") or "_"
