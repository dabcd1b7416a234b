"""`gyre shards verify RUN`: are the sealed shards what was sealed, and does derived follow from raw?

Per shard: size and xxh3 of the file against the manifest, structure (every table readable, offsets in order, the
executions the manifest lists), the recorded calls laid down afresh equal the stored strands, and tree, roles and kept
paths rebuilt from them equal the stored ones. Nothing is changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import xxhash

from gyre_hpc.errors import CorruptRecord, GyreError, MissingInput
from gyre_hpc.layout import RunLayout
from gyre_hpc.shards.encode import Derivation, decode, encode
from gyre_hpc.shards.format import Tables, same_column
from gyre_hpc.shards.manifest import ShardLine, read_manifest
from gyre_hpc.shards.reader import RESTORE, ShardReader, damage_named


@dataclass(frozen=True)
class ShardReport:
    """`problem` is "" for a sound shard; it names the file and what to do otherwise."""

    file: str
    executions: int
    bytes: int
    problem: str


@dataclass(frozen=True)
class Report:
    """`unlisted`: files in shards/ that no manifest line names (a writer died before the line; harmless)."""

    shards: list[ShardReport]
    unlisted: list[str]

    @property
    def ok(self) -> bool:
        return not any(shard.problem for shard in self.shards)


def verify(run_dir: Path) -> Report:
    """Check every shard of a run; a damaged one does not stop the others."""
    layout = RunLayout(run_dir)
    if not run_dir.is_dir():
        raise MissingInput(f"{run_dir}: no such run folder", fix="name a folder made by gyre train")
    lines = read_manifest(layout)
    reports = [
        ShardReport(line.file, len(line.executions), line.bytes, _problem(layout.shards / line.file, line))
        for line in lines
    ]
    listed = {line.file for line in lines}
    present = layout.shards.iterdir() if layout.shards.is_dir() else []
    return Report(reports, sorted(path.name for path in present if path.name not in listed))


def _problem(path: Path, line: ShardLine) -> str:
    try:
        _check_bytes(path, line)
        _check_content(path, line)
    except GyreError as error:
        return str(error)
    return ""


def _check_bytes(path: Path, line: ShardLine) -> None:
    if not path.is_file():
        raise MissingInput(f"{path}: no such file", fix=RESTORE)
    size = path.stat().st_size
    if size != line.bytes:
        raise CorruptRecord(f"{path}: {size} bytes, sealed with {line.bytes}", fix=RESTORE)
    digest = xxhash.xxh3_64()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    if digest.hexdigest() != line.xxh3:
        raise CorruptRecord(f"{path}: xxh3 {digest.hexdigest()}, sealed with {line.xxh3}", fix=RESTORE)


def _check_content(path: Path, line: ShardLine) -> None:
    with ShardReader(path) as shard:
        if shard.attempts() != [(sealed.execution, sealed.attempt) for sealed in line.executions]:
            raise CorruptRecord(
                f"{path}: other executions than its line in manifest.jsonl lists", fix=RESTORE
            )
        for index in range(len(shard)):
            stored = shard.tables(index)
            with damage_named(path):
                name = first_difference(stored, shard.derivation)
            if name:
                execution = line.executions[index]
                raise CorruptRecord(
                    f"{path}, execution {execution.execution} attempt {execution.attempt}: {name} does not follow"
                    " from the recorded calls",
                    fix=RESTORE,
                )


def first_difference(stored: Tables, derivation: Derivation) -> str:
    """The first column that differs when everything is rebuilt from the full recorded calls, "" if none."""
    again = encode(decode(stored), derivation)
    for name, table in stored.items():
        for column, values in table.items():
            if not same_column(values, again[name][column]):
                return f"{name}/{column}"
    return ""
