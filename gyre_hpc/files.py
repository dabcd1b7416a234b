"""Files of a run: those that others read are seen whole or not at all, on every node, also after a power loss; log files
take no more lines while the disk is full, and say nothing of it: who needs the disk does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from pathlib import Path


class LogFile(logging.FileHandler):
    """A log file below a run. On a full disk a line is dropped, where logging would print a traceback for each, and closing
    it raises nothing that would hide why the run ends.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def handleError(self, record: logging.LogRecord) -> None:
        """What `emit` raised."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        """Close the file; what it could not take is lost."""
        with contextlib.suppress(OSError):
            super().close()


def replace_file(path: Path, data: bytes) -> None:
    """Write `path` in place of what is there; a reader sees all of it or the one before. Raises OSError, and leaves no draft."""
    draft = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
