"""Repeats: attach to an undelivered call whose client is gone, else be a sibling; delivery and acceptance recorded."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gyre_hpc.gateway.calls import Call
from gyre_hpc.gateway.rendering import Rendering
from gyre_hpc.records import Delivery, FinishReason

from .fakes import KEY, RunningGateway, ScriptedEngine

ASK = [{"role": "user", "content": "go"}]


async def left_behind(gateway: RunningGateway, engine: ScriptedEngine) -> Call:
    """A call whose client went away while its engine pauses."""
    client = asyncio.create_task(gateway.chat(ASK))
    await engine.waiting.wait()
    client.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client
    (call,) = gateway.app.executions[7, 1].calls.values()
    while call.clients:
        await asyncio.sleep(0.005)
    return call


async def restarted(before: RunningGateway, folder: Path) -> RunningGateway:
    """A gateway that finds the log as it stood when `before` was killed."""
    folder = folder / "restarted"
    folder.mkdir()
    shutil.copy(before.path, folder)
    return await RunningGateway.start(before.app.rendering, folder)


@pytest.mark.parametrize("complete", [False, True])
async def test_a_repeat_gets_the_answer_its_gone_client_missed(
    gateway: RunningGateway, complete: bool
) -> None:
    gateway.script.answers = ["first<|im_end|>"]
    engine = gateway.engine(pause_after=2)
    call = await left_behind(gateway, engine)
    if complete:
        engine.go.set()
        await call.done.wait()
    repeat = asyncio.create_task(gateway.chat(ASK))
    while not call.clients and not repeat.done():
        await asyncio.sleep(0.005)
    engine.go.set()
    assert (await repeat)["choices"][0]["message"]["content"] == "first"
    (record,) = await gateway.records()
    assert len(engine.requests) == 1
    assert (record.delivery, record.accepted) == (Delivery.COMPLETE, True)


async def test_a_repeat_of_a_delivered_or_running_call_is_a_sibling(gateway: RunningGateway) -> None:
    engine = gateway.engine()
    gateway.script.answers = ["one<|im_end|>"]
    await gateway.chat(ASK)
    gateway.script.outputs.clear()
    gateway.script.answers = ["two<|im_end|>"]
    engine.pause_after = 1
    running = asyncio.create_task(gateway.chat(ASK))
    await engine.waiting.wait()
    beside = asyncio.create_task(gateway.chat(ASK))
    while len(engine.requests) < 3:
        await asyncio.sleep(0.005)
    engine.go.set()
    texts = [(await task)["choices"][0]["message"]["content"] for task in (running, beside)]
    assert texts == ["two", "two"]
    records = await gateway.records()
    assert [record.ordinal for record in records] == [0, 1, 2]
    assert len({tuple(record.prompt_ids) for record in records}) == 1


async def test_a_call_nobody_asks_for_again_stops_burning_the_engine(
    rendering: Rendering, tmp_path: Path
) -> None:
    gateway = await RunningGateway.start(rendering, tmp_path, attach_grace_s=0.05)
    gateway.script.answers = ["first<|im_end|>"]
    await left_behind(gateway, gateway.engine(pause_after=2))
    while gateway.app.router.running() != {0: 0}:
        await asyncio.sleep(0.005)
    account, _ = await gateway.app.close_execution(7, 1)
    assert (account.calls_lost, account.tokens_sampled) == (0, 2)
    (record,) = await gateway.records()
    assert (record.finish, record.accepted, len(record.output_ids)) == (FinishReason.ABORT, False, 2)
    await gateway.stop()


@pytest.mark.parametrize("killed", [False, True])
async def test_a_call_that_was_left_goes_on_from_its_received_tokens_when_it_is_asked_for_again(
    rendering: Rendering, tmp_path: Path, killed: bool
) -> None:
    gateway = await RunningGateway.start(rendering, tmp_path, attach_grace_s=0.05)
    gateway.script.answers = ["first<|im_end|>"]
    engine = gateway.engine(pause_after=2)
    call = await left_behind(gateway, engine)
    while call.task is not None:
        await asyncio.sleep(0.005)
    engine.go.set()
    if killed:
        after = await restarted(gateway, tmp_path)
        after.script.outputs, after.script.rids = gateway.script.outputs, gateway.script.rids
        engine = after.engine()
        await gateway.stop()
        gateway = after
    assert (await gateway.chat(ASK))["choices"][0]["message"]["content"] == "first"
    assert engine.requests[-1][1] == engine.requests[0][1][: call.context.length] + call.ids[:2]
    (record,) = await gateway.records()
    assert record.accepted and record.finish is FinishReason.STOP
    await gateway.stop()


async def test_a_call_that_was_left_is_not_lost_by_a_restart(rendering: Rendering, tmp_path: Path) -> None:
    gateway = await RunningGateway.start(rendering, tmp_path, attach_grace_s=0.05)
    gateway.script.answers = ["first<|im_end|>"]
    call = await left_behind(gateway, gateway.engine(pause_after=2))
    while call.task is not None:
        await asyncio.sleep(0.005)
    await gateway.app.log.sync()
    after = await restarted(gateway, tmp_path)
    account, _ = await after.app.close_execution(7, 1)
    assert (account.calls, account.calls_lost) == (1, 0)
    await after.stop()
    await gateway.stop()


async def test_a_client_that_comes_while_its_call_is_being_cut_gets_the_answer(
    rendering: Rendering, tmp_path: Path
) -> None:
    gateway = await RunningGateway.start(rendering, tmp_path, attach_grace_s=60.0)
    gateway.script.answers = ["first<|im_end|>"]
    engine = gateway.engine(pause_after=2)
    call = await left_behind(gateway, engine)
    gateway.app._leave_alone(call)
    gateway.app.arrive(call)
    engine.pause_after = None
    await call.done.wait()
    assert call.answer is not None and call.answer.content == "first"
    await gateway.stop()


async def test_an_echoed_handle_accepts_a_call_whose_delivery_was_not_complete(
    gateway: RunningGateway,
) -> None:
    gateway.script.answers = [
        '<tool_call>\n{"name": "b", "arguments": {}}\n</tool_call><|im_end|>',
        "end<|im_end|>",
    ]
    engine = gateway.engine(pause_after=2)
    call = await left_behind(gateway, engine)
    engine.go.set()
    await call.done.wait()
    echo: list[dict[str, Any]] = [
        *ASK,
        {
            "role": "assistant",
            "tool_calls": [
                {"id": f"call_{call.id}_0", "type": "function", "function": {"name": "b", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": f"call_{call.id}_0", "content": "ok"},
    ]
    await gateway.chat(echo)
    first, second = await gateway.records()
    assert (first.delivery, first.accepted) == (Delivery.NONE, True)
    assert second.prompt_ids.tolist()[: len(first.prompt_ids) + len(first.output_ids)] == [
        *first.prompt_ids.tolist(),
        *first.output_ids.tolist(),
    ]


async def test_closing_abandons_running_calls_and_resets_their_clients(gateway: RunningGateway) -> None:
    gateway.script.answers = ["first<|im_end|>"]
    engine = gateway.engine(pause_after=2)
    client = asyncio.create_task(gateway.chat(ASK))
    await engine.waiting.wait()
    account, incomplete = await gateway.app.close_execution(7, 1)
    with pytest.raises(aiohttp.ClientConnectionError):
        await client
    assert (account.calls, account.calls_lost, account.tokens_sampled, incomplete) == (1, 0, 2, False)
    (record,) = await gateway.records()
    assert record.finish is FinishReason.ABORT and len(record.output_ids) == 2


async def test_a_cut_call_goes_on_from_its_received_tokens_after_a_restart(
    rendering: Rendering, tmp_path: Path
) -> None:
    before = await RunningGateway.start(rendering, tmp_path)
    before.script.answers = ["hello<|im_end|>", "a long second answer<|im_end|>"]
    engine = before.engine(0)
    await before.chat(ASK)
    engine.pause_after = 4
    follow = [*ASK, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "more"}]
    client = asyncio.create_task(before.chat(follow))
    await engine.waiting.wait()
    after = await restarted(before, tmp_path)
    client.cancel()
    after.script.outputs, after.script.rids = before.script.outputs, before.script.rids
    other = after.engine(0, version=1)
    assert (await after.chat(follow))["choices"][0]["message"]["content"] == "a long second answer"
    assert other.requests[0][1] == engine.requests[1][1] + before.script.outputs[1][1][:4]
    first, second = await after.records()
    assert second.prompt_ids.tolist()[: len(first.prompt_ids)] == first.prompt_ids.tolist()
    assert second.versions.tolist()[3:5] == [0, 1] and second.accepted
    account, incomplete = await after.app.close_execution(7, 1)
    assert (account.calls, account.calls_lost, incomplete) == (2, 0, False)
    await after.stop()
    await before.stop()


async def test_a_cut_call_nobody_asks_for_after_a_restart_is_lost(
    rendering: Rendering, tmp_path: Path
) -> None:
    before = await RunningGateway.start(rendering, tmp_path)
    before.script.answers = ["hello<|im_end|>"]
    engine = before.engine(pause_after=2)
    client = asyncio.create_task(before.chat(ASK))
    await engine.waiting.wait()
    after = await restarted(before, tmp_path)
    client.cancel()
    after.app.open_execution(7, 1, KEY)
    account, _ = await after.app.close_execution(7, 1)
    assert account.calls_lost == 1
    await after.stop()
    await before.stop()
