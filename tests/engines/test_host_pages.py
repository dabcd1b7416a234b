"""KV pages leave an engine while it samples, and another finds them as if it had computed them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from gyre_hpc.engines.client import EngineRefused
from gyre_hpc.engines.torch.service import Options
from gyre_hpc.engines.wire import EncodedIds
from gyre_hpc.kv.page_store import PageKey, PageStore

from .models import PAGE, VOCABULARY, transformers_logprobs
from .test_server import Engine, served

PROMPT = [(5 * k + 2) % VOCABULARY for k in range(12 * PAGE + 3)]
LIMIT = 1 << 22


@asynccontextmanager
async def with_store(model: Path, folder: Path, seed: int = 0, limit: int = LIMIT) -> AsyncIterator[Engine]:
    options = Options(
        model,
        page_tokens=PAGE,
        pool_tokens=2048,
        capacity=4,
        max_context=512,
        weight_version="0",
        seed=seed,
        tokens_per_s=0.0,
        kv_store=folder,
        kv_store_bytes=limit,
    )
    async with served(options) as engine:
        yield engine


def hand_over(source: Path, target: Path, keys: list[PageKey]) -> None:
    """What a destination's pull does: the pages of one store into another."""
    here, there = PageStore(source, LIMIT), PageStore(target, LIMIT)
    there.put([(key, page) for key in keys if (page := here.get(key)) is not None])


async def export(engine: Engine, ids: list[int], namespace: str = "w0") -> list[PageKey]:
    answer = await engine.client.export(EncodedIds.of(ids), namespace, 30.0)
    assert answer.page_tokens == PAGE
    return [PageKey(namespace, bytes.fromhex(answer.layout), bytes.fromhex(key)) for key in answer.keys]


async def test_a_running_calls_pages_are_exported_and_the_moved_call_prefills_only_its_tail(
    model: Path, tmp_path: Path
) -> None:
    async with with_store(model, tmp_path / "a") as here, with_store(model, tmp_path / "b", 1) as there:
        part = None
        async for chunk in here.client.generate("call.", PROMPT, 400, "w0"):
            if part is None:
                part = (list(chunk.ids), list(chunk.logprobs))
                early = await export(here, PROMPT + part[0])
                assert len(early) >= len(PROMPT) // PAGE
                continue
            part[0].extend(chunk.ids)
            part[1].extend(chunk.logprobs)
            if len(part[0]) > 5 * PAGE and chunk.finish is None:
                await here.client.abort("call.")
        assert part is not None
        ids = PROMPT + part[0]
        keys = await export(here, ids)
        assert len(keys) >= (len(ids) - 1) // PAGE
        hand_over(tmp_path / "a", tmp_path / "b", keys)
        rest = await there.generate("rest.", ids, 20)
        assert rest.cached_tokens == (len(ids) - 1) // PAGE * PAGE
        assert there.service.batcher.counters.tokens_prefilled < 2 * PAGE
        joined = part[1] + rest.logprobs
        expected = transformers_logprobs(model, ids + rest.ids, len(PROMPT))
        np.testing.assert_allclose(joined, expected, atol=1e-5)


def _flip(data: bytes) -> bytes:
    return data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]


@pytest.mark.parametrize("damage", [_flip, lambda data: data[:-1], lambda data: b""])
async def test_behind_a_damaged_page_the_engine_computes_by_itself(
    model: Path, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    async with with_store(model, tmp_path / "a") as here, with_store(model, tmp_path / "b", 1) as there:
        await here.generate("first.", PROMPT, 4)
        keys = await export(here, PROMPT)
        hand_over(tmp_path / "a", tmp_path / "b", keys)
        torn = PageStore(tmp_path / "b", LIMIT).path(keys[3])
        torn.write_bytes(damage(torn.read_bytes()))
        answer = await there.generate("moved.", PROMPT, 10)
        assert answer.cached_tokens == 3 * PAGE
        expected = transformers_logprobs(model, PROMPT + answer.ids, len(PROMPT))
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-5)


async def test_pages_of_another_namespace_or_another_model_are_never_found(
    model: Path, untied_model: Path, tmp_path: Path
) -> None:
    async with with_store(model, tmp_path / "kv") as here:
        await here.generate("first.", PROMPT, 4)
        assert len(await export(here, PROMPT)) == len(PROMPT) // PAGE
        assert await export(here, PROMPT, "w1") == []
    async with with_store(model, tmp_path / "kv", 1) as again:
        assert (await again.generate("other.", PROMPT, 2, key="w1")).cached_tokens == 0
        assert (await again.generate("same.", PROMPT, 2)).cached_tokens == len(PROMPT) // PAGE * PAGE
    async with with_store(untied_model, tmp_path / "kv") as foreign:
        assert (await foreign.generate("foreign.", PROMPT, 2)).cached_tokens == 0


async def test_without_a_store_or_without_memory_there_is_nothing_to_export(
    model: Path, tmp_path: Path
) -> None:
    async with with_store(model, tmp_path / "kv") as engine:
        assert (await engine.client.server_info()).capabilities.can_export_live
        await engine.client.release()
        with pytest.raises(EngineRefused, match="no KV pages to export"):
            await export(engine, PROMPT)


async def test_only_pages_that_the_store_took_are_counted_as_exported(model: Path, tmp_path: Path) -> None:
    async with with_store(model, tmp_path / "whole") as engine:
        await engine.generate("first.", PROMPT, 4)
        pages = len(await export(engine, PROMPT))
        assert (await engine.client.server_info()).pages_exported == pages == len(PROMPT) // PAGE
    room = PageStore(tmp_path / "whole", LIMIT).used_bytes // 2
    async with with_store(model, tmp_path / "half", limit=room) as engine:
        await engine.generate("first.", PROMPT, 4)
        kept = len(await export(engine, PROMPT))
        assert 0 < kept < pages
        assert (await engine.client.server_info()).pages_exported == kept
