"""`manifest.jsonl`: one line per sealed shard. A shard exists iff its line does; a torn last line does not count."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from gyre_hpc.errors import CorruptRecord
from gyre_hpc.layout import RunLayout
from gyre_hpc.records import ExecutionId


class SealedExecution(msgspec.Struct, frozen=True, array_like=True):
    """An attempt inside a shard."""

    execution: ExecutionId
    attempt: int
    superseded: bool


class ShardLine(msgspec.Struct, frozen=True):
    """What the manifest says about one shard; `file` lies in RUN/shards, `xxh3` is of its bytes."""

    file: str
    bytes: int
    xxh3: str
    schema: int
    sealed_at: float
    executions: tuple[SealedExecution, ...]
    calls: int
    unique_tokens: int
    sampled_tokens: int


def read_manifest(layout: RunLayout) -> list[ShardLine]:
    """All lines, oldest first. Raises CorruptRecord naming the line."""
    if not layout.manifest.exists():
        return []
    whole = layout.manifest.read_bytes()
    lines = whole[: whole.rfind(b"\n") + 1].splitlines()
    return [_parsed(layout.manifest, number, line) for number, line in enumerate(lines, start=1)]


def append_line(layout: RunLayout, line: ShardLine) -> None:
    """Add a line durably, cutting a torn one first."""
    descriptor = os.open(layout.manifest, os.O_RDWR | os.O_CREAT, 0o644)
    with os.fdopen(descriptor, "r+b") as file:
        whole = file.read()
        file.seek(whole.rfind(b"\n") + 1)
        file.truncate()
        file.write(msgspec.json.encode(line) + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _parsed(path: Path, number: int, line: bytes) -> ShardLine:
    try:
        return msgspec.json.decode(line, type=ShardLine)
    except msgspec.DecodeError as error:
        raise CorruptRecord(
            f"{path}, line {number}: {error}",
            fix="remove the line: a resumed run seals its executions again from calls/",
        ) from error
