"""Our page store as SGLang's HiCache storage backend (`--hicache-storage-backend dynamic`), loaded inside its scheduler.

A page is stored once under SGLang's own content key and given back only if it is whole, this key's and of the size the
engine's host pool has pages of; anything else counts as absent, and the engine computes it. SGLang calls from threads of
its own that nobody restarts: an error of the store is logged and answered with "absent" or "not kept", never raised.
Source of the interface: sglang/srt/mem_cache/hicache_storage.py (0.5.21), called by managers/cache_controller.py.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from gyre_hpc.engines.sglang.page_keys import NAMESPACE, rank_layout
from gyre_hpc.errors import GyreError
from gyre_hpc.kv.page_store import PageKey, PageStore

log = logging.getLogger(__name__)


class GyreStorage(HiCacheStorage):  # type: ignore[misc]
    """The part of one rank. `config.extra_config`: folder, limit_bytes, layout (see `arguments`)."""

    def __init__(self, config: Any, options: Any = None) -> None:
        extra = config.extra_config
        self._store = PageStore(Path(extra["folder"]), int(extra["limit_bytes"]))
        self._layout = rank_layout(
            extra["layout"],
            tp=(0, 1) if config.is_mla_model else (config.tp_rank, config.tp_size),
            pp=(config.pp_rank, config.pp_size),
            cp=(config.attn_cp_rank, config.attn_cp_size),
        )

    def exists(self, key: str) -> bool:
        return self._store.has(self._key(key))

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """How many of the leading keys there are."""
        return next((index for index, key in enumerate(keys) if not self.exists(key)), len(keys))

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """The page in `target_location`, a flat tensor of the pool's page; None if it is not to be had."""
        try:
            payload = self._store.get(self._key(key))
        except (GyreError, OSError) as error:
            log.error("page %s: %s", key, error)
            return None
        if payload is None or target_location is None or len(payload) != target_location.nbytes:
            return None
        page = torch.frombuffer(bytearray(payload), dtype=torch.uint8).view(target_location.dtype)
        target_location.copy_(page.view(target_location.shape))
        assert isinstance(target_location, torch.Tensor)
        return target_location

    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """One page per key, None from the first that is absent on."""
        pages: list[torch.Tensor | None] = []
        for key, target in zip(keys, target_locations, strict=True):
            lacking = bool(pages) and pages[-1] is None
            pages.append(None if lacking else self.get(key, target))
        return pages

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: Sequence[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Whether all these pages are in the store."""
        pages = ((self._key(key), _bytes(page)) for key, page in zip(keys, values, strict=True))
        try:
            return self._store.put(pages) == len(keys)
        except (GyreError, OSError) as error:
            log.error("%d pages not kept: %s", len(keys), error)
            return False

    def clear(self) -> None:
        """Forget every page."""
        self._store.keep_only(frozenset())

    def _key(self, key: str) -> PageKey:
        return PageKey(NAMESPACE, self._layout, bytes.fromhex(key))


def _bytes(page: torch.Tensor) -> memoryview:
    return page.detach().contiguous().view(-1).view(torch.uint8).numpy().data
