"""Live executions by id, in a persistent map: a change copies one chunk of ids and shares the rest with the map before.

A state holds hundreds of live executions and most events end one of them. A plain dict would be copied whole each time, and
every state a caller keeps would hold a copy of its own. (A hash trie from a library was the other way: it needs hooks to be
serialised, and ids that are running indices make chunks as good.)
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping

import msgspec

from gyre_hpc.records import ExecutionId, GroupId

CHUNK = 32
"""Ids per chunk: copying one costs about as much as copying the dict of the chunks of a thousand executions."""


class Stage(enum.StrEnum):
    """Life of a live execution; a terminated one has no entry."""

    QUEUED = "queued"
    LAUNCHED = "launched"
    RUNNING = "running"


class Execution(msgspec.Struct, frozen=True):
    """A dispatched execution that has not terminated. `withdrawn`: its end is decided, its termination awaited."""

    group: GroupId
    stage: Stage = Stage.QUEUED
    withdrawn: bool = False


class Executions(msgspec.Struct, frozen=True):
    """Read like a dict. `chunks[id // CHUNK][id]`; no chunk is empty; no dict in it is ever changed in place."""

    chunks: dict[int, dict[ExecutionId, Execution]] = {}

    def get(self, id_: ExecutionId) -> Execution | None:
        """The live execution, None if it has terminated."""
        chunk = self.chunks.get(id_ // CHUNK)
        return None if chunk is None else chunk.get(id_)

    def __getitem__(self, id_: ExecutionId) -> Execution:
        return self.chunks[id_ // CHUNK][id_]

    def __contains__(self, id_: ExecutionId) -> bool:
        return id_ in self.chunks.get(id_ // CHUNK, ())

    def __iter__(self) -> Iterator[ExecutionId]:
        return (id_ for chunk in self.chunks.values() for id_ in chunk)

    def __len__(self) -> int:
        return sum(map(len, self.chunks.values()))

    def __or__(self, others: Mapping[ExecutionId, Execution]) -> Executions:
        """With these inserted or replaced."""
        chunks = self.chunks.copy()
        own: set[int] = set()
        for id_, execution in others.items():
            index = id_ // CHUNK
            if index not in own:
                chunks[index] = dict(chunks.get(index, ()))
                own.add(index)
            chunks[index][id_] = execution
        return Executions(chunks)

    def without(self, id_: ExecutionId) -> Executions:
        """Without this live one."""
        chunks = self.chunks.copy()
        chunk = chunks[id_ // CHUNK].copy()
        del chunk[id_]
        if chunk:
            chunks[id_ // CHUNK] = chunk
        else:
            del chunks[id_ // CHUNK]
        return Executions(chunks)
