"""Two real SGLang servers on CPU, started once per session, on one page store and one tiny model."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import aiohttp
import pytest

from gyre_hpc.config import EngineConfig
from gyre_hpc.config_engine import SglangConfig
from gyre_hpc.engines.client import EngineClient
from gyre_hpc.engines.sglang.arguments import layout_seed, weights_dtype
from gyre_hpc.engines.sglang.page_keys import page_keys
from gyre_hpc.engines.sglang.process import SglangProcess
from gyre_hpc.engines.sglang.weights_checksum import expected_checksum
from gyre_hpc.engines.weights import read_weights
from gyre_hpc.kv.page_store import PageKey, PageStore
from gyre_hpc.records import Version
from tests.conftest import sglang_python

from ..models import write_model

PAGE = 16
CONTEXT = 2048
TOKEN = "token-of-the-tests"
START_S = 1500.0
"""Three processes import for a minute of CPU time each; a loaded machine takes its time."""
T = TypeVar("T")


class LoopThread:
    """An event loop in a thread that lives as long as the servers do."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Awaitable[T]) -> T:
        async def awaited() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(awaited(), self._loop).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


@dataclass
class Pair:
    """Servers A and B. `model` is what both serve as version 0, `next_model` other weights for it."""

    config: EngineConfig
    engines: tuple[SglangProcess, SglangProcess]
    urls: tuple[str, str]
    model: Path
    next_model: Path
    folder: Path
    loop: LoopThread

    @property
    def store(self) -> PageStore:
        return PageStore(self.folder, self.config.kv_store_mib << 20)

    def keys(self, kv_key: str, ids: list[int]) -> list[PageKey]:
        return page_keys(layout_seed(self.config, self.model), kv_key, ids, PAGE)

    def checksum(self, model: Path) -> str:
        dtype = weights_dtype(self.config, model)
        return expected_checksum(read_weights(model), self.config.sglang, model, dtype)


def long_model(folder: Path, seed: int) -> Path:
    """Two layers, four heads on two, with room for a long context."""
    write_model(folder, seed=seed, heads=4, kv_heads=2)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": CONTEXT}))
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two servers; no longer than they are needed: an idle one keeps a core busy."""
    root = tmp_path_factory.mktemp("sglang")
    sglang = SglangConfig(python=str(sglang_python()), device="cpu")
    config = EngineConfig(
        kind="sglang",
        page_tokens=PAGE,
        pool_tokens=8192,
        capacity=4,
        start_timeout_s=START_S,
        sglang=sglang,
    )
    model, store = long_model(root / "model", 1), root / "kv"
    a, b = (
        SglangProcess(
            config, model, Version(0), root / f"{name}.log", CONTEXT, seed, token=TOKEN, kv_store=store
        )
        for seed, name in enumerate("ab")
    )
    loop = LoopThread()

    async def start() -> list[str]:
        return await asyncio.gather(a.start(), b.start())

    async def stop() -> None:
        await asyncio.gather(a.stop(), b.stop())

    try:
        first, second = loop.run(start())
        yield Pair(config, (a, b), (first, second), model, long_model(root / "next", 2), store, loop)
    finally:
        loop.run(stop())
        loop.close()


@pytest.fixture
async def clients(pair: Pair) -> AsyncIterator[tuple[EngineClient, EngineClient]]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        a, b = (EngineClient(url, session, TOKEN) for url in pair.urls)
        yield a, b
