"""Live calls move between two real engines: pages first, tail last, and every token as an undisturbed model would have it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from gyre_hpc.engines.client import EngineClient
from gyre_hpc.engines.torch.forward import forward_logits
from gyre_hpc.engines.torch.server import listen
from gyre_hpc.engines.torch.service import Options, Service
from gyre_hpc.engines.weights import read_weights
from gyre_hpc.gateway.pages import Moved, PageMover
from gyre_hpc.gateway.rendering import Rendering
from gyre_hpc.gateway.routing import Router
from gyre_hpc.kv.client import PortClient
from gyre_hpc.kv.page_store import PageStore
from gyre_hpc.kv.port import PagePort
from gyre_hpc.models.shape import read_shape
from gyre_hpc.records import CallRecord, CellId, KvPolicy, Version
from gyre_hpc.transport.messages import StepName
from gyre_hpc.transport.regions import RegionServer
from tests.engines.models import write_model

from .fakes import RunningGateway

TOKEN, PAGE, MIB = "token", 16, 1 << 20
TEXT = "the tool result is here, and the quick brown fox jumps over the lazy dog; "


@dataclass
class Place:
    """A cell: engine, store, page port."""

    service: Service
    client: EngineClient
    port: PagePort

    @property
    def prefilled(self) -> int:
        return self.service.batcher.counters.tokens_prefilled


@dataclass
class Stage:
    """A gateway over two such cells; `steps` are what it told of moved pages."""

    gateway: RunningGateway
    places: list[Place]
    session: aiohttp.ClientSession
    model: Path
    steps: list[tuple[CellId, StepName, Moved]] = field(default_factory=list)

    def route(self, cell: int, version: int = 0, weights: str = "") -> None:
        place = self.places[cell]
        address = place.client.base_url
        self.gateway.engines[address] = place.client  # type: ignore[assignment]
        at = (CellId(cell), address, 8, Version(version), place.port.address)
        self.gateway.app.router.route(*at, weights=weights)

    async def chat(self, execution: int, text: str, max_tokens: int) -> dict[str, Any]:
        url = self.gateway.url.rpartition("/x/")[0]
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens}
        async with self.session.post(f"{url}/x/{key(execution)}/v1/chat/completions", json=body) as response:
            return dict(await response.json()) | {"status": response.status}

    async def until_sampled(self, calls: int, tokens: int) -> None:
        """Until so many unfinished calls have so many tokens each."""
        app = self.gateway.app
        while True:
            live = [call for it in app.executions.values() for call in it.calls.values() if not call.finish]
            if sum(len(call.ids) >= tokens for call in live) >= calls:
                return
            await asyncio.sleep(0.01)

    async def leave(self, cell: int, drain_s: float = 0.1) -> int:
        app = self.gateway.app
        return await app.pages.empty(CellId(cell), app.executions.values(), drain_s, moves=True)

    def check(self, record: CallRecord) -> None:
        """The recorded log-probs are those of one plain forward over prompt and output."""
        weights = {name: torch.from_numpy(array.copy()) for name, array in read_weights(self.model).items()}
        ids = [*record.prompt_ids.tolist(), *record.output_ids.tolist()]
        table = forward_logits(weights, read_shape(self.model), torch.tensor([ids]))[0].log_softmax(-1)
        rows = torch.arange(len(record.prompt_ids) - 1, len(ids) - 1)
        expected = table[rows, torch.tensor(record.output_ids.tolist())]
        np.testing.assert_allclose(record.logprobs, expected.numpy(), atol=2e-5)


def key(execution: int) -> str:
    return f"{execution:032d}"


async def place(stack: AsyncExitStack, name: str, folder: Path, model: Path, run: str, seed: int) -> Place:
    session = await stack.enter_async_context(aiohttp.ClientSession())
    store = PageStore(folder / name, 64 * MIB)
    options = Options(
        model,
        page_tokens=PAGE,
        pool_tokens=1 << 14,
        capacity=8,
        max_context=2000,
        weight_version="0",
        seed=seed,
        tokens_per_s=1600.0,
        kv_store=store.folder,
        kv_store_bytes=store.limit_bytes,
    )
    service = Service(options)
    runner, host, number = await listen(service, "127.0.0.1", 0)
    stack.push_async_callback(runner.cleanup)
    client = EngineClient(f"http://{host}:{number}", session)
    regions = RegionServer("127.0.0.1", name, run, secret=b"s" * 32)
    await regions.start()
    stack.callback(regions.close)
    port = PagePort("127.0.0.1", name, TOKEN, store, regions, client)
    await port.start()
    stack.push_async_callback(port.close)
    return Place(service, client, port)


@pytest.fixture(scope="module")
def policy(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    size = Tokenizer.from_file(str(model_dir / "tokenizer.json")).get_vocab_size()
    return write_model(tmp_path_factory.mktemp("policy"), seed=5, vocabulary=size)


@pytest.fixture
def kv_policy() -> KvPolicy:
    return KvPolicy.STRICT


@pytest.fixture
async def stage(
    rendering: Rendering, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv_policy: KvPolicy
) -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        run = uuid.uuid4().hex
        places = [await place(stack, f"cell-{i}", tmp_path, policy, run, i) for i in range(2)]
        session = await stack.enter_async_context(aiohttp.ClientSession())
        steps: list[tuple[CellId, StepName, Moved]] = []

        def pages(router: Router) -> PageMover:
            return PageMover(
                lambda address: PortClient(address, session, TOKEN),
                router,
                kv_policy,
                10.0,
                PAGE,
                lambda *step: steps.append(step),
            )

        gateway = await RunningGateway.start(rendering, tmp_path, pages)
        gateway.app.router.keeps_calls = kv_policy.keeps_calls
        sampler = gateway.app._sampler
        monkeypatch.setattr(sampler, "_stop_ids", frozenset())  # a call of so many tokens has so many
        monkeypatch.setattr(sampler, "_rendering", _Endless(rendering))
        stack.push_async_callback(gateway.stop)
        for execution in range(8):
            gateway.app.open_execution(execution, 1, key(execution))
        yield Stage(gateway, places, session, policy, steps)


class _Endless:
    """A rendering whose model never ends its turn."""

    stop_ids = ()

    def __init__(self, rendering: Rendering) -> None:
        self.text = rendering.text


async def test_running_calls_find_their_pages_where_they_go_on(stage: Stage) -> None:
    stage.route(0)
    chats = [asyncio.create_task(stage.chat(i, f"{i} " + TEXT * 10, 250)) for i in range(4)]
    await stage.until_sampled(4, 60)
    stage.route(1)
    cut = await stage.leave(0)
    answers = await asyncio.gather(*chats)
    assert [answer["status"] for answer in answers] == [200] * 4 and cut >= 2
    accounts = [(await stage.gateway.app.close_execution(i, 1))[0] for i in range(4)]
    due, found = (sum(getattr(it, name) for it in accounts) for name in ("pages_due", "pages_found"))
    assert due > 20 * cut and found >= 0.99 * due
    assert sum(account.tokens_recomputed for account in accounts) <= 2 * PAGE * cut
    assert stage.places[1].prefilled <= 2 * PAGE * cut
    for record in await stage.gateway.records():
        stage.check(record)
    kinds = [step for _, step, _ in stage.steps]
    assert kinds.count(StepName.PREFETCH) == 1 and kinds.count(StepName.EXPORT) == cut
    assert all(moved.outcome == "done" for _, _, moved in stage.steps)
    assert sum(moved.bytes for _, step, moved in stage.steps if step is StepName.PULL_PAGES) > 0


async def test_an_idle_executions_pages_are_there_before_its_next_call(stage: Stage) -> None:
    stage.route(0)
    await stage.chat(0, TEXT * 8, 20)
    stage.route(1)
    assert await stage.leave(0) == 0
    assert stage.gateway.app.executions[0, 1].home == CellId(1)
    await stage.chat(0, TEXT * 8, 21)
    assert stage.places[1].prefilled < 2 * PAGE
    for record in await stage.gateway.records():
        stage.check(record)


async def test_all_executions_sent_ahead_at_the_same_time_are_counted(stage: Stage) -> None:
    stage.route(0)
    await asyncio.gather(*(stage.chat(execution, TEXT, 5) for execution in range(6)))
    stage.route(1)
    await stage.leave(0)
    assert [moved.calls for _, step, moved in stage.steps if step is StepName.PREFETCH] == [6]


async def test_what_is_sent_ahead_is_told_once(stage: Stage) -> None:
    stage.route(0)
    await stage.chat(0, TEXT * 8, 20)
    stage.route(1)
    await stage.leave(0)
    pages = (await stage.gateway.records())[0]
    told = {step: (moved.pages, moved.bytes > 0) for _, step, moved in stage.steps}
    full = (len(pages.prompt_ids) + len(pages.output_ids) - 1) // PAGE
    assert told == {StepName.PULL_PAGES: (full, True), StepName.PREFETCH: (0, False)}


async def test_without_a_page_port_the_call_is_prefilled_again_and_counted(stage: Stage) -> None:
    stage.route(0)
    chat = asyncio.create_task(stage.chat(0, TEXT * 8, 200))
    await stage.until_sampled(1, 40)
    await stage.places[0].port.close()
    stage.route(1)
    assert await stage.leave(0) == 1 and (await chat)["status"] == 200
    account, _ = await stage.gateway.app.close_execution(0, 1)
    assert account.pages_found == 0 < account.pages_due
    assert account.tokens_recomputed > account.pages_due * PAGE
    (record,) = await stage.gateway.records()
    stage.check(record)


async def test_pages_of_older_weights_are_not_asked_for(stage: Stage) -> None:
    stage.route(0)
    chat = asyncio.create_task(stage.chat(0, TEXT * 8, 200))
    await stage.until_sampled(1, 40)
    stage.places[1].service.batcher.set_version("1", flush=True)
    stage.route(1, version=1)
    assert await stage.leave(0) == 1 and (await chat)["status"] == 200
    account, _ = await stage.gateway.app.close_execution(0, 1)
    assert (account.pages_found, account.pages_due) == (0, 0), "void, not lost"
    assert account.tokens_recomputed > 0
    assert not [step for _, step, _ in stage.steps if step is StepName.PULL_PAGES]
    (record,) = await stage.gateway.records()
    assert set(record.versions.tolist()) == {0, 1}


async def test_pages_of_other_weights_under_the_same_version_are_not_asked_for(stage: Stage) -> None:
    """As when the host that had journaled the version was lost, and it is made again."""
    stage.route(0, weights="ab")
    chat = asyncio.create_task(stage.chat(0, TEXT * 8, 200))
    await stage.until_sampled(1, 40)
    stage.route(1, weights="cd")
    assert await stage.leave(0) == 1 and (await chat)["status"] == 200
    account, _ = await stage.gateway.app.close_execution(0, 1)
    assert (account.pages_found, account.pages_due) == (0, 0) and account.tokens_recomputed > 0
    assert not [step for _, step, _ in stage.steps if step is StepName.PULL_PAGES]


async def load(stage: Stage, cell: int, model: Path, version: int) -> None:
    """What a cell does at a publication under keep_execution, and the Route that follows."""
    client = stage.places[cell].client
    await client.pause("in_place")
    await client.load(str(model), Version(version), keep_kv=True)
    await client.resume_generation()
    stage.route(cell, version=version)


@pytest.mark.parametrize("kv_policy", [KvPolicy.KEEP_EXECUTION])
async def test_under_keep_execution_a_call_outlives_a_publication_and_its_pages_move_on(
    stage: Stage, tmp_path: Path
) -> None:
    vocabulary = read_shape(stage.model).vocab_size
    newer = write_model(tmp_path / "newer", seed=6, vocabulary=vocabulary)
    stage.route(0)
    chat = asyncio.create_task(stage.chat(0, TEXT * 8, 300))
    await stage.until_sampled(1, 40)
    await load(stage, 0, newer, 1)
    await stage.until_sampled(1, 120)
    (call,) = stage.gateway.app.executions[0, 1].calls.values()
    assert call.reroutes == 0, "the publication cut nothing"
    await load(stage, 1, newer, 1)
    assert await stage.leave(0) == 1 and (await chat)["status"] == 200
    account, _ = await stage.gateway.app.close_execution(0, 1)
    assert account.pages_due > 0 and account.pages_found >= 0.99 * account.pages_due
    assert (account.kv_lag, call.kv_version) == (1, 0)
    (record,) = await stage.gateway.records()
    assert set(record.versions.tolist()) == {0, 1} and len(record.output_ids) == 300


@pytest.mark.parametrize("kv_policy", [KvPolicy.KEEP_EXECUTION])
async def test_under_keep_execution_no_other_execution_finds_its_pages(stage: Stage) -> None:
    stage.route(0)
    await stage.chat(0, TEXT * 8, 5)
    before = stage.places[0].prefilled
    await stage.chat(1, TEXT * 8, 5)
    assert stage.places[0].prefilled - before > 8 * PAGE
