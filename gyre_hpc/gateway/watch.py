"""Watches one stream of an engine for silence: a warning once for each stall, then the end of the stream.

Hearing a token costs no timer: the one there is looks, when it is due, at how long the stream has been silent by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class SilenceWatch:
    """Calls `stalled` with the seconds once a silence has lasted `alarm_s`, and `silent` when it has lasted `silence_s`."""

    def __init__(
        self, alarm_s: float, silence_s: float, stalled: Callable[[float], None], silent: Callable[[], None]
    ) -> None:
        self._alarm_s = alarm_s
        self._silence_s = silence_s
        self._stalled = stalled
        self._silent = silent
        self._loop = asyncio.get_running_loop()
        self._heard = self._loop.time()
        self._warned = False
        self._timer = self._loop.call_at(self._due(), self._look)

    def heard(self) -> None:
        """The engine has spoken."""
        self._heard = self._loop.time()
        self._warned = False

    def stop(self) -> None:
        """Neither is called any more."""
        self._timer.cancel()

    def _due(self) -> float:
        return self._heard + (self._silence_s if self._warned else min(self._alarm_s, self._silence_s))

    def _look(self) -> None:
        quiet_s = self._loop.time() - self._heard
        if quiet_s >= self._silence_s:
            self._silent()
            return
        if quiet_s >= self._alarm_s and not self._warned:
            self._warned = True
            self._stalled(quiet_s)
        self._timer = self._loop.call_at(self._due(), self._look)
