"""Reading shards: one execution at a time, nothing else is loaded. Damage raises CorruptRecord naming the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py
import hdf5plugin  # noqa: F401  (registers the zstd filter)
import numpy as np

from gyre_hpc.errors import CorruptRecord, MissingInput
from gyre_hpc.layout import RunLayout
from gyre_hpc.records import ExecutionId
from gyre_hpc.shards.encode import Derivation, ExecutionRecord, decode
from gyre_hpc.shards.format import EXECUTIONS, ROWS, SCHEMA, TABLES, Column, Ragged, Table, Tables
from gyre_hpc.shards.manifest import read_manifest

RESTORE = (
    "put the file back from a copy, or delete it and its line in manifest.jsonl and resume the run:"
    " its executions are sealed again from calls/"
)


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Turn whatever HDF5, or the records themselves, say about broken bytes into CorruptRecord naming the file."""
    try:
        yield
    except CorruptRecord as error:
        if str(path) in error.message:
            raise
        raise CorruptRecord(f"{path}: {error.message}", fix=RESTORE) from error
    except (OSError, KeyError, RuntimeError, ValueError, IndexError) as error:
        raise CorruptRecord(f"{path}: {error}", fix=RESTORE) from error


class ShardReader:
    """An open shard; use it as a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise MissingInput(f"{path}: no such shard, but manifest.jsonl names it", fix=RESTORE)
        with damage_named(path):
            self._file = h5py.File(path, "r", locking=False)
            if int(self._file.attrs.get("complete", 0)) != 1:
                raise CorruptRecord(f"{path}: the writer did not finish it", fix=RESTORE)
            if int(self._file.attrs["schema"]) != SCHEMA:
                raise CorruptRecord(
                    f"{path}: schema {self._file.attrs['schema']}, this version reads {SCHEMA}",
                    fix="read it with the gyre_hpc version in its attribute gyre_hpc",
                )
            self.derivation = Derivation(int(self._file.attrs["seed"]), int(self._file.attrs["j_max"]))

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __len__(self) -> int:
        """Executions in the shard."""
        return len(self._file["raw/executions/execution"])

    def attempts(self) -> list[tuple[ExecutionId, int]]:
        """(execution, attempt) of every row."""
        with damage_named(self.path):
            executions = self._file["raw/executions"]
            pairs = zip(executions["execution"][:].tolist(), executions["attempt"][:].tolist(), strict=True)
            return [(ExecutionId(execution), attempt) for execution, attempt in pairs]

    def tables(self, index: int) -> Tables:
        """All tables of the execution in row `index`."""
        with damage_named(self.path):
            return {name: self._table(name, index) for name in TABLES}

    def record(self, index: int) -> ExecutionRecord:
        """The execution in row `index` with its calls."""
        tables = self.tables(index)
        with damage_named(self.path):
            return decode(tables)

    def whole(self) -> Tables:
        """All rows of all tables."""
        with damage_named(self.path):
            return {name: self._rows(name, 0, self._length(name)) for name in TABLES}

    def _length(self, name: str) -> int:
        return len(self) if name in EXECUTIONS else int(self._file[name][ROWS][-1])

    def _table(self, name: str, index: int) -> Table:
        first, last = (index, index + 1) if name in EXECUTIONS else self._file[name][ROWS][index : index + 2]
        return self._rows(name, int(first), int(last))

    def _rows(self, name: str, first: int, last: int) -> Table:
        group = self._file[name]
        columns = [column for column in group if column != ROWS and not column.endswith("_offsets")]
        return {column: self._column(group, column, first, last) for column in columns}

    def _column(self, group: h5py.Group, name: str, first: int, last: int) -> Column:
        if f"{name}_offsets" not in group:
            column: Column = group[name][first:last]
            if len(column) != last - first:
                raise ValueError(f"column {group.name}/{name} ends at row {first + len(column)} of {last}")
            return column
        offsets = group[f"{name}_offsets"][first : last + 1]
        values = group[name][offsets[0] : offsets[-1]]
        if np.any(np.diff(offsets) < 0) or len(values) != offsets[-1] - offsets[0]:
            raise ValueError(f"offsets of {group.name}/{name} do not fit its values")
        return Ragged(values, offsets - offsets[0])


def open_shards(run_dir: Path) -> Iterator[ShardReader]:
    """Every listed shard, oldest first; each is closed when the next is asked for."""
    layout = RunLayout(run_dir)
    for line in read_manifest(layout):
        with ShardReader(layout.shards / line.file) as reader:
            yield reader


def find_tables(run_dir: Path, execution: ExecutionId, attempt: int | None = None) -> Tables | None:
    """Tables of an attempt (None: the one that counts, else the last); None if it is not at rest."""
    layout = RunLayout(run_dir)
    best: tuple[bool, int, str] | None = None
    for line in read_manifest(layout):
        for sealed in line.executions:
            if sealed.execution == execution and attempt in (None, sealed.attempt):
                best = max(best or (False, -1, ""), (not sealed.superseded, sealed.attempt, line.file))
    if best is None:
        return None
    with ShardReader(layout.shards / best[2]) as reader:
        return reader.tables(reader.attempts().index((execution, best[1])))
