"""The recorded calls of all attempts that are not yet at rest, read on from the call logs of a run.

Calls of an attempt are laid down as they become final, so memory follows unique tokens. An attempt is *complete* once the
log says that all its records were given; it is *damaged* if a record of it cannot be used. A log that cannot be read
further is reported once and left alone: its unfinished attempts never become complete.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from gyre_hpc.errors import CorruptRecord
from gyre_hpc.gateway.call_log import CallLogReader, ExecutionEnd, call_logs
from gyre_hpc.layout import RunLayout
from gyre_hpc.records import CallRecord, ExecutionId
from gyre_hpc.trajectories.strands import Strands

log = logging.getLogger(__name__)
AttemptId = tuple[ExecutionId, int]


class CallBook:
    """`at_rest` says which attempts lie in a shard already: their calls are passed over."""

    def __init__(self, layout: RunLayout, at_rest: Callable[[ExecutionId, int], bool]) -> None:
        self._layout = layout
        self._at_rest = at_rest
        self._readers: dict[Path, CallLogReader | None] = {}
        self._strands: dict[AttemptId, Strands] = {}
        self._ended: set[AttemptId] = set()
        self._damaged: set[AttemptId] = set()

    def read(self) -> None:
        """Take what has become final, logs in the order of their processes."""
        for path in call_logs(self._layout):
            reader = self._readers.setdefault(path, CallLogReader(path))
            if reader is None:
                continue
            try:
                for item in reader.follow():
                    self._take(item)
            except CorruptRecord as error:
                log.error("%s", error)
                self._readers[path] = None
                continue
            reader.sealed.clear()

    def holds(self, key: AttemptId) -> bool:
        """Whether calls of the attempt are in memory."""
        return key in self._strands

    def complete(self, key: AttemptId) -> bool:
        """Whether all records of the attempt are here and sound."""
        return key in self._ended and key not in self._damaged

    def damaged(self, key: AttemptId) -> bool:
        return key in self._damaged

    def strands(self, key: AttemptId) -> Strands:
        """The attempt's calls; empty if it made none."""
        return self._strands.get(key, Strands())

    def earlier(self, key: AttemptId) -> list[AttemptId]:
        """Attempts of the same execution that a re-launch superseded."""
        return sorted(other for other in self._strands if other[0] == key[0] and other[1] < key[1])

    def forget(self, key: AttemptId) -> None:
        self._strands.pop(key, None)
        self._ended.discard(key)

    def _take(self, item: CallRecord | ExecutionEnd) -> None:
        key = (item.execution, item.attempt)
        if key not in self._strands and self._at_rest(*key):
            return
        if isinstance(item, ExecutionEnd):
            self._ended.add(key)
        else:
            try:
                self._strands.setdefault(key, Strands()).add(item)
            except CorruptRecord as error:
                log.error("%s", error)
                self._damaged.add(key)
