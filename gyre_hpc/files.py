"""Files that others read while they are written: seen whole or not at all, on every node, also after a power loss."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def replace_file(path: Path, data: bytes) -> None:
    """Write `path` in place of what is there; a reader sees all of it or the one before. Raises OSError."""
    draft = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
