"""Recorded calls of one attempt in memory proportional to their unique tokens, attached at the longest id prefix.

A *strand* is a run of tokens; it leaves its parent strand at the path position `fork`, so the ids seen along
parent[..fork] + strand are what an engine was given. A chain of calls lies in ONE strand however long it gets, hence a
full prompt is compared with a few array comparisons and nobody has to say which call it continues.

Rules: a prompt follows the longest match, ties go to accepted output and then to the later call; sampled output is
always laid down fresh, even where equal ids exist (two calls that sampled the same text are two samplings), but inside
a strand no two prompts repeat tokens. A strand's end never carries a branch: what comes there extends it.
Strand 0 starts at the root (position 0) of the forest; further roots are its branches at 0.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from gyre_hpc.errors import CorruptRecord
from gyre_hpc.records import CallRecord, Int32

T = TypeVar("T")
BLOCK = 65536
"""Tokens compared at once: two blocks of ids stay in a core's cache."""
EMPTY: Int32 = np.zeros(0, np.int32)
ROOT = 0


@dataclass
class Strand:
    """One run of tokens [fork, end) on its path, in a growing buffer."""

    parent: int
    fork: int
    buffer: Int32 = field(default_factory=lambda: EMPTY)
    size: int = 0
    branches: dict[int, list[int]] = field(default_factory=dict)
    """Path position -> strands that leave here."""
    twins: list[tuple[int, int]] = field(default_factory=list)
    """(position, branch) of branches that begin with the token this strand itself has there."""
    sampled: list[tuple[int, int, int]] = field(default_factory=list)
    """(start, end, call): spans that a call sampled, ascending."""
    prompt_ends: list[int] = field(default_factory=list)
    """Positions at which a prompt ends, ascending."""
    tips: list[tuple[int, int]] = field(default_factory=list)
    """(position, call) at which calls end, ascending."""

    @property
    def end(self) -> int:
        return self.fork + self.size

    def ids(self, start: int, end: int) -> Int32:
        """Tokens of path positions [start, end), a view."""
        return self.buffer[start - self.fork : end - self.fork]

    def extend(self, ids: Int32) -> None:
        size = self.size + len(ids)
        if size > len(self.buffer):
            grown = np.empty(max(size, 3 * self.size // 2), np.int32)
            grown[: self.size] = self.buffer[: self.size]
            self.buffer = grown
        self.buffer[self.size : size] = ids
        self.size = size

    def match(self, ids: Int32) -> int:
        """Path position up to which `ids` (a whole prompt, known to match up to `fork`) follows this strand."""
        stop = min(self.end, len(ids))
        for start in range(self.fork, stop, BLOCK):
            end = min(start + BLOCK, stop)
            same = self.ids(start, end) == ids[start:end]
            if not same.all():
                return start + int(same.argmin())
        return stop

    def sampler(self, position: int) -> int:
        """The call that sampled the token at `position`, -1 if it is context."""
        return next((call for start, end, call in self.sampled if start <= position < end), -1)


@dataclass
class LaidCall:
    """A call as laid down: `record` without its ids, and the point (strand, end) at which its last token lies."""

    record: CallRecord
    strand: int
    end: int
    prompt_tokens: int


class Strands:
    """All calls of one attempt. `add` takes them in any order; `canonical` fixes the order before a tree is made."""

    def __init__(self) -> None:
        self.strands = [Strand(parent=-1, fork=0)]
        self.calls: list[LaidCall] = []
        self._index: dict[str, int] = {}
        self._in_order = True

    def add(self, record: CallRecord) -> None:
        """Lay a call down. A call seen before only renews its metadata (delivery and acceptance become known late)."""
        _check(record)
        known = self._index.get(record.call)
        if known is not None:
            self.calls[known].record = _without_ids(record)
            self._in_order = False
            return
        if self.calls and _order(record) < _order(self.calls[-1].record):
            self._in_order = False
        call, prompt = len(self.calls), len(record.prompt_ids)
        located, at = self._locate(record.prompt_ids)
        strand, end = self._lay(located, at, np.concatenate([record.prompt_ids[at:], record.output_ids]))
        insort(self.strands[strand if at < prompt else located].prompt_ends, prompt)
        insort(self.strands[strand].tips, (end, call))
        if end > prompt:
            self.strands[strand].sampled.append((prompt, end, call))
        self._index[record.call] = call
        self.calls.append(LaidCall(_without_ids(record), strand, end, prompt))

    def canonical(self) -> Strands:
        """The same calls laid down by ordinal with final metadata: what a second reading of the log also gives."""
        if self._in_order:
            return self
        again = Strands()
        for laid in sorted(self.calls, key=lambda laid: _order(laid.record)):
            again.add(self._restore(laid))
        return again

    def records(self) -> Iterator[CallRecord]:
        """The calls as they were recorded, full prompts included, one at a time."""
        return (self._restore(laid) for laid in self.calls)

    def path_ids(self, strand: int, end: int) -> Int32:
        """Ids from the root to path position `end` of `strand`, a copy."""
        return join_path(strand, end, self._look_up)

    @property
    def unique_tokens(self) -> int:
        return sum(strand.size for strand in self.strands)

    def _look_up(self, strand: int) -> tuple[int, int, Int32]:
        found = self.strands[strand]
        return found.parent, found.fork, found.buffer

    def _restore(self, laid: LaidCall) -> CallRecord:
        ids = self.path_ids(laid.strand, laid.end)
        return replace(
            laid.record, prompt_ids=ids[: laid.prompt_tokens], output_ids=ids[laid.prompt_tokens :]
        )

    def _locate(self, ids: Int32) -> tuple[int, int]:
        """The point (strand, position) of the longest prefix of `ids`."""
        ends: list[tuple[int, int]] = []
        stack = [ROOT]
        while stack:
            index = stack.pop()
            strand = self.strands[index]
            matched = strand.match(ids)
            ends.append((matched, index))
            stack += [branch for position, branch in strand.twins if position < matched]
            if matched < len(ids):
                stack += [
                    b for b in strand.branches.get(matched, ()) if self.strands[b].buffer[0] == ids[matched]
                ]
        longest = max(end for end, _ in ends)
        points = [index for end, index in ends if end == longest]
        best = points[0] if len(points) == 1 else max(points, key=lambda index: self._rank(index, longest))
        return best, longest

    def _rank(self, strand: int, end: int) -> tuple[bool, int, int]:
        call = self.strands[strand].sampler(end - 1)
        return call >= 0 and self.calls[call].record.accepted, call, strand

    def _lay(self, index: int, at: int, ids: Int32) -> tuple[int, int]:
        """Put `ids` behind the point and return the point of their end. The longer side of a fork keeps the strand."""
        strand = self.strands[index]
        if not len(ids):
            return index, at
        if len(ids) < strand.end - at:
            index = self._branch(index, at, ids)
            strand = self.strands[index]
        else:
            if at < strand.end:
                self._split(index, at)
            strand.extend(ids)
            strand.twins += [
                (at, b) for b in strand.branches.get(at, ()) if self.strands[b].buffer[0] == ids[0]
            ]
        return index, strand.end

    def _branch(self, parent: int, at: int, ids: Int32) -> int:
        index = len(self.strands)
        self.strands.append(Strand(parent=parent, fork=at))
        self.strands[index].extend(ids)
        above = self.strands[parent]
        above.branches.setdefault(at, []).append(index)
        if at < above.end and above.ids(at, at + 1)[0] == ids[0]:
            above.twins.append((at, index))
        return index

    def _split(self, index: int, at: int) -> None:
        """Move what lies behind `at` into a branch of its own; the strand then ends at `at`."""
        strand = self.strands[index]
        tail = strand.ids(at, strand.end).copy()
        strand.size = at - strand.fork
        branch = self._branch(index, at, tail)
        moved = self.strands[branch]
        for position in [p for p in strand.branches if p > at]:
            moved.branches[position] = strand.branches.pop(position)
            for child in moved.branches[position]:
                self.strands[child].parent = branch
        moved.twins = [twin for twin in strand.twins if twin[0] > at]
        strand.twins = [twin for twin in strand.twins if twin[0] < at]
        moved.prompt_ends = _take_behind(strand.prompt_ends, bisect_right(strand.prompt_ends, at))
        moved.tips = _take_behind(strand.tips, bisect_left(strand.tips, (at + 1, -1)))
        moved.sampled = _take_behind(strand.sampled, bisect_left(strand.sampled, (at, -1, -1)))
        if strand.sampled and strand.sampled[-1][1] > at:
            start, end, call = strand.sampled.pop()
            strand.sampled.append((start, at, call))
            moved.sampled.insert(0, (at, end, call))
        for _, call in moved.tips:
            self.calls[call].strand = branch


def _take_behind(ascending: list[T], index: int) -> list[T]:
    """Cut the list off at `index` and return what stood there and behind."""
    taken = ascending[index:]
    del ascending[index:]
    return taken


def join_path(strand: int, end: int, look_up: Callable[[int], tuple[int, int, Int32]]) -> Int32:
    """Ids from the root to path position `end` of `strand`; `look_up` gives (parent, fork, tokens) of a strand."""
    pieces: list[Int32] = []
    while strand >= 0:
        parent, fork, tokens = look_up(strand)
        pieces.append(tokens[: end - fork])
        strand, end = parent, fork
    return np.concatenate(pieces[::-1])


def _order(record: CallRecord) -> tuple[int, str]:
    return record.ordinal, record.call


def _without_ids(record: CallRecord) -> CallRecord:
    return replace(record, prompt_ids=EMPTY, output_ids=EMPTY)


def _check(record: CallRecord) -> None:
    where = f"call {record.call} of execution {record.execution}"
    fix = "the call log is damaged: exclude the execution"
    if len({len(record.output_ids), len(record.logprobs), len(record.versions)}) != 1:
        raise CorruptRecord(f"{where}: output, log-probabilities and versions differ in length", fix=fix)
    if not len(record.prompt_ids):
        raise CorruptRecord(f"{where}: the prompt is empty, nothing predicts its first token", fix=fix)
