"""Sub-agents that ask the same, and clients that leave: through real sockets, with the vendors' clients and a real engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from gyre_hpc.engines.client import EngineClient
from gyre_hpc.gateway.rendering import Rendering
from gyre_hpc.records import CellId, Delivery, FinishReason, Version
from tests.engines.test_server import options, served

from .fakes import RunningGateway
from .faults.speaking_model import write_speaking_model

ASK: Any = [{"role": "user", "content": "find it"}]
Client = Callable[[RunningGateway], Awaitable[str]]


async def claude(gateway: RunningGateway) -> str:
    async with (
        anthropic.AsyncAnthropic(base_url=gateway.url, api_key="x", max_retries=0) as client,
        client.messages.stream(model="m", max_tokens=300, messages=ASK) as stream,
    ):
        return await stream.get_final_text()


async def chat(gateway: RunningGateway) -> str:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as client:
        answer = await client.chat.completions.create(model="m", messages=ASK)
        return answer.choices[0].message.content or ""


async def responses(gateway: RunningGateway) -> str:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as client:
        return (await client.responses.create(model="m", input=ASK)).output_text


CLIENTS = pytest.mark.parametrize("client", [claude, chat, responses])


class Distinct:
    """Answers to one prompt in the order of its generations, each continued by its own tokens."""

    def __init__(self, gateway: RunningGateway, answers: list[str]) -> None:
        self._outputs = [gateway.app.rendering.tokenizer.encode(answer) for answer in answers]
        self._fresh = list(self._outputs)
        self._prompt: list[int] | None = None
        self.rids: set[str] = set()

    def rest(self, prompt: list[int]) -> list[int]:
        self._prompt = self._prompt or prompt
        tail = prompt[len(self._prompt) :]
        if not tail:
            return self._fresh.pop(0)
        (output,) = [output for output in self._outputs if output[: len(tail)] == tail]
        return output[len(tail) :]


async def under_way(gateway: RunningGateway, client: Client, count: int) -> list[asyncio.Task[str]]:
    """So many clients with the same request, each waiting for a generation of its own."""
    tasks = []
    for index in range(count):
        tasks.append(asyncio.create_task(client(gateway)))
        while len(gateway.app.executions[7, 1].calls) <= index:
            await asyncio.sleep(0.005)
    while any(len(call.ids) < 3 for call in gateway.app.executions[7, 1].calls.values()):
        await asyncio.sleep(0.005)
    return tasks


async def gone(gateway: RunningGateway, tasks: list[asyncio.Task[str]]) -> None:
    """All of them leave at once."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    while any(call.clients for call in gateway.app.executions[7, 1].calls.values()):
        await asyncio.sleep(0.005)


@CLIENTS
async def test_parallel_sub_agents_with_the_same_request_get_generations_of_their_own(
    gateway: RunningGateway, client: Client
) -> None:
    engine = gateway.engine(pause_after=3)
    gateway.script = engine.script = Distinct(gateway, ["one<|im_end|>", "two<|im_end|>"])  # type: ignore[assignment]
    tasks = await under_way(gateway, client, 2)
    engine.go.set()
    assert sorted([await task for task in tasks]) == ["one", "two"]
    first, second = await gateway.records()
    assert first.prompt_ids.tolist() == second.prompt_ids.tolist() and first.call != second.call
    assert first.accepted and second.accepted


@CLIENTS
@pytest.mark.parametrize("grace_s", [60.0, 0.05])
async def test_sub_agents_that_all_lose_their_connection_find_all_their_generations_again(
    rendering: Rendering, tmp_path: Path, client: Client, grace_s: float
) -> None:
    gateway = await RunningGateway.start(rendering, tmp_path, attach_grace_s=grace_s)
    engine = gateway.engine(pause_after=3)
    engine.script = Distinct(gateway, ["one<|im_end|>", "two<|im_end|>"])  # type: ignore[assignment]
    await gone(gateway, await under_way(gateway, client, 2))
    while grace_s < 1 and gateway.app.router.running() != {0: 0}:
        await asyncio.sleep(0.005)
    repeats = [asyncio.create_task(client(gateway)) for _ in range(2)]
    calls = gateway.app.executions[
        7, 1
    ].calls  # what is left of a call that was cut may be sampled without a pause
    while sum(call.clients for call in calls.values()) < 2 and not any(task.done() for task in repeats):
        await asyncio.sleep(0.005)
    engine.go.set()
    assert sorted(await asyncio.gather(*repeats)) == ["one", "two"]
    assert len(engine.requests) == (4 if grace_s < 1 else 2)
    records = await gateway.records()
    assert [record.accepted for record in records] == [True, True]
    account, _ = await gateway.app.close_execution(7, 1)
    assert (account.calls, account.calls_lost) == (2, 0)
    await gateway.stop()


@CLIENTS
async def test_a_client_that_leaves_burns_a_real_engine_for_a_bounded_time(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, client: Client
) -> None:
    model = write_speaking_model(tmp_path_factory.mktemp("speaking"))
    gateway = await RunningGateway.start(Rendering(model, "qwen3", True), tmp_path, attach_grace_s=0.1)
    async with served(options(model, tokens_per_s=40.0)) as engine, aiohttp.ClientSession() as session:
        real = EngineClient(engine.client.base_url, session)
        gateway.engines["real"] = real  # type: ignore[assignment]
        gateway.app.router.route(CellId(0), "real", 4, Version(0))
        await gone(gateway, await under_way(gateway, client, 1))
        while (await real.server_info()).running:
            await asyncio.sleep(0.01)
        (record,) = await gateway.records()
        (call,) = gateway.app.executions[7, 1].calls.values()
        received = list(call.ids)
        assert len(received) >= 3 and gateway.app.router.running() == {0: 0}
        assert record.delivery is Delivery.NONE and record.output_ids.tolist() == received
        await client(gateway)
        (record,) = await gateway.records()
        assert record.output_ids.tolist()[: len(received)] == received, "nothing is sampled twice"
        assert record.delivery is Delivery.COMPLETE and record.finish is not FinishReason.ABORT
        await gateway.stop()
