"""What supervised training sees: noisy transcripts, and three drills on clean ones with loss on decisions only.

The few tokens that are hard (copy a name, a constant, map a phrase to an operator, choose the next kind of turn) drown in
the easy ones when they share one mean. So each drill has a mean of its own beside the transcripts' mean.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gyre_hpc.executions.patchkit.family import MODULE_NAMES, PHRASES, PatchkitFamily
from gyre_hpc.gateway.rendering import Rendering
from gyre_hpc.training.replay import Row, rows_to_micro_step
from gyre_hpc.trajectories.micro_steps import MicroStep
from gyre_hpc.warmstart.demonstrator import CLEAN, CLUMSY, NOISY, Noise, Transcript, demonstrate

FIRST_SEED = 10_000_000
"""Demonstrated tasks start here, far from the training and held-out tasks of runs."""
OPENING_TOKENS = 2
"""First tokens of a turn that decide what kind of turn it is: call or text, and which command."""
VALUES = frozenset([*PHRASES, *"0123456789"])
NAMES = frozenset(MODULE_NAMES)


@dataclass(frozen=True)
class Examples:
    """Rows for training. `drills` are (operator and constant, sub-agent turns, main turns)."""

    noisy: list[Transcript]
    drills: tuple[list[Transcript], list[Transcript], list[Transcript]]


def transcripts(rendering: Rendering, noise: Noise, executions: int, seed: int) -> list[Transcript]:
    """Context windows of that many demonstrated executions."""
    family, draw = PatchkitFamily(), random.Random(seed)
    first = FIRST_SEED + seed * 100_000
    tasks = (family.task(first + index) for index in range(executions))
    return [window for task in tasks for window in demonstrate(task, rendering, noise, draw)]


def make_examples(rendering: Rendering, executions: int, seed: int) -> Examples:
    """Noisy transcripts of `executions` executions and the drills of as many others."""
    values = [w for w in transcripts(rendering, CLEAN, executions // 4, seed + 1) if w.role == "sub-agent"]
    clumsy = transcripts(rendering, CLUMSY, executions // 2, seed + 2)
    drills = (
        [_only(rendering, w, values=True) for w in values],
        [_only(rendering, w) for w in clumsy if w.role == "sub-agent"],
        [_only(rendering, w) for w in clumsy if w.role == "main"],
    )
    return Examples(transcripts(rendering, NOISY, executions, seed), drills)


def _only(rendering: Rendering, window: Transcript, values: bool = False) -> Transcript:
    """The window with loss on its values, or else on names and openings of turns."""
    mask, position = [], 0
    for token, sampled in zip(window.ids, window.mask, strict=True):
        position = position + 1 if sampled else 0
        text = rendering.text([token])
        wanted = text in VALUES if values else text in NAMES or position <= OPENING_TOKENS
        mask.append(int(bool(sampled) and wanted))
    return Transcript(window.role, window.ids, mask)


class Batches:
    """Endless random batches of `size` windows."""

    def __init__(self, windows: Sequence[Transcript], size: int, draw: random.Random) -> None:
        shuffled = draw.sample(windows, len(windows))
        self._batches = [shuffled[at : at + size] for at in range(0, len(shuffled), size)]
        self._draw = draw

    def next(self) -> MicroStep:
        """One batch as a supervised micro-step whose loss is the mean over its targets."""
        rows = [as_row(window) for window in self._draw.choice(self._batches)]
        return rows_to_micro_step(rows, 1.0 / sum(row.supervised for row in rows))


def as_row(window: Transcript) -> Row:
    """A transcript as the trainer's demonstrations hold it."""
    return Row(np.array(window.ids, np.int32), np.array(window.mask, np.uint8))
