"""A harness's own name for a run of it: one under two base URLs means that two executions share a HOME or a session.

The base URL alone is identity; this only finds out that something behind it is not as it should be. Pure.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

E = TypeVar("E")
SHARED_SESSION = "shared_session"
"""What the record of a call says (`CallRecord.forks`) whose session belongs to another execution."""
MOST = 64
"""Sessions kept of one execution (sub-agents may have their own): a client may send as many as it likes."""


class Sessions(Generic[E]):
    """Who was first to send a value of `header` ("" = no such header), among the executions that are open."""

    def __init__(self, header: str) -> None:
        self.header = header
        self._owners: dict[str, E] = {}
        self._counts: dict[int, int] = {}

    def shared(self, headers: Mapping[str, str], execution: E) -> bool:
        """Whether another open execution has sent this session's name before."""
        name = headers.get(self.header, "") if self.header else ""
        if not name:
            return False
        owner = self._owners.get(name)
        if owner is None and self._counts.get(id(execution), 0) < MOST:
            self._owners[name] = execution
            self._counts[id(execution)] = self._counts.get(id(execution), 0) + 1
        shared = owner is not None and owner is not execution
        if shared:
            log.error(
                "%s %s comes under two base URLs: their harnesses share a HOME or a session",
                self.header,
                name[:64],
            )
        return shared

    def forget(self, execution: E) -> None:
        """The execution is over."""
        if self._counts.pop(id(execution), 0):
            self._owners = {name: owner for name, owner in self._owners.items() if owner is not execution}
