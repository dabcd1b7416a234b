"""The shard file: flat columns in HDF5, one row per execution, call, strand, node or path.

    raw/executions  raw/strands  raw/calls            what was recorded, prefix-coded but lossless
    derived/executions  derived/nodes  derived/paths  what `encode.derive` makes of raw; rebuilt and compared by verify

A table's columns are arrays of equal length; a ragged column `x` has `x_offsets` [rows+1]. `row_offsets` [executions+1]
says which rows of a table belong to which execution. Texts are UTF-8 bytes in ragged uint8 columns; an enum column holds
positions in the list in its attribute `values`, 255 = none. No variable-length types. The root attribute `complete` is
written last. Advantages are not stored: they follow from the rewards of the group, which may lie in several shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from gyre_hpc.records import ClosingReason, Delivery, FinishReason, Int64, LeafRole

SCHEMA = 1
CHUNK = 32768
"""Elements of a chunk: reading one execution stays cheap and filters still work well."""
SMALL = 4096
"""Columns up to this many elements are stored plain."""
LIBVER = ("v108", "v114")
"""Readable by HDF5 1.10."""
NONE = 255
"""Enum code of an absent value."""
ROWS = "row_offsets"
EXECUTIONS = ("raw/executions", "derived/executions")
TABLES = (
    "raw/executions",
    "raw/strands",
    "raw/calls",
    "derived/executions",
    "derived/nodes",
    "derived/paths",
)
ENUMS: dict[str, type[StrEnum]] = {
    "raw/executions/reason": ClosingReason,
    "raw/calls/finish": FinishReason,
    "raw/calls/delivery": Delivery,
    "raw/calls/role": LeafRole,
    "derived/paths/role": LeafRole,
}

Array = npt.NDArray[Any]
E = TypeVar("E", bound=StrEnum)


@dataclass(frozen=True)
class Ragged:
    """Rows of different length: row i is values[offsets[i]:offsets[i+1]]."""

    values: Array
    offsets: Int64

    @classmethod
    def of(cls, rows: Sequence[Array], dtype: npt.DTypeLike) -> Ragged:
        values = np.concatenate([np.zeros(0, dtype), *rows]).astype(dtype, copy=False)
        return cls(values, offsets_of([len(row) for row in rows]))

    @classmethod
    def texts(cls, rows: Sequence[str]) -> Ragged:
        return cls.of([np.frombuffer(row.encode(), np.uint8) for row in rows], np.uint8)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, index: int) -> Array:
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def text(self, index: int) -> str:
        return self.row(index).tobytes().decode()


Column = Array | Ragged
Table = dict[str, Column]
Tables = dict[str, Table]


def offsets_of(sizes: Sequence[int]) -> Int64:
    """[n+1] offsets of n rows of these sizes."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)


def rows_of(table: Table) -> int:
    return len(next(iter(table.values())))


def joined(tables: Sequence[Table]) -> Table:
    """One table below the other; all have the same columns."""
    return {name: _joined([table[name] for table in tables]) for name in tables[0]}


def _joined(columns: Sequence[Column]) -> Column:
    ragged = [column for column in columns if isinstance(column, Ragged)]
    if not ragged:
        return np.concatenate([column for column in columns if not isinstance(column, Ragged)])
    sizes = np.concatenate([np.diff(column.offsets) for column in ragged])
    return Ragged(np.concatenate([column.values for column in ragged]), offsets_of(sizes.tolist()))


def code(value: StrEnum | None) -> int:
    return NONE if value is None else list(type(value)).index(value)


def value_of(kind: type[E], code: int) -> E | None:
    return None if code == NONE else list(kind)[code]


def same_column(first: Column, second: Column) -> bool:
    """Equal in every element; NaN equals NaN."""
    if isinstance(first, Ragged) and isinstance(second, Ragged):
        return same_column(first.offsets, second.offsets) and same_column(first.values, second.values)
    if isinstance(first, Ragged) or isinstance(second, Ragged):
        return False
    return first.dtype == second.dtype and np.array_equal(first, second, equal_nan=first.dtype.kind == "f")
