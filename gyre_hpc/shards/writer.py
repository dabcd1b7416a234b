"""The one writer of a run's shards. A sealed execution survives whatever kills the writer; an attempt is sealed once.

The file is made in memory, written under a dot name, fsynced, renamed, and only then named in the manifest. What a dead
writer left behind without a manifest line is overwritten by the next shard, which takes the same name.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import h5py
import hdf5plugin
import numpy as np
import xxhash

from gyre_hpc.errors import StorageFull
from gyre_hpc.files import replace_file
from gyre_hpc.layout import RunLayout
from gyre_hpc.records import ExecutionId
from gyre_hpc.shards.encode import Derivation, ExecutionRecord, encode
from gyre_hpc.shards.format import (
    CHUNK,
    ENUMS,
    EXECUTIONS,
    LIBVER,
    ROWS,
    SCHEMA,
    SMALL,
    TABLES,
    Array,
    Column,
    Ragged,
    Tables,
    joined,
    offsets_of,
    rows_of,
)
from gyre_hpc.shards.manifest import SealedExecution, ShardLine, append_line, read_manifest

MAX_EXECUTIONS = 64
MAX_BYTES = 64 << 20
MAX_AGE_S = 60.0
ZSTD = dict(hdf5plugin.Zstd(clevel=3), shuffle=True)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class ShardWriter:
    """Collects closed attempts and seals them in batches of 64 executions, 64 MiB or 60 s."""

    def __init__(self, layout: RunLayout, run: str, derivation: Derivation) -> None:
        self._layout = layout
        self._run = run
        self._derivation = derivation
        lines = read_manifest(layout)
        self._next = max((int(Path(line.file).stem) + 1 for line in lines), default=0)
        self._sealed = {(e.execution, e.attempt) for line in lines for e in line.executions}
        self._pending: list[tuple[ExecutionRecord, Tables]] = []
        self._bytes = 0
        self._oldest = 0.0

    def sealed(self, execution: ExecutionId, attempt: int) -> bool:
        """Whether the attempt is at rest or waits to be."""
        return (execution, attempt) in self._sealed

    def add(self, record: ExecutionRecord, now: float) -> None:
        """Take an attempt; one that was taken before is ignored. `now` is on the caller's monotonic clock."""
        if self.sealed(record.execution, record.attempt):
            return
        tables = encode(record, self._derivation)
        self._sealed.add((record.execution, record.attempt))
        self._oldest = self._oldest if self._pending else now
        self._pending.append((record, tables))
        self._bytes += sum(_bytes(column) for table in tables.values() for column in table.values())

    def due(self, now: float) -> bool:
        """Whether the batch is full or old enough."""
        if not self._pending:
            return False
        full = len(self._pending) >= MAX_EXECUTIONS or self._bytes >= MAX_BYTES
        return full or now - self._oldest >= MAX_AGE_S

    def seal(self) -> ShardLine | None:
        """Put the batch at rest; None if it is empty. Raises StorageFull; the batch is then kept for another try."""
        if not self._pending:
            return None
        name = f"{self._next:06d}.h5"
        tables = [tables for _, tables in self._pending]
        image = shard_image(tables, self._run, self._derivation)
        line = self._line(name, image)
        try:
            replace_file(self._layout.shards / name, image)
            append_line(self._layout, line)
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise StorageFull(
                f"{self._layout.shards / name}: {error.strerror}",
                fix="free space or raise the quota; the records stay in calls/ and are sealed on the next try",
            ) from error
        self._next += 1
        self._pending, self._bytes = [], 0
        return line

    def _line(self, name: str, image: bytes) -> ShardLine:
        records = [record for record, _ in self._pending]
        calls = [laid.record for record in records for laid in record.strands.calls]
        return ShardLine(
            file=name,
            bytes=len(image),
            xxh3=xxhash.xxh3_64_hexdigest(image),
            schema=SCHEMA,
            sealed_at=time.time(),
            executions=tuple(SealedExecution(r.execution, r.attempt, r.superseded) for r in records),
            calls=len(calls),
            unique_tokens=sum(record.strands.unique_tokens for record in records),
            sampled_tokens=sum(len(call.logprobs) for call in calls),
        )


def shard_image(executions: Sequence[Tables], run: str, derivation: Derivation) -> bytes:
    """The bytes of a shard with these executions."""
    with h5py.File("shard", "w", driver="core", backing_store=False, libver=LIBVER) as file:
        for name in TABLES:
            parts = [tables[name] for tables in executions]
            group = file.create_group(name)
            if name not in EXECUTIONS:
                _put(group, ROWS, offsets_of([rows_of(part) for part in parts]))
            for column, values in joined(parts).items():
                _put_column(group, column, values)
        attributes = {"schema": SCHEMA, "seed": derivation.seed, "j_max": derivation.j_max}
        file.attrs.update(
            attributes | {"run": np.bytes_(run.encode()), "gyre_hpc": np.bytes_(version("gyre_hpc"))}
        )
        file.attrs["complete"] = 1
        file.flush()
        image: bytes = file.id.get_file_image()
    return image


def _put_column(group: h5py.Group, name: str, column: Column) -> None:
    if isinstance(column, Ragged):
        _put(group, name, column.values)
        _put(group, f"{name}_offsets", column.offsets)
        return
    _put(group, name, column)
    values = ENUMS.get(f"{group.name[1:]}/{name}")
    if values is not None:
        group[name].attrs["values"] = np.bytes_(",".join(values).encode())


def _put(group: h5py.Group, name: str, values: Array) -> None:
    if len(values) <= SMALL:
        group.create_dataset(name, data=values)
    else:
        group.create_dataset(name, data=values, chunks=(min(CHUNK, len(values)),), **ZSTD)


def _bytes(column: Column) -> int:
    return column.values.nbytes + column.offsets.nbytes if isinstance(column, Ragged) else column.nbytes
