"""The real SGLang 0.5.21 on CPU behind our client, storage backend and checksums. Slow to start: one pair for all.

The last test kills server A; tests that need both stand before it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import numpy as np
import psutil
import pytest

from gyre_hpc.engines.client import EngineClient, EngineRefused, EngineUnreachable
from gyre_hpc.engines.sglang.exports import full_pages, kept_pages
from gyre_hpc.engines.sglang.process import group_members
from gyre_hpc.records import Version

from ..models import VOCABULARY, transformers_logprobs
from .conftest import PAGE, Pair

pytestmark = [pytest.mark.sglang, pytest.mark.full]

Clients = tuple[EngineClient, EngineClient]
NEAR = 1e-5
"""Largest difference of a log-prob to transformers' float32."""
WAIT_S = 120.0
_names = (f"call-{index}-" for index in itertools.count())
"""No call id is a prefix of another."""


@dataclass
class Output:
    """What a call has sampled."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    cached: int = 0
    finish: str | None = None

    async def of(
        self, client: EngineClient, prompt: list[int], tokens: int, kv_key: str, rid: str = ""
    ) -> Output:
        async for chunk in client.generate(rid or next(_names), prompt, tokens, kv_key):
            self.ids += chunk.ids
            self.logprobs += chunk.logprobs
            self.versions += chunk.versions
            self.cached, self.finish = chunk.cached_tokens, chunk.finish
        return self


def prompt(seed: int, tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, VOCABULARY) for _ in range(tokens)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.02)


async def eventually(action: Callable[[], Awaitable[None]]) -> None:
    """Repeat what is refused while the engine is busy."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                return await action()
            except EngineRefused:
                await asyncio.sleep(0.05)


def assert_near(pair_model: object, ids: list[int], logprobs: list[float], prompt_tokens: int) -> None:
    reference = transformers_logprobs(pair_model, ids, prompt_tokens)  # type: ignore[arg-type]
    assert len(reference) == len(logprobs)
    assert np.abs(np.array(logprobs) - reference).max() < NEAR


async def test_what_is_sampled_has_the_logprobs_of_transformers(pair: Pair, clients: Clients) -> None:
    ids = prompt(1, 100)
    out = await Output().of(clients[0], ids, 60, "w0")
    assert (len(out.ids), out.finish) == (60, "length")
    assert out.versions == [0] * 60
    assert len(set(out.ids)) > 20
    assert_near(pair.model, ids + out.ids, out.logprobs, len(ids))


async def test_only_who_knows_the_token_is_served(pair: Pair, clients: Clients) -> None:
    stranger = EngineClient(pair.urls[0], clients[0]._session, "another")
    with pytest.raises(EngineRefused, match="401"):
        await Output().of(stranger, [5, 6, 7], 1, "w0")
    with pytest.raises(EngineRefused, match="401"):
        await stranger.pause()
    assert await clients[0].ready()


async def test_the_token_is_in_no_place_where_others_look(pair: Pair) -> None:
    for engine in pair.engines:
        assert engine.pid is not None
        for pid in group_members(engine.pid):
            process = psutil.Process(pid)
            assert engine.token not in " ".join([*process.cmdline(), *process.environ().values()])
        assert engine.token not in engine.log_path.read_text()


async def test_a_notice_to_the_whole_step_ends_no_process_of_it(pair: Pair, clients: Clients) -> None:
    engine = pair.engines[0]
    assert engine.pid is not None
    before = group_members(engine.pid)
    for pid in before:
        os.kill(pid, signal.SIGTERM)
    out = await Output().of(clients[0], prompt(8, 30), 20, "w0")
    assert out.finish == "length"
    assert group_members(engine.pid) == before


async def test_a_live_call_moves_with_its_pages_and_loses_no_token(pair: Pair, clients: Clients) -> None:
    a, b = clients
    ids, first = prompt(2, 600), Output()
    running = asyncio.create_task(first.of(a, ids, 800, "w0", "moved-at-a"))
    await until(lambda: len(first.ids) >= 70)
    await a.abort("moved-at-a")
    await running
    assert first.finish == "abort"
    received = ids + first.ids
    pages = full_pages(len(received), PAGE)
    keys = pair.keys("w0", received)[:pages]
    assert await kept_pages(pair.store, keys, lease_s=600, patience_s=WAIT_S) == keys
    second = await Output().of(b, received, 40, "w0", "moved-at-b")
    assert second.cached == pages * PAGE
    assert_near(pair.model, received + second.ids, first.logprobs + second.logprobs, len(ids))


