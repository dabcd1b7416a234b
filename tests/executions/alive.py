"""Which processes are left, without knowing any pid: all that descend from a program hold its output open."""

from __future__ import annotations

import os
import select
from pathlib import Path

PATIENCE_MS = 60_000


class Alive:
    """A named pipe that a program and all its descendants hold open as their output."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self._reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def wait_for(self, text: bytes) -> None:
        """Block until the program wrote `text`."""
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        assert poll.poll(PATIENCE_MS), "nobody wrote"
        os.set_blocking(self._reader, True)
        seen = b""
        while text not in seen:
            data = os.read(self._reader, 4096)
            assert data, f"ended after {seen!r}"
            seen += data

    def none_left(self) -> bool:
        """Whether no process holds the pipe at this moment."""
        os.set_blocking(self._reader, False)
        try:
            while os.read(self._reader, 4096):
                pass
        except BlockingIOError:
            return False
        return True

    def wait_until_none_left(self) -> None:
        """Block until no process holds the pipe."""
        os.set_blocking(self._reader, True)
        while os.read(self._reader, 4096):
            pass

    def close(self) -> None:
        os.close(self._reader)
