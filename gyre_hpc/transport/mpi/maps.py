"""Maps of region files and rooms that an endpoint keeps for the next transfer with the same file.

Touching every page of a fresh map costs several times the transfer. A file is known by device and inode, not by its path.
Kept are the latest, up to KEEP_BYTES; a region that its owner has dropped is let go at the next look (its name is gone).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import Final

KEEP_BYTES: Final = 256 << 20
Key = tuple[int, int]


class Maps:
    """The kept maps of one endpoint; one thread."""

    def __init__(self, keep_bytes: int = KEEP_BYTES) -> None:
        self._keep_bytes = keep_bytes
        self._maps: dict[Key, tuple[str, mmap.mmap]] = {}

    def of(self, path: str, total: int, open_map: Callable[[], mmap.mmap]) -> mmap.mmap:
        """The kept map of the file at `path`, or the one that `open_map` makes. Raises what `os.stat` or it raises."""
        found = os.stat(path)
        key = (found.st_dev, found.st_ino)
        self.tidy()
        _, kept = self._maps.pop(key, ("", None))
        if kept is None or len(kept) != total or found.st_size != total:
            kept = open_map()
        self._maps[key] = (path, kept)
        while sum(len(each) for _, each in self._maps.values()) > self._keep_bytes:
            self._maps.pop(next(iter(self._maps)))
        return kept

    def tidy(self) -> None:
        """Let go of files that are no longer where they were."""
        for key, (path, _) in list(self._maps.items()):
            try:
                found = os.stat(path)
            except OSError:
                del self._maps[key]
                continue
            if (found.st_dev, found.st_ino) != key:
                del self._maps[key]
