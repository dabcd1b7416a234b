"""Keys of executions: what stands in a base URL is identity and credential in one.

A key is found by its keyed BLAKE2 digest (the digest's own key is drawn anew in every process) and then compared as a whole
in constant time, with a dummy where the digest is unknown: how long an answer takes says nothing about how much of a guess
was right. Unknown and revoked keys look alike.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Generic, TypeVar

T = TypeVar("T")

DIGEST_BYTES = 16


class Keys(Generic[T]):
    """What each key opens."""

    def __init__(self) -> None:
        self._salt = secrets.token_bytes(32)
        self._items: dict[bytes, tuple[bytes, T]] = {}
        self._dummy: tuple[bytes, T | None] = (secrets.token_bytes(32), None)

    def __len__(self) -> int:
        return len(self._items)

    def add(self, key: str, item: T) -> None:
        """From here on the key opens the item."""
        given = _bytes(key)
        self._items[self._digest(given)] = (given, item)

    def revoke(self, item: T) -> None:
        """No key opens the item any more."""
        self._items = {digest: held for digest, held in self._items.items() if held[1] is not item}

    def find(self, key: str) -> T | None:
        """What the key opens, if anything."""
        given = _bytes(key)
        known, item = self._items.get(self._digest(given), self._dummy)
        return item if hmac.compare_digest(known, given) else None

    def _digest(self, given: bytes) -> bytes:
        return hashlib.blake2b(given, key=self._salt, digest_size=DIGEST_BYTES).digest()


def _bytes(key: str) -> bytes:
    """A path may bring any characters."""
    return key.encode("utf-8", "surrogatepass")
