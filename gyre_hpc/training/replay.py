"""Warm-start demonstrations: the file beside a model, and supervised micro-steps made from its rows.

`demonstrations.safetensors` is CSR: `ids` Int32 [T], `offsets` Int64 [rows + 1], `mask` uint8 [T] with 1 on supervised
tokens. A supervised micro-step is a forest of independent rows whose targets carry NaN as recorded log-probability.
The warm start trains on such micro-steps; the trainer mixes a few rows into each RL step against forgetting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from gyre_hpc.errors import CorruptRecord, MissingInput
from gyre_hpc.records import Int32, Int64
from gyre_hpc.trajectories import micro_steps
from gyre_hpc.trajectories.micro_steps import MicroStep

FILE_NAME = "demonstrations.safetensors"
UInt8 = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Row:
    """One demonstration. Shapes [n]; `mask` is 1 where the token is to be imitated. Token 0 is never a target."""

    ids: Int32
    mask: UInt8

    @property
    def supervised(self) -> int:
        """Number of targets."""
        return int(np.count_nonzero(self.mask[1:]))


@dataclass(frozen=True)
class Demonstrations:
    """All rows of a file, in order."""

    ids: Int32
    offsets: Int64
    mask: UInt8

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, index: int) -> Row:
        part = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return Row(self.ids[part], self.mask[part])

    @staticmethod
    def of(rows: Sequence[Row]) -> Demonstrations:
        """Concatenate rows."""
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row.ids) for row in rows], out=offsets[1:])
        empty = np.zeros(0)
        ids = np.concatenate([empty, *(row.ids for row in rows)]).astype(np.int32)
        return Demonstrations(
            ids, offsets, np.concatenate([empty, *(row.mask for row in rows)]).astype(np.uint8)
        )

    @staticmethod
    def read(path: Path) -> Demonstrations:
        """Raises MissingInput or CorruptRecord naming the file."""
        if not path.is_file():
            raise MissingInput(
                f"{path}: no such file", fix="make it with gyre warmstart, or set objective.replay_weight=0"
            )
        try:
            arrays = load_file(path)
        except SafetensorError as error:
            raise CorruptRecord(f"{path}: {error}", fix="make it again") from error
        if set(arrays) != {"ids", "offsets", "mask"}:
            raise CorruptRecord(
                f"{path}: arrays {sorted(arrays)}, not ids, mask, offsets", fix="make it again"
            )
        found = Demonstrations(arrays["ids"], arrays["offsets"], arrays["mask"])
        whole = len(found.offsets) and found.offsets[0] == 0 and found.offsets[-1] == len(found.ids)
        if not whole or len(found.ids) != len(found.mask) or np.any(np.diff(found.offsets) <= 0):
            raise CorruptRecord(f"{path}: offsets do not partition the ids", fix="make it again")
        return found

    def write(self, path: Path) -> None:
        """Write the file."""
        save_file({"ids": self.ids, "offsets": self.offsets, "mask": self.mask}, path)

    def draw(self, tokens: int, seed: tuple[int, ...]) -> list[Row]:
        """Rows in an order given by `seed` alone, until they hold at least `tokens` tokens or all rows are drawn."""
        order = np.random.default_rng(seed).permutation(len(self))
        before = np.cumsum(np.diff(self.offsets)[order]) - np.diff(self.offsets)[order]
        return [self.row(int(index)) for index in order[before < tokens]]


def rows_to_micro_step(rows: Sequence[Row], weight: float, id: str = "supervised") -> MicroStep:
    """A supervised micro-step: each target weighs `weight` (for a mean, 1 / number of targets). Needs one target."""
    rows = [row for row in rows if row.supervised]
    if not rows:
        raise ValueError(f"micro-step {id}: no row has a supervised token")
    index = [np.flatnonzero(row.mask[1:]) + 1 for row in rows]
    path = np.repeat(np.arange(len(rows)), [len(part) for part in index]).astype(np.int32)
    count = len(path)
    targets = micro_steps.NodeTargets(
        node=path,
        index=np.concatenate(index).astype(np.int32),
        path=path,
        weight=np.full(count, weight, np.float32),
        advantage=np.zeros(count, np.float32),
        behaviour_logprob=np.full(count, np.nan, np.float32),
        version=np.zeros(count, np.int32),
    )
    owners = np.arange(len(rows), dtype=np.int32)
    return micro_steps.build(id, -1, [-1] * len(rows), [row.ids for row in rows], targets, owners)


def supervised_micro_steps(rows: Sequence[Row], weight: float, limit: int) -> Iterator[MicroStep]:
    """Micro-steps of at most `limit` tokens (a longer row stands alone) whose losses sum to weight * mean over targets."""
    targets = sum(row.supervised for row in rows)
    part: list[Row] = []
    for row in (row for row in rows if row.supervised):
        if part and sum(len(other.ids) for other in part) + len(row.ids) > limit:
            yield rows_to_micro_step(part, weight / targets)
            part = []
        part.append(row)
    if part:
        yield rows_to_micro_step(part, weight / targets)
