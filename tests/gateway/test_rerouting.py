"""Engines leave and die at every phase of a call: ids join exactly, nothing is sampled twice, nothing is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gyre_hpc.gateway.rendering import Rendering
from gyre_hpc.gateway.sampling import BARREN_MOVES
from gyre_hpc.records import CellId, Delivery, FinishReason, Version

from .fakes import RunningGateway, ScriptedEngine

ANSWER = "a rather long answer of many tokens<|im_end|>"
ASK = [{"role": "user", "content": "go"}]


def expected(gateway: RunningGateway) -> list[int]:
    return gateway.app.rendering.tokenizer.encode(ANSWER)


@pytest.mark.parametrize("tokens", [0, 1, 7, "all"])
async def test_a_dying_engine_hands_its_call_over_with_every_received_token(
    gateway: RunningGateway, tokens: int | str
) -> None:
    gateway.script.answers = [ANSWER]
    target = expected(gateway)
    count = len(target) if tokens == "all" else int(tokens)
    first = gateway.engine(0, die_after=count)
    second = gateway.engine(1, version=3, cached=4)
    answer = await gateway.chat(ASK)
    assert answer["choices"][0]["message"]["content"] == ANSWER.removesuffix("<|im_end|>")
    (record,) = await gateway.records()
    assert record.output_ids.tolist() == target
    assert record.logprobs.tolist() == pytest.approx([-token / 1000 for token in target])
    assert record.versions.tolist() == [0] * count + [3] * (len(target) - count)
    if tokens == "all":
        assert second.requests == [] and record.recomputed_tokens == 0
        return
    ((_, prompt, _, kv_key),) = second.requests
    assert prompt == first.requests[0][1] + target[:count] and kv_key == "w3"
    assert record.recomputed_tokens == (len(prompt) - 4 if count else 0)
    assert gateway.faults == [(CellId(0), "EngineUnreachable: scripted death")]


async def test_the_budget_shrinks_by_what_was_received(gateway: RunningGateway) -> None:
    gateway.script.answers = [ANSWER]
    gateway.engine(0, die_after=4)
    second = gateway.engine(1)
    answer = await gateway.chat(ASK, max_tokens=9)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert second.requests[0][2] == 5
    (record,) = await gateway.records()
    assert record.output_ids.tolist() == expected(gateway)[:9] and record.finish is FinishReason.LENGTH


@pytest.mark.parametrize("received", [0, 2])
async def test_a_call_that_waits_while_its_sibling_spends_the_budget_ends_with_what_it_has(
    rendering: Rendering, tmp_path: Path, received: int
) -> None:
    gateway = await RunningGateway.start(rendering, tmp_path, max_sampled_tokens=9)
    gateway.script.answers = [ANSWER, ANSWER]
    spending = gateway.engine(0, pause_after=3)
    sibling = asyncio.create_task(gateway.chat(ASK))
    await spending.waiting.wait()
    gateway.app.router.table.block(CellId(0))
    if received:
        gateway.engine(1, die_after=received)
    waiting = asyncio.create_task(gateway.chat([{"role": "user", "content": "on"}]))
    while not gateway.app.router.waiting:
        await asyncio.sleep(0.002)
    spending.go.set()
    assert (await sibling)["status"] == 200
    untouched = gateway.engine(2)
    assert (await waiting)["choices"][0]["finish_reason"] == "length"
    account, _ = await gateway.app.close_execution(7, 1)
    assert (account.calls_lost, account.tokens_sampled, account.budget_exhausted) == (0, 9, True)
    assert untouched.requests == []
    late = (await gateway.records())[1]
    assert late.finish is FinishReason.LENGTH and len(late.output_ids) == received
    await gateway.stop()


async def test_calls_wait_while_no_cell_is_routable(gateway: RunningGateway) -> None:
    gateway.script.answers = [ANSWER]
    waiting = asyncio.create_task(gateway.chat(ASK))
    while gateway.app.router.waiting == 0:
        await asyncio.sleep(0.005)
    gateway.engine(0)
    assert (await waiting)["status"] == 200
    (record,) = await gateway.records()
    assert record.held_s > 0 and record.recomputed_tokens == 0


async def test_an_unrouted_cell_finishes_what_it_can_and_its_rest_goes_on_elsewhere(
    gateway: RunningGateway,
) -> None:
    gateway.script.answers = [ANSWER, "quick<|im_end|>"]
    first = gateway.engine(0, pause_after=5)
    slow = asyncio.create_task(gateway.chat(ASK))
    await first.waiting.wait()
    second = gateway.engine(1, version=1)
    cut = await gateway.app.router.unroute(CellId(0), 0.01)
    assert cut == 1 and first.aborted == {first.requests[0][0]}
    assert (await slow)["status"] == 200
    await gateway.chat([{"role": "user", "content": "other"}])
    assert len(first.requests) == 1 and len(second.requests) == 2
    record = (await gateway.records())[0]
    assert record.output_ids.tolist() == expected(gateway)
    assert record.versions.tolist()[:6] == [0] * 5 + [1]
    account, _ = await gateway.app.close_execution(7, 1)
    assert (account.calls, account.calls_rerouted, account.calls_lost) == (2, 1, 0)


async def test_a_draining_cell_may_finish_its_calls(gateway: RunningGateway) -> None:
    gateway.script.answers = [ANSWER]
    first = gateway.engine(0, pause_after=5)
    slow = asyncio.create_task(gateway.chat(ASK))
    await first.waiting.wait()
    leaving = asyncio.create_task(gateway.app.router.unroute(CellId(0), 30.0))
    await asyncio.sleep(0)
    first.go.set()
    assert await leaving == 0 and (await slow)["status"] == 200


async def test_nothing_is_asked_of_a_cell_that_is_gone(gateway: RunningGateway) -> None:
    gateway.script.answers = [ANSWER]
    first = gateway.engine(0, pause_after=5)
    slow = asyncio.create_task(gateway.chat(ASK))
    await first.waiting.wait()
    assert await gateway.app.router.unroute(CellId(0), 30.0, gone=True) == 1
    assert first.aborted == set()
    gateway.engine(1)
    assert (await slow)["status"] == 200
    assert (await gateway.records())[0].output_ids.tolist() == expected(gateway)


async def test_a_new_version_of_a_cell_moves_its_calls_to_the_new_key(gateway: RunningGateway) -> None:
    gateway.script.answers = [ANSWER]
    old = gateway.engine(0, pause_after=5)
    slow = asyncio.create_task(gateway.chat(ASK))
    await old.waiting.wait()
    new = gateway.engine(0, version=9)
    assert (await slow)["status"] == 200
    assert new.requests[0][3] == "w9"


async def test_an_execution_stays_on_the_cell_with_its_pages_until_that_is_full(
    gateway: RunningGateway,
) -> None:
    first, second = gateway.engine(0), gateway.engine(1)
    gateway.script.answers = ["x<|im_end|>"] * 3
    for index in range(3):
        await gateway.chat([{"role": "user", "content": f"q{index}"}])
    assert sorted(len(engine.requests) for engine in (first, second)) == [0, 3]


async def test_a_call_that_kills_engine_after_engine_is_lost_and_its_connection_reset(
    gateway: RunningGateway,
) -> None:
    gateway.script.answers = [ANSWER]
    for cell in range(6):
        gateway.engine(cell, die_after=0)
    with pytest.raises(aiohttp.ClientConnectionError):
        await gateway.chat(ASK)
    account, _ = await gateway.app.close_execution(7, 1)
    assert account.calls_lost == 1
    (record,) = await gateway.records()
    assert (record.finish, record.delivery, record.accepted) == (FinishReason.ABORT, Delivery.NONE, False)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_deadline_resets_the_connection_and_never_ends_it_cleanly(
    rendering: Rendering, tmp_path: Path, stream: bool
) -> None:
    gateway = await RunningGateway.start(rendering, tmp_path, keepalive_s=0.05, call_deadline_s=0.2)
    gateway.script.answers = [ANSWER]
    gateway.engine(pause_after=2)
    reader, writer = await asyncio.open_connection(*gateway.server.sockets[0].getsockname())
    body = (
        b'{"model":"m","messages":[{"role":"user","content":"go"}],"stream":%s}'
        % str(stream).lower().encode()
    )
    path = gateway.url.split("/", 3)[3]
    head = f"POST /{path}/v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    with pytest.raises(ConnectionResetError):
        await reader.read(-1)
    writer.close()
    account, _ = await gateway.app.close_execution(7, 1)
    assert account.calls_lost == 1
    (record,) = await gateway.records()
    assert record.output_ids.tolist() == expected(gateway)[:2]
    await gateway.stop()


async def test_a_silent_engine_counts_as_failed(rendering: Rendering, tmp_path: Path) -> None:
    gateway = await RunningGateway.start(rendering, tmp_path, engine_silence_s=0.05)
    gateway.script.answers = [ANSWER]
    gateway.engine(0, pause_after=3)
    gateway.engine(1)
    assert (await gateway.chat(ASK))["status"] == 200
    assert gateway.faults[0][0] == 0 and "Timeout" in gateway.faults[0][1]
    await gateway.stop()


async def test_an_abort_nobody_asked_for_is_a_fault_and_never_reaches_the_harness(
    gateway: RunningGateway,
) -> None:
    class Aborting(ScriptedEngine):
        async def generate(self, rid: str, *args: Any, **more: Any) -> Any:
            self.aborted.add(rid)
            async for chunk in super().generate(rid, *args, **more):
                yield chunk

    gateway.script.answers = [ANSWER]
    gateway.engines["http://a"] = Aborting(gateway.script)
    gateway.app.router.route(CellId(0), "http://a", 4, Version(0))
    gateway.engine(1)
    answer = await gateway.chat(ASK)
    assert answer["choices"][0]["finish_reason"] == "stop" and len(gateway.faults) == 1


async def test_a_call_outlives_the_end_of_any_number_of_cells_at_once(gateway: RunningGateway) -> None:
    """As when their controller dies: they are gone before the call comes, and it waits for the next controller's."""
    gateway.script.answers = [ANSWER]
    for cell in range(2 * BARREN_MOVES):
        gateway.engine(cell, absent=True)
    asking = asyncio.create_task(gateway.chat(ASK))
    while len(gateway.faults) < 2 * BARREN_MOVES:
        await asyncio.sleep(0.002)
    gateway.engine(0, version=1)
    assert (await asking)["choices"][0]["message"]["content"] == ANSWER.removesuffix("<|im_end|>")
    (record,) = await gateway.records()
    assert record.output_ids.tolist() == expected(gateway)


