from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
import pytest

from gyre_hpc.engines import wire
from gyre_hpc.engines.client import Chunk, EngineClient, EngineRefused
from gyre_hpc.engines.torch.server import Endpoints, listen
from gyre_hpc.engines.torch.service import Options, Service
from gyre_hpc.engines.weights import read_weights, weights_digest
from gyre_hpc.engines.wire import ids_xxh3
from gyre_hpc.records import Version

from .models import PAGE, transformers_logprobs, write_model

PROMPT = [5 + k for k in range(3 * PAGE + 1)]


@dataclass
class Answer:
    """A whole generation, joined from its chunks."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: str | None = None
    cached_tokens: int = 0

    def add(self, chunk: Chunk) -> None:
        assert len(chunk.ids) == len(chunk.logprobs) == len(chunk.versions)
        self.ids += chunk.ids
        self.logprobs += chunk.logprobs
        self.versions += chunk.versions
        self.finish, self.cached_tokens = chunk.finish, chunk.cached_tokens


@dataclass
class Engine:
    """A served engine, its client, and its inside."""

    client: EngineClient
    service: Service
    session: aiohttp.ClientSession

    async def generate(
        self, rid: str, ids: list[int], budget: int, key: str = "w0", stop: Sequence[int] = ()
    ) -> Answer:
        answer = Answer()
        async for chunk in self.client.generate(rid, ids, budget, key, stop):
            answer.add(chunk)
        return answer

    async def post(self, path: str, body: object) -> tuple[int, bytes]:
        async with self.session.post(self.client.base_url + path, data=msgspec.json.encode(body)) as response:
            return response.status, await response.read()

    async def until_sampled(self, tokens: int) -> None:
        """Until the engine has sampled `tokens` in all."""
        while self.service.batcher.counters.tokens_sampled < tokens:
            await asyncio.sleep(0)


def options(model: Path, tokens_per_s: float = 0.0) -> Options:
    return Options(
        model,
        page_tokens=PAGE,
        pool_tokens=2048,
        capacity=4,
        max_context=512,
        weight_version="0",
        seed=0,
        tokens_per_s=tokens_per_s,
    )


@asynccontextmanager
async def served(settings: Options, token: str = "") -> AsyncIterator[Engine]:
    service = Service(settings)
    runner, host, port = await listen(service, "127.0.0.1", 0, token)
    async with aiohttp.ClientSession() as session:
        yield Engine(EngineClient(f"http://{host}:{port}", session, token), service, session)
    await runner.cleanup()


@pytest.fixture
async def engine(model: Path) -> AsyncIterator[Engine]:
    async with served(options(model)) as engine:
        yield engine


async def test_concurrent_streams_carry_the_logprobs_of_transformers(engine: Engine, model: Path) -> None:
    prompts = [[*PROMPT, i] for i in range(6)]
    answers = await asyncio.gather(
        *(engine.generate(f"c{i}.", prompt, 40) for i, prompt in enumerate(prompts))
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        assert (answer.finish, len(answer.ids), set(answer.versions)) == ("length", 40, {0})
        expected = transformers_logprobs(model, prompt + answer.ids, len(prompt))
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-5)
    assert sorted(answer.cached_tokens for answer in answers) == [0] + [3 * PAGE] * 5


async def test_the_first_chunk_says_which_prompt_was_given(engine: Engine) -> None:
    told = [chunk.prompt_xxh3 async for chunk in engine.client.generate("told.", PROMPT, 20, "w0")]
    assert told[0] == ids_xxh3(PROMPT) and not any(told[1:])


async def test_an_aborted_call_returns_what_it_has_and_continues_with_it(engine: Engine, model: Path) -> None:
    cut = asyncio.create_task(engine.generate("cut.", PROMPT, 400))
    await engine.until_sampled(7)
    await engine.client.abort("cut.")
    part = await cut
    assert part.finish == "abort" and len(part.ids) >= 7
    rest = await engine.generate("rest.", PROMPT + part.ids, 10, key="w1")
    joined = part.ids + rest.ids
    expected = transformers_logprobs(model, PROMPT + joined, len(PROMPT))
    np.testing.assert_allclose(part.logprobs + rest.logprobs, expected, atol=1e-5)


async def test_an_abort_sent_before_the_engine_knows_the_call_is_not_lost(engine: Engine) -> None:
    await engine.client.pause("in_place")
    call = asyncio.create_task(engine.generate("call.", PROMPT, 400))
    await asyncio.sleep(0)
    await engine.client.abort("call.")
    answer = await call
    assert (answer.finish, answer.ids) == ("abort", [])


async def test_a_stop_token_ends_the_stream_and_is_part_of_it(engine: Engine) -> None:
    stop = list(range(0, 97, 2))
    answer = await engine.generate("call.", PROMPT, 400, stop=stop)
    assert answer.finish == "stop"
    assert [token in stop for token in answer.ids] == [False] * (len(answer.ids) - 1) + [True]


async def test_the_models_own_end_token_stops_unless_told_to_ignore_it(tmp_path: Path) -> None:
    folder = write_model(tmp_path, seed=1, eos=list(range(0, 97, 2)))
    async with served(options(folder)) as engine:
        assert (await engine.generate("stops.", PROMPT, 100)).finish == "stop"
        params = {"max_new_tokens": 100, "ignore_eos": True}
        _, raw = await engine.post("/generate", {"input_ids": PROMPT, "sampling_params": params})
        assert len(msgspec.json.decode(raw, type=wire.GenerateEvent).output_ids) == 100


async def test_a_client_that_goes_away_ends_its_call(engine: Engine) -> None:
    stream = engine.client.generate("gone.", PROMPT, 400, "w0")
    await anext(stream)
    await stream.aclose()
    while engine.service.batcher.calls():
        await asyncio.sleep(0.001)
    assert engine.service.batcher.pool.held == 0


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_an_update_under_a_live_call_shows_in_its_versions(
    engine: Engine, next_model: Path, mode: str
) -> None:
    call = asyncio.create_task(engine.generate("call.", PROMPT, 60, key="w0"))
    await engine.until_sampled(3)
    await engine.client.pause(mode)  # type: ignore[arg-type]
    held = engine.service.batcher.counters.tokens_sampled
    if mode == "retract":
        await engine.client.flush()
    await engine.client.load(str(next_model), Version(7))
    assert engine.service.batcher.counters.tokens_sampled == held
    await engine.client.resume_generation()
    answer = await call
    assert answer.versions == [0] * held + [7] * (len(answer.ids) - held)
    assert held < len(answer.ids)


async def test_the_checksum_confirms_the_version_loaded(
    engine: Engine, model: Path, next_model: Path
) -> None:
    assert await engine.client.checksum() == weights_digest(read_weights(model))
    await engine.client.load(str(next_model), Version(1))
    assert await engine.client.checksum() == weights_digest(read_weights(next_model))
    answer = await engine.generate("call.", PROMPT, 10, key="w1")
    assert set(answer.versions) == {1}
    expected = transformers_logprobs(next_model, PROMPT + answer.ids, len(PROMPT))
    np.testing.assert_allclose(answer.logprobs, expected, atol=1e-5)
    assert (await engine.client.server_info()).weight_version == "1"


async def test_a_load_that_fails_leaves_the_old_weights_served(
    engine: Engine, model: Path, tmp_path: Path
) -> None:
    other = write_model(tmp_path, seed=1, layers=1)
    for path in (str(tmp_path / "missing"), str(other)):
        with pytest.raises(EngineRefused, match=path):
            await engine.client.load(path, Version(1))
    assert await engine.client.checksum() == weights_digest(read_weights(model))
    assert set((await engine.generate("call.", PROMPT, 3)).versions) == {0}


async def test_an_update_outside_begin_and_end_is_refused(engine: Engine, next_model: Path) -> None:
    status, body = await engine.post("/update_weights_from_disk", {"model_path": str(next_model)})
    answer = msgspec.json.decode(body, type=wire.UpdateAnswer)
    assert (status, answer.success) == (400, False)
    assert "/begin_weight_update" in answer.message


async def test_release_frees_memory_and_a_loaded_engine_serves_again(
    engine: Engine, next_model: Path
) -> None:
    before = await engine.client.server_info()
    assert min(before.memory["kv_cache"], before.memory["weights"], before.free_pool_tokens) > 0
    assert before.capabilities.frees_memory
    running = asyncio.create_task(engine.generate("running.", PROMPT, 400))
    await engine.until_sampled(1)
    with pytest.raises(EngineRefused, match=r"1 calls hold pages"):
        await engine.client.release()
    await engine.client.pause("abort")
    assert (await running).finish == "abort"
    for _ in range(2):
        await engine.client.release()
    info = await engine.client.server_info()
    assert info.memory == {"kv_cache": 0, "weights": 0}
    assert (info.released, info.weight_version) == (["kv_cache", "weights"], "")
    with pytest.raises(EngineRefused, match="kv_cache, weights released") as refused:
        await engine.generate("early.", PROMPT, 3)
    assert refused.value.status == 503
    for _ in range(2):
        await engine.client.resume()
    with pytest.raises(EngineRefused, match="no weights loaded"):
        await engine.generate("empty.", PROMPT, 3)
    assert await engine.client.health() and not await engine.client.ready()
    await engine.client.load(str(next_model), Version(3))
    await engine.client.resume_generation()
    assert await engine.client.ready()
    answer = await engine.generate("late.", PROMPT, 3)
    assert (answer.cached_tokens, set(answer.versions)) == (0, {3})


async def test_calls_that_wait_when_memory_is_released_end_without_a_token(engine: Engine) -> None:
    await engine.client.pause("abort")
    waiting = asyncio.create_task(engine.generate("waiting.", PROMPT, 5))
    while not engine.service.batcher.waiting:
        await asyncio.sleep(0.001)
    await engine.client.release(["kv_cache"])
    answer = await waiting
    assert (answer.finish, answer.ids) == ("abort", [])


async def test_flush_is_refused_under_calls_and_forgets_pages_between_them(engine: Engine) -> None:
    running = asyncio.create_task(engine.generate("running.", PROMPT, 400))
    await engine.until_sampled(1)
    with pytest.raises(EngineRefused, match="flush_cache"):
        await engine.client.flush()
    await engine.client.abort_all()
    await running
    await engine.client.flush()
    assert (await engine.generate("next.", PROMPT, 2)).cached_tokens == 0


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/generate", {}, "sampling_params"),
        ("/generate", {"sampling_params": {"max_new_tokens": 1}}, "input_ids"),
        ("/generate", {"input_ids": ["x"], "sampling_params": {"max_new_tokens": 1}}, "input_ids"),
        ("/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
        ("/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 512}}, "max_new_tokens"),
        ("/generate", {"input_ids": [10**6], "sampling_params": {"max_new_tokens": 1}}, "input_ids"),
        ("/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 1, "top_p": 0.9}}, "top_p"),
        (
            "/generate",
            {"input_ids": [1], "sampling_params": {"max_new_tokens": 1, "temperature": 0.7}},
            "temperature",
        ),
        ("/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 1, "min_p": 0.1}}, "min_p"),
        ("/pause_generation", {"mode": "softly"}, "mode"),
        ("/release_memory_occupation", {"tags": ["everything"]}, "tags"),
    ],
)
async def test_a_bad_body_is_refused_naming_the_field(
    engine: Engine, path: str, body: object, named: str
) -> None:
    status, answer = await engine.post(path, body)
    assert status == 400
    assert named in msgspec.json.decode(answer, type=wire.ErrorAnswer).error.message
    assert await engine.client.health()


async def test_an_answer_without_streaming_is_whole(engine: Engine) -> None:
    params = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    body = {"rid": "whole", "input_ids": PROMPT, "sampling_params": params, "return_logprob": True}
    status, raw = await engine.post("/generate", body)
    answer = msgspec.json.decode(raw, type=wire.GenerateEvent)
    assert status == 200 and answer.meta_info is not None
    meta = answer.meta_info
    assert (meta.id, meta.prompt_tokens, meta.completion_tokens) == ("whole", len(PROMPT), 6)
    assert meta.finish_reason == wire.FinishInfo("length", length=6)
    assert [entry[1] for entry in meta.output_token_logprobs] == answer.output_ids
    assert meta.weight_versions == [wire.WeightVersionSpan("0", 0, 6)]


async def test_a_paced_engine_emits_no_faster_than_its_rate(model: Path) -> None:
    async with served(options(model, tokens_per_s=200.0)) as engine:
        clock = asyncio.get_running_loop().time
        started = clock()
        await asyncio.gather(*(engine.generate(f"c{i}.", [3, 4, i + 5], 30) for i in range(2)))
        assert clock() - started >= 60 / 200.0 - 0.15


async def test_a_call_alone_on_a_paced_engine_gets_only_its_share(model: Path) -> None:
    settings = options(model, tokens_per_s=200.0)
    async with served(settings) as engine:
        clock = asyncio.get_running_loop().time
        started = clock()
        await engine.generate("alone.", [3, 4, 5], 20)
        assert clock() - started >= 20 * settings.capacity / 200.0 - 0.15


@pytest.mark.parametrize(
    "credential", [None, "", "Bearer ", "Bearer wrong", "token", "Basic token", "Bearer t\u00f6ken"]
)
async def test_without_the_token_nothing_but_health_is_served(model: Path, credential: str | None) -> None:
    headers = {} if credential is None else {"Authorization": credential}
    async with served(options(model), "token") as engine:
        url = engine.client.base_url
        for route in Endpoints(engine.service).routes():
            async with engine.session.request(route.method, url + route.path, headers=headers) as response:
                assert response.status == (200 if route.path == "/health" else 401), route.path
                if response.status == 401:
                    assert "Unauthorized" in (await response.json())["error"]["message"]
        assert engine.service.batcher.counters.tokens_sampled == 0 and not engine.service.paused


async def test_the_token_opens_every_endpoint_to_the_client(model: Path) -> None:
    async with served(options(model), "token") as engine:
        assert await engine.client.ready()
        assert len((await engine.generate("call", PROMPT, 5)).ids) > 0
        await engine.client.pause("abort")
        with pytest.raises(EngineRefused, match="401"):
            await EngineClient(engine.client.base_url, engine.session, "other").resume_generation()
        assert engine.service.paused
