"""Which pages of a call the cell's store has: SGLang writes them through on its own, so exporting is waiting for the tail.

A prompt's pages are written after its prefill, those of the output when the call has ended or was cut. The last token of a
call has no KV yet, and a partial page is never stored: both are computed again wherever the call goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final

from gyre_hpc.engines.sglang.page_keys import NAMESPACE, page_keys, rank_layout
from gyre_hpc.engines.wire import EncodedIds, ExportAnswer
from gyre_hpc.kv.page_store import PageKey, PageStore

POLL_S: Final = 0.02
"""Interval of looking for pages that are being written."""
PATIENCE_S: Final = 1.0
"""Seconds without a further page after which no more is expected: they were evicted, or never computed."""


def full_pages(tokens: int, page_tokens: int) -> int:
    """Pages of a call with so many tokens that have KV and are full."""
    return max(0, tokens - 1) // page_tokens


async def kept_pages(
    store: PageStore, keys: Sequence[PageKey], lease_s: float, patience_s: float = PATIENCE_S
) -> list[PageKey]:
    """The leading keys whose pages the store has, leased; waits while more of them appear.

    Each look is a call to the file system per page, of a parallel one perhaps: in a thread, so that the cell hears what it is told.
    """
    here, news = await asyncio.to_thread(store.lease, keys, lease_s), time.monotonic()
    while here < len(keys) and time.monotonic() - news < patience_s:
        await asyncio.sleep(POLL_S)
        more = await asyncio.to_thread(store.lease, keys[here:], lease_s)
        if more:
            here, news = here + more, time.monotonic()
    return list(keys[:here])


async def written_through(
    store: PageStore, seed: str, kv_key: str, ids: EncodedIds, page_tokens: int, lease_s: float
) -> ExportAnswer:
    """The pages of these ids that an engine of one rank has written to the store (`seed`: `arguments.layout_seed`)."""
    keys = await asyncio.to_thread(page_keys, seed, kv_key, ids.ids(), page_tokens)
    keys = keys[: full_pages(ids.count, page_tokens)]
    return offer_of(seed, page_tokens, await kept_pages(store, keys, lease_s))


def offer_of(seed: str, page_tokens: int, kept: Sequence[PageKey]) -> ExportAnswer:
    """The answer that offers these pages of an engine of one rank."""
    return ExportAnswer(
        layout=rank_layout(seed).hex(),
        page_tokens=page_tokens,
        keys=[key.prefix.hex() for key in kept],
        namespace=NAMESPACE,
    )
