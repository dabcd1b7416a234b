"""Between the engine's KV pool and the cell's host store: full pages out for others, pages of others in.

The bytes of a page are its float32 KV, little-endian, [layer, page_tokens, k or v, KV head, head_dim]; the layout digest
names this shape. A page is written while its holder keeps it, so running calls go on meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gyre_hpc.kv.page_store import PageKey, PageStore


class HostPages:
    """The host store as one engine sees it: pages of its own layout."""

    def __init__(self, store: PageStore, layout: bytes, page_tokens: int) -> None:
        self._store, self._layout, self._page_tokens = store, layout, page_tokens

    def keys(self, namespace: str, prefixes: Sequence[bytes]) -> list[PageKey]:
        """Store keys of pages by their prefix hashes."""
        return [PageKey(namespace, self._layout, prefix) for prefix in prefixes]

    def lease(self, keys: Sequence[PageKey], seconds: float) -> int:
        """How many of the first pages the store has; they stay for so long."""
        return self._store.lease(keys, seconds)

    def write(self, keys: Sequence[PageKey], kv: Tensor, pages: Sequence[int], lease_s: float) -> int:
        """Keep these pages of the pool in the store; how many are there. `kv`: [layers, slots, kv_width]."""
        size = self._page_tokens
        slices = (kv[:, page * size : (page + 1) * size].contiguous() for page in pages)
        payloads = (part.numpy().astype("<f4", copy=False).tobytes() for part in slices)
        return self._store.put(zip(keys, payloads, strict=True), lease_s=lease_s)

    def read(self, key: PageKey, kv: Tensor, page: int) -> bool:
        """Copy the page of this key into the pool. False if the store does not have it whole, or in another size."""
        payload = self._store.get(key)
        into = kv[:, page * self._page_tokens : (page + 1) * self._page_tokens]
        if payload is None or len(payload) != into.numel() * 4:
            return False
        into.copy_(torch.from_numpy(np.frombuffer(payload, "<f4").astype(np.float32).reshape(into.shape)))
        return True
