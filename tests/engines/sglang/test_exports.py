from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from gyre_hpc.engines.sglang.exports import full_pages, kept_pages
from gyre_hpc.engines.sglang.page_keys import page_keys
from gyre_hpc.kv.page_store import PageKey, PageStore

KEYS = page_keys("layout", "w1", list(range(40)), 4)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_the_last_token_has_no_kv(tokens: int, pages: int) -> None:
    assert full_pages(tokens, 4) == pages


async def test_what_is_still_being_written_is_waited_for(tmp_path: Path) -> None:
    store = PageStore(tmp_path, 1 << 20)
    store.put([(KEYS[0], b"first")])

    async def write() -> None:
        for key in KEYS[1:]:
            await asyncio.sleep(0.01)
            store.put([(key, b"later")])

    writing = asyncio.create_task(write())
    assert await kept_pages(store, KEYS, lease_s=60, patience_s=60) == KEYS
    await writing


class Hanging(PageStore):
    """On a file system that answers when the event loop has gone on meanwhile."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        super().__init__(folder, limit_bytes)
        self.answers = threading.Event()

    def lease(self, keys: Sequence[PageKey], seconds: float) -> int:
        assert self.answers.wait(10.0), "the event loop waits for the file system"
        return super().lease(keys, seconds)


async def test_a_slow_file_system_holds_up_nobody_but_who_asks(tmp_path: Path) -> None:
    store = Hanging(tmp_path, 1 << 20)
    store.put([(key, b"page") for key in KEYS])
    asyncio.get_running_loop().call_later(0.01, store.answers.set)
    assert await kept_pages(store, KEYS, lease_s=60) == KEYS


async def test_a_missing_page_ends_what_is_offered(tmp_path: Path) -> None:
    store = PageStore(tmp_path, 1 << 20)
    store.put([(key, b"page") for key in KEYS[:3] + KEYS[4:]])
    assert await kept_pages(store, KEYS, lease_s=60, patience_s=0.05) == KEYS[:3]


async def test_offered_pages_are_not_evicted(tmp_path: Path) -> None:
    store = PageStore(tmp_path, 4096)
    store.put([(KEYS[0], bytes(1000))])
    assert await kept_pages(store, KEYS[:1], lease_s=60, patience_s=0.05) == KEYS[:1]
    for key in KEYS[1:]:
        store.put([(key, bytes(1000))])
    assert store.has(KEYS[0])