async def test_pages_of_another_namespace_are_not_found(pair: Pair, clients: Clients) -> None:
    ids = prompt(3, 200)
    await Output().of(clients[0], ids, 1, "w0")
    keys = pair.keys("w0", ids)
    assert await kept_pages(pair.store, keys, 60, WAIT_S) == keys
    assert (await Output().of(clients[1], ids, 1, "w1")).cached == 0


async def test_a_damaged_page_is_computed_and_not_served(pair: Pair, clients: Clients) -> None:
    ids = prompt(4, 200)
    await Output().of(clients[0], ids, 1, "w0")
    keys = pair.keys("w0", ids)
    assert await kept_pages(pair.store, keys, 60, WAIT_S) == keys
    damaged = pair.store.path(keys[2])
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    out = await Output().of(clients[1], ids, 20, "w0")
    assert out.cached == 2 * PAGE
    assert_near(pair.model, ids + out.ids, out.logprobs, len(ids))


async def test_weights_under_a_running_call_are_told_token_by_token(pair: Pair, clients: Clients) -> None:
    a = clients[0]
    out = Output()
    running = asyncio.create_task(out.of(a, prompt(5, 40), 400, "kept"))
    await until(lambda: len(out.ids) >= 20)
    await a.pause("in_place")
    before = len(out.ids)
    await a.load(str(pair.next_model), Version(1), keep_kv=True)
    await a.resume_generation()
    await running
    assert len(out.ids) == 400
    assert out.versions == sorted(out.versions)
    assert set(out.versions) == {0, 1}
    assert out.versions.count(0) >= before
    await a.pause("abort")
    await a.load(str(pair.model), Version(2))
    await a.resume_generation()
    assert await a.checksum() == pair.checksum(pair.model)


async def test_an_engine_gives_its_memory_up_and_comes_back_with_confirmed_weights(
    pair: Pair, clients: Clients
) -> None:
    b = clients[1]
    assert await b.checksum() == pair.checksum(pair.model) != pair.checksum(pair.next_model)
    await b.pause("abort")
    assert not await b.ready()
    await eventually(b.flush)
    await b.release()
    await b.resume()
    await b.load(str(pair.next_model), Version(3))
    assert await b.checksum() == pair.checksum(pair.next_model)
    await b.resume_generation()
    assert await b.ready()
    ids = prompt(6, 50)
    out = await Output().of(b, ids, 20, "w3")
    assert set(out.versions) == {3}
    assert_near(pair.next_model, ids + out.ids, out.logprobs, len(ids))


async def test_weights_that_do_not_exist_are_refused_and_the_old_ones_stay(
    pair: Pair, clients: Clients
) -> None:
    b = clients[1]
    before = await b.checksum()
    await b.pause("abort")
    with pytest.raises(EngineRefused):
        await b.load(str(pair.model / "nowhere"), Version(4))
    assert await b.checksum() == before
    await b.load(str(pair.model), Version(5))
    assert await b.checksum() == pair.checksum(pair.model)
    await b.resume_generation()


async def test_a_call_outlives_the_engine_that_is_killed_under_it(pair: Pair, clients: Clients) -> None:
    a, b = clients
    engine = pair.engines[0]
    assert engine.pid is not None
    ids, first = prompt(7, 120), Output()
    running = asyncio.create_task(first.of(a, ids, 800, "w5"))
    await until(lambda: len(first.ids) >= 30)
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineUnreachable):
        await running
    assert pair.loop.run(engine.wait()) == -signal.SIGKILL
    assert group_members(engine.pid) == []
    received = ids + first.ids
    second = await Output().of(b, received, 20, "w5")
    assert_near(pair.model, received + second.ids, first.logprobs + second.logprobs, len(ids))
