"""`harness.deliver=blocks`: parts leave as they are complete, add up to the whole answer, and come back as recorded ids."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_hpc.gateway.parts import Contradiction, DeliverMode, Part, Sent
from gyre_hpc.gateway.rendering import AnswerStatus, ParsedAnswer, Rendering
from gyre_hpc.records import Delivery

from .fakes import RunningGateway
from .faults.clients import DIALECTS, Client, VisibleFault
from .test_restart import restarted

CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
BROKEN = "<tool_call>\nnothing to read\n</tool_call>"
WORDS = ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, BROKEN, "word ", "\n", "<|im_end|>"]
ASK: Any = [{"role": "user", "content": "go"}]


@settings(max_examples=200, deadline=None)
@given(words=st.lists(st.sampled_from(WORDS), max_size=12), step=st.integers(1, 7))
def test_what_is_complete_stays_so_whatever_comes(rendering: Rendering, words: list[str], step: int) -> None:
    ids = rendering.tokenizer.encode("".join(words))
    sent, parts = Sent(), []
    for end in range(0, len(ids), step):
        parts += list(sent.rest(rendering.completed(ids[:end])))
    whole = rendering.parse(ids)
    parts += list(sent.rest(whole))
    assert [part.call for part in parts if hasattr(part, "call")] == list(whole.tool_calls)
    assert "".join(part.text for part in parts if type(part).__name__ == "Text") == whole.content
    assert "".join(part.text for part in parts if type(part).__name__ == "Reasoning") == whole.reasoning


def test_an_answer_that_begins_otherwise_than_was_sent_is_refused() -> None:
    def answer(text: str, reasoning: str = "") -> ParsedAnswer:
        return ParsedAnswer(text, reasoning, (), AnswerStatus.OK)

    def parts(sent: Sent, answer: ParsedAnswer) -> list[Part]:
        return list(sent.rest(answer))

    sent = Sent()
    parts(sent, answer("one"))
    for other in (answer("two"), answer("one", "late thoughts")):
        with pytest.raises(Contradiction):
            parts(sent, other)


@pytest.mark.parametrize("after", ["nothing", "a restart", "a repeat", "a turn that goes on from it"])
async def test_a_stream_that_its_answer_contradicts_is_lost_unless_somebody_gets_the_answer(
    blocks: RunningGateway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, after: str
) -> None:
    wrong = ParsedAnswer("wrong", "", (), AnswerStatus.OK)
    monkeypatch.setattr(blocks.app.rendering, "completed", lambda ids: wrong)
    blocks.engine()
    blocks.script.answers = [f"right\n{CALL}<|im_end|>", "on<|im_end|>"]
    client = Client("anthropic-messages", True, blocks.url, 300)
    with pytest.raises(VisibleFault, match="broken inside the answer"):
        await client.ask(ASK)
    (call,) = blocks.app.executions[7, 1].calls.values()
    while call.clients:
        await asyncio.sleep(0.005)
    monkeypatch.undo()
    gateway = await restarted(blocks, tmp_path) if after == "a restart" else blocks
    if after == "a repeat":
        await client.ask(ASK)
    elif after == "a turn that goes on from it":
        blocks.app.deliver = DeliverMode.ANSWER
        thought = {"type": "thinking", "thinking": "", "signature": f"call:{call.id}"}
        answer = [thought, {"type": "text", "text": "right"}]
        await client.ask([*ASK, {"role": "assistant", "content": answer}, *ASK])
    account, _ = await gateway.app.close_execution(7, 1)
    assert account.calls_lost == (after in ("nothing", "a restart"))
    if gateway is not blocks:
        await gateway.stop()


@dataclass
class Seen:
    """What a client has of a streamed answer so far: the parts in order, and signs of life."""

    parts: list[str] = field(default_factory=list)
    beats: int = 0


async def watch(gateway: RunningGateway, dialect: str, seen: Seen) -> None:
    """Read a streamed answer, noting each complete part."""
    if dialect == "anthropic-messages":
        async with (
            anthropic.AsyncAnthropic(base_url=gateway.url, api_key="x", max_retries=0) as claude,
            claude.messages.stream(model="m", max_tokens=300, messages=ASK) as stream,
        ):
            async for event in stream:
                if event.type == "content_block_stop":
                    block: Any = event.content_block
                    if not getattr(block, "signature", "").startswith("keep:"):
                        seen.parts.append(block.type)
                seen.beats += event.type == "content_block_delta" and not getattr(
                    event.delta, "thinking", "x"
                )
        return
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as gpt:
        if dialect == "openai-responses":
            async for item in await gpt.responses.create(model="m", input=ASK, stream=True):
                if item.type == "response.output_item.done":
                    seen.parts.append(
                        {"reasoning": "thinking", "message": "text"}.get(item.item.type, "tool_use")
                    )
                seen.beats += item.type == "response.in_progress"
            return
        async for chunk in await gpt.chat.completions.create(model="m", messages=ASK, stream=True):
            delta = chunk.choices[0].delta.to_dict()
            for key, name in (
                ("reasoning_content", "thinking"),
                ("content", "text"),
                ("tool_calls", "tool_use"),
            ):
                if delta.get(key):
                    seen.parts.append(name)
            seen.beats += delta == {"content": ""}


@pytest.fixture
async def blocks(rendering: Rendering, tmp_path: Path) -> AsyncIterator[RunningGateway]:
    running = await RunningGateway.start(rendering, tmp_path, keepalive_s=0.05)
    running.app.deliver = DeliverMode.BLOCKS
    yield running
    await running.stop()


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_each_part_leaves_once_it_is_complete_and_life_goes_on_between(
    blocks: RunningGateway, dialect: str
) -> None:
    """The engine stops for a while behind each part; what is complete by then, and nothing else, is there."""
    pieces = ["<think>\nhm\n</think>", f"\n\nlooking\n{CALL[:20]}", CALL[20:], f"\n{CALL}", "<|im_end|>"]
    expected = [["thinking"], ["text"], ["tool_use"], ["tool_use"]]
    blocks.script.answers = ["".join(pieces)]
    encode = blocks.app.rendering.tokenizer.encode
    seen = Seen()
    engine = blocks.engine(0, pause_after=len(encode(pieces[0])))
    reading = asyncio.create_task(watch(blocks, dialect, seen))
    had: list[str] = []
    for count, fresh in enumerate(expected, 1):
        await engine.waiting.wait()
        had += fresh
        while len(seen.parts) < len(had):
            await asyncio.sleep(0.005)
        beats = seen.beats
        while seen.beats < beats + 2:
            await asyncio.sleep(0.005)
        assert seen.parts == had
        after = blocks.engine(
            count, pause_after=len(encode(pieces[count])) if count < len(expected) else None
        )
        blocks.app.router.table.block(count - 1)  # type: ignore[arg-type]
        await blocks.app.router.unroute(count - 1, 0.0)  # type: ignore[arg-type]
        engine = after
    await reading
    (record,) = await blocks.records()
    assert (record.deliver, record.delivery, seen.parts) == ("blocks", Delivery.COMPLETE, had)
    assert record.output_ids.tolist() == encode("".join(pieces))


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("end", ["", f"\n{BROKEN}", "\nafterwards"])
@pytest.mark.parametrize("mode", list(DeliverMode))
async def test_an_answer_in_parts_is_the_answer_and_its_echo_the_recorded_ids(
    blocks: RunningGateway, dialect: str, end: str, mode: DeliverMode
) -> None:
    blocks.app.deliver = mode
    blocks.engine()
    answer = f"<think>\nhm\n</think>\n\nlooking\n{CALL}\n{CALL}{end}<|im_end|>"
    blocks.script.answers = [answer, "done<|im_end|>"]
    client = Client(dialect, True, blocks.url, 300)
    outcome = await client.ask(ASK)
    parsed = blocks.app.rendering.parse(blocks.app.rendering.tokenizer.encode(answer))
    assert outcome.thinking == "hm" and outcome.text.replace("\n", "") == parsed.content.replace("\n", "")
    assert outcome.tools == [("bash", {"command": "ls"})] * 2
    await client.ask([*ASK, *outcome.echo])
    first, second = await blocks.records()
    known = [*first.prompt_ids, *first.output_ids]
    assert second.prompt_ids[: len(known)].tolist() == known
    assert not blocks.app.executions[7, 1].lineage.mismatches
    assert {first.deliver, second.deliver} == {mode.value}


async def test_a_whole_answer_is_never_in_parts(blocks: RunningGateway) -> None:
    blocks.engine()
    blocks.script.answers = [f"looking\n{CALL}<|im_end|>"]
    assert (await blocks.chat(ASK))["choices"][0]["finish_reason"] == "tool_calls"
    (record,) = await blocks.records()
    assert record.deliver == "answer"


async def test_a_client_that_leaves_between_parts_has_a_partial_answer_and_its_repeat_all_of_it(
    blocks: RunningGateway,
) -> None:
    thinking = "<think>\nhm\n</think>"
    blocks.script.answers = [f"{thinking}\n\nlooking\n{CALL}<|im_end|>"]
    engine = blocks.engine(pause_after=len(blocks.app.rendering.tokenizer.encode(thinking)))
    seen = Seen()
    reading = asyncio.create_task(watch(blocks, "anthropic-messages", seen))
    while not seen.parts:
        await asyncio.sleep(0.005)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    (call,) = blocks.app.executions[7, 1].calls.values()
    while call.clients:
        await asyncio.sleep(0.005)
    (record,) = await blocks.records()
    assert (record.delivery, record.accepted) == (Delivery.PARTIAL, False)
    engine.go.set()
    again = Seen()
    await watch(blocks, "anthropic-messages", again)
    assert again.parts == ["thinking", "text", "tool_use"]
    (record,) = await blocks.records()
    assert (record.delivery, record.accepted) == (Delivery.COMPLETE, True)
