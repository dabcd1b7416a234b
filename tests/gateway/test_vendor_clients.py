"""The vendors' own client libraries understand every answer: streamed or not, tools, thinking, errors, keep-alive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from gyre_hpc.config import RoleRule
from gyre_hpc.gateway.rendering import Rendering
from gyre_hpc.records import LeafRole

from .fakes import KEY, RunningGateway

TOOL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls", "n": 2}}\n</tool_call>'
ANSWER = f"looking\n{TOOL}\n{TOOL}<|im_end|>"
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
ANTHROPIC_TOOLS: Any = [{"name": "bash", "description": "run", "input_schema": {"type": "object"}}]
ASK: Any = [{"role": "user", "content": "list"}]


@pytest.fixture
async def slow(rendering: Rendering, tmp_path: Path) -> AsyncIterator[RunningGateway]:
    """Keep-alive after 20 ms, and an engine that holds its third token back."""
    running = await RunningGateway.start(rendering, tmp_path, keepalive_s=0.02)
    running.engine(pause_after=2)
    yield running
    await running.stop()


def claude(gateway: RunningGateway, **options: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=gateway.url, api_key="x", max_retries=0, **options)


def gpt(gateway: RunningGateway) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0)


async def test_anthropic_message_with_parallel_tools(gateway: RunningGateway) -> None:
    gateway.engine()
    gateway.script.answers = [ANSWER]
    message = await claude(gateway).messages.create(
        model="m", max_tokens=300, messages=ASK, tools=ANTHROPIC_TOOLS
    )
    assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
    calls = [block for block in message.content if block.type == "tool_use"]
    assert calls[0].input == {"command": "ls", "n": 2} and calls[0].id != calls[1].id
    assert (message.stop_reason, message.model) == ("tool_use", "m")
    (record,) = await gateway.records()
    assert message.usage.input_tokens == len(record.prompt_ids)
    assert message.usage.output_tokens == len(record.output_ids)


async def test_anthropic_stream_is_one_block_per_part(gateway: RunningGateway) -> None:
    gateway.engine()
    gateway.script.answers = [f"<think>\nhm\n</think>\n\n{ANSWER}"]
    events: list[Any] = []
    async with claude(gateway).messages.stream(
        model="m", max_tokens=300, messages=ASK, tools=ANTHROPIC_TOOLS
    ) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert final.content[2].input == {"command": "ls", "n": 2}  # type: ignore[union-attr]
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4


async def test_anthropic_keepalive_is_an_open_thinking_block(slow: RunningGateway) -> None:
    slow.script.answers = ["hello there<|im_end|>"]
    async with claude(slow).messages.stream(model="m", max_tokens=300, messages=ASK) as stream:
        seen: list[Any] = []
        async for event in stream:
            seen.append(event)
            if sum(e.type == "content_block_delta" for e in seen) >= 3:
                slow.engines["http://cell-0-0"].go.set()
        final = await stream.get_final_message()
    keep, text = final.content
    assert keep.type == "thinking" and keep.thinking == "" and keep.signature == "keep:e7a1c0"
    assert text.type == "text" and text.text == "hello there"
    deltas = [e.delta for e in seen if e.type == "content_block_delta" and e.index == 0]
    assert [d.type for d in deltas[:3]] == ["thinking_delta"] * 3 and deltas[-1].type == "signature_delta"


async def test_nothing_of_the_answer_is_sent_before_it_is_complete(slow: RunningGateway) -> None:
    slow.script.answers = ["hello there<|im_end|>"]
    stream = await gpt(slow).chat.completions.create(model="m", messages=ASK, stream=True)
    parts: list[str] = []
    async for chunk in stream:
        parts += [choice.delta.content for choice in chunk.choices if choice.delta.content is not None]
        if len(parts) == 4:
            assert parts == [""] * 4
            slow.engines["http://cell-0-0"].go.set()
    assert [part for part in parts if part] == ["hello there"]


async def test_whitespace_keeps_a_whole_answer_alive(slow: RunningGateway) -> None:
    slow.script.answers = ["hello<|im_end|>", "hello<|im_end|>"]
    asyncio.get_running_loop().call_later(0.1, slow.engines["http://cell-0-0"].go.set)
    answer, message = await asyncio.gather(
        gpt(slow).chat.completions.create(model="m", messages=ASK),
        claude(slow).messages.create(
            model="m", max_tokens=9, messages=[{"role": "user", "content": "other"}]
        ),
    )
    assert answer.choices[0].message.content == "hello"
    assert message.content[0].text == "hello"  # type: ignore[union-attr]


async def test_chat_stream_with_tools_reasoning_and_usage(gateway: RunningGateway) -> None:
    gateway.engine()
    gateway.script.answers = [f"<think>\nhm\n</think>\n\n{ANSWER}"]
    stream = await gpt(gateway).chat.completions.create(
        model="m", messages=ASK, tools=CHAT_TOOLS, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "looking"
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "hm"
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [call.index for call in calls] == [0, 1]
    assert calls[0].function is not None and calls[0].function.arguments == '{"command": "ls", "n": 2}'
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    (record,) = await gateway.records()
    usage = chunks[-1].usage
    assert usage is not None and not chunks[-1].choices
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(record.prompt_ids), len(record.output_ids))


async def test_length_and_stop_strings(gateway: RunningGateway) -> None:
    gateway.engine()
    gateway.script.answers = ["abcdef<|im_end|>", "one STOP two<|im_end|>", "one STOP two<|im_end|>"]
    cut = await gpt(gateway).chat.completions.create(model="m", messages=ASK, max_tokens=3)
    assert cut.choices[0].finish_reason == "length" and cut.choices[0].message.content == "abc"
    other: Any = [{"role": "user", "content": "other"}]
    stopped = await gpt(gateway).chat.completions.create(model="m", messages=other, stop=["STOP"])
    assert (
        stopped.choices[0].finish_reason == "stop"
        and (stopped.choices[0].message.content or "").strip() == "one"
    )
    third: Any = [{"role": "user", "content": "third"}]
    message = await claude(gateway).messages.create(
        model="m", max_tokens=99, messages=third, stop_sequences=["STOP"]
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "STOP")
    records = await gateway.records()
    rendering = gateway.app.rendering
    assert [rendering.text(r.output_ids.tolist()) for r in records] == ["abc", "one STOP", "one STOP"]


async def test_overflow_is_refused_in_the_vendors_words(rendering: Rendering, tmp_path: Path) -> None:
    gateway = await RunningGateway.start(rendering, tmp_path, max_context=20)
    long: Any = [{"role": "user", "content": "word " * 50}]
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 20 maximum"):
        await claude(gateway).messages.create(model="m", max_tokens=9, messages=long)
    with pytest.raises(openai.BadRequestError) as caught:
        await gpt(gateway).chat.completions.create(model="m", messages=long)
    assert caught.value.code == "context_length_exceeded" and "maximum context length is 20" in str(
        caught.value
    )
    assert await gateway.records() == []
    await gateway.stop()


@pytest.mark.parametrize(
    "body",
    [
        {"messages": []},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "alien", "content": "x"}]},
        {"messages": [{"role": "user", "content": ["x"]}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": 3}]}
            ]
        },
        {"messages": [{"role": ["user"], "content": "x"}]},
        {"messages": "x"},
        {"messages": [3]},
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": -1},
    ],
)
async def test_what_cannot_be_served_is_refused_before_anything_is_recorded(
    gateway: RunningGateway, body: Any
) -> None:
    body = {"model": "m", "max_tokens": 5, **body}
    with pytest.raises(anthropic.BadRequestError) as first:
        await claude(gateway).post("/v1/messages", body=body, cast_to=object)
    assert first.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError):
        await gpt(gateway).post("/chat/completions", body=body, cast_to=object)
    assert await gateway.records() == []


async def test_probes_models_and_counts_leave_no_record(gateway: RunningGateway) -> None:
    gateway.engine()
    counted = await claude(gateway).messages.count_tokens(model="m", messages=ASK)
    gateway.script.answers = ["x<|im_end|>"]
    message = await claude(gateway).messages.create(model="m", max_tokens=5, messages=ASK)
    assert counted.input_tokens == message.usage.input_tokens
    assert [model.id async for model in gpt(gateway).models.list()] == ["policy"]
    assert [model.id async for model in claude(gateway).models.list()] == ["policy"]
    assert (await gpt(gateway).models.retrieve("policy")).id == "policy"
    assert len(await gateway.records()) == 1


async def test_a_count_or_a_lost_request_before_it_does_not_hide_a_summary_request(
    gateway: RunningGateway,
) -> None:
    gateway.engine()
    gateway.app.roles = [RoleRule("main-summary", last="sum it up"), RoleRule("main")]
    gateway.script.answers = ["x<|im_end|>", "y<|im_end|>"]
    summary: Any = [*ASK, {"role": "user", "content": "Sum it up."}]
    client = claude(gateway)
    await client.messages.count_tokens(model="m", messages=summary)
    for _ in range(2):
        await client.messages.create(model="m", max_tokens=5, messages=summary)
    assert [record.role_hint for record in await gateway.records()] == [LeafRole.MAIN_SUMMARY] * 2


async def test_an_unknown_or_closed_key_is_not_found(gateway: RunningGateway) -> None:
    strange = gpt(gateway).with_options(base_url=gateway.url.replace(KEY, "other") + "/v1")
    with pytest.raises(openai.NotFoundError):
        await strange.chat.completions.create(model="m", messages=ASK)
    await gateway.app.close_execution(7, 1)
    with pytest.raises(anthropic.NotFoundError):
        await claude(gateway).messages.create(model="m", max_tokens=5, messages=ASK)
    with pytest.raises(anthropic.NotFoundError):
        await claude(gateway).models.retrieve("policy")


@pytest.mark.parametrize("settings", [{"max_calls": 1}, {"max_sampled_tokens": 6}])
async def test_a_spent_budget_is_final_and_flagged(
    rendering: Rendering, tmp_path: Path, settings: Any
) -> None:
    gateway = await RunningGateway.start(rendering, tmp_path, **settings)
    gateway.engine()
    gateway.script.answers = ["hello world<|im_end|>"]
    await gpt(gateway).chat.completions.create(model="m", messages=ASK)
    other: Any = [{"role": "user", "content": "more"}]
    with pytest.raises(openai.BadRequestError, match="budget"):
        await gpt(gateway).chat.completions.create(model="m", messages=other)
    with pytest.raises(anthropic.BadRequestError, match="budget"):
        await claude(gateway).messages.create(model="m", max_tokens=5, messages=other)
    account, incomplete = await gateway.app.close_execution(7, 1)
    assert account.budget_exhausted and account.calls == 1 and not incomplete
    assert account.tokens_sampled <= settings.get("max_sampled_tokens", 99)
    await gateway.stop()


async def test_parallel_calls_share_one_token_budget(rendering: Rendering, tmp_path: Path) -> None:
    """Calls that were all admitted while there was room end where the execution's budget ends, together."""
    gateway = await RunningGateway.start(rendering, tmp_path, max_sampled_tokens=10)
    engine = gateway.engine(pause_after=2)
    gateway.script.answers = ["hello wide world<|im_end|>"] * 3
    asks: Any = [[{"role": "user", "content": text}] for text in ("one", "two", "three")]
    running = [
        asyncio.create_task(gpt(gateway).chat.completions.create(model="m", messages=ask)) for ask in asks
    ]
    while len(engine.requests) < 3:
        await asyncio.sleep(0.005)
    engine.go.set()
    answers = await asyncio.gather(*running)
    records = await gateway.records()
    account, _ = await gateway.app.close_execution(7, 1)
    assert sum(len(record.output_ids) for record in records) == 10 == account.tokens_sampled
    assert "length" in {answer.choices[0].finish_reason for answer in answers}
    assert account.budget_exhausted and account.calls_lost == 0
    await gateway.stop()
