"""Page bookkeeping of the KV pool: who holds a page, which pages can be found, which one goes next. No tensors.

A page is free, held (reference count > 0), or cached (count 0, findable, evictable). Full pages become findable under
a key; equal keys mean equal (namespace, layout digest, token prefix), so a page of another namespace cannot be found.
Page 0 is never handed out: page tables are padded with it. Laws (tests): free + held + cached = all but page 0; a held
page is in no other list; a page is handed out again only after every holder released it and its key was forgotten.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

PageKey = bytes


class PrefixKeys:
    """Chain hash of one call's pages: key i covers the namespace, the layout and tokens 0 .. (i+1)*page_tokens-1."""

    def __init__(self, namespace: str, layout: bytes, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._root = hashlib.sha256(layout + namespace.encode()).digest()
        self.keys: list[PageKey] = []

    def extend(self, ids: Sequence[int]) -> None:
        """Add the keys of all full pages of `ids`, of which those already keyed are a prefix."""
        size = self._page_tokens
        for index in range(len(self.keys), len(ids) // size):
            previous = self.keys[-1] if self.keys else self._root
            tokens = np.asarray(ids[index * size : (index + 1) * size], dtype="<i4")
            self.keys.append(hashlib.sha256(previous + tokens.tobytes()).digest())


class PagePool:
    """Reference-counted pages with content-addressed reuse; least recently released is evicted first."""

    def __init__(self, pages: int) -> None:
        if pages < 2:
            raise ValueError(f"a pool needs 2 pages (one is padding), got {pages}")
        self.pages = pages
        self._free = list(range(pages - 1, 0, -1))
        self._holders = [0] * pages
        self._key_of: dict[int, PageKey] = {}
        self._page_of: dict[PageKey, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Pages that `allocate` can hand out."""
        return len(self._free) + len(self._cached)

    @property
    def held(self) -> int:
        """Pages some call holds."""
        return self.pages - 1 - self.available

    def allocate(self) -> int | None:
        """A page with one holder and no key, evicting if need be; None when every page is held."""
        if self._free:
            page = self._free.pop()
        elif self._cached:
            page, _ = self._cached.popitem(last=False)
            self._forget(page)
        else:
            return None
        self._holders[page] = 1
        return page

    def finds(self, key: PageKey) -> bool:
        """Whether a page is findable under `key`."""
        return key in self._page_of

    def acquire_prefix(self, keys: Sequence[PageKey]) -> list[int]:
        """Hold and return the pages of the longest findable prefix of `keys`."""
        pages: list[int] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            self._cached.pop(page, None)
            self._holders[page] += 1
            pages.append(page)
        return pages

    def publish(self, page: int, key: PageKey) -> None:
        """Make a held, full page findable. If an equal page already is, this one stays private."""
        if not self._holders[page]:
            raise ValueError(f"page {page} is not held: only its holder may publish it")
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def release(self, pages: Sequence[int]) -> None:
        """Give up one hold on each page, last page first, so that prefixes outlive what follows them."""
        for page in reversed(pages):
            if not self._holders[page]:
                raise ValueError(f"page {page} released by nobody who holds it")
            self._holders[page] -= 1
            if not self._holders[page]:
                if page in self._key_of:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def flush(self) -> None:
        """Forget every key: cached pages become free, held pages stay with their holders and cannot be found."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._key_of.clear()
        self._page_of.clear()

    def _forget(self, page: int) -> None:
        del self._page_of[self._key_of.pop(page)]