async def test_no_call_stays_on_a_cell_of_an_earlier_controller(gateway: RunningGateway) -> None:
    gateway.script.answers = [ANSWER]
    first = gateway.engine(0, pause_after=3)
    asking = asyncio.create_task(gateway.chat(ASK))
    await first.waiting.wait()
    gateway.app.router.forget_routes()
    gateway.engine(1, version=2)
    assert (await asking)["choices"][0]["message"]["content"] == ANSWER.removesuffix("<|im_end|>")
    (record,) = await gateway.records()
    assert record.versions.tolist() == [0] * 3 + [2] * (len(expected(gateway)) - 3)
    assert gateway.faults == []


@pytest.mark.parametrize(("places", "chosen"), [((0, 1, 2, 3), 3), ((0, 3, 2, 1), 1)])
async def test_what_moves_goes_to_the_cell_that_leaves_rollout_last(
    gateway: RunningGateway, places: tuple[int, ...], chosen: int
) -> None:
    gateway.script.answers = [ANSWER]
    engines = [gateway.engine(cell, place=place, pause_after=5) for cell, place in enumerate(places)]
    asking = asyncio.create_task(gateway.chat(ASK))
    await engines[0].waiting.wait()
    for engine in engines[1:]:
        engine.go.set()
    await gateway.app.router.unroute(CellId(0), 0.0)
    assert (await asking)["status"] == 200
    assert [len(engine.requests) for engine in engines] == [1, *(cell == chosen for cell in (1, 2, 3))]
