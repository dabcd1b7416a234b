"""What is refused is refused before the first byte, streamed or not, in words that the vendor's own client raises as its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from gyre_hpc.errors import StorageFull
from gyre_hpc.gateway import canonical
from gyre_hpc.gateway.rendering import Rendering
from gyre_hpc.gateway.server import BYTES_PER_TOKEN

from .fakes import KEY, RunningGateway
from .faults.clients import DIALECTS, Client, VisibleFault

DIALECT = pytest.mark.parametrize("dialect", DIALECTS)
STREAM = pytest.mark.parametrize("stream", [False, True])
PICTURES: dict[str, Any] = {
    "anthropic-messages": {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}},
    "openai-chat": {"type": "image_url", "image_url": {"url": "http://x/y.png"}},
    "openai-responses": {"type": "input_image", "image_url": "http://x/y.png", "detail": "auto"},
}


async def ask(dialect: str, url: str, content: Any, *, stream: bool, **more: Any) -> Any:
    """One request with the vendor's client, the answer read to its end."""
    messages: Any = [{"role": "user", "content": content}]
    options: dict[str, Any] = {"api_key": "x", "max_retries": 0}
    if dialect == "anthropic-messages":
        async with anthropic.AsyncAnthropic(base_url=url, **options) as claude:
            if not stream:
                return await claude.messages.create(model="m", max_tokens=9, messages=messages, **more)
            async with claude.messages.stream(model="m", max_tokens=9, messages=messages, **more) as events:
                return await events.get_final_message()
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", **options) as gpt:
        if dialect == "openai-chat":
            made = await gpt.chat.completions.create(model="m", messages=messages, stream=stream, **more)
        else:
            made = await gpt.responses.create(model="m", input=messages, stream=stream, **more)
        return [event async for event in made] if stream else made


@asynccontextmanager
async def refused(dialect: str, anthropics: type[Exception], openais: type[Exception]) -> AsyncIterator[Any]:
    """The vendor's client raises its own class; `caught.value` is what it raised."""
    with pytest.raises(anthropics if dialect == "anthropic-messages" else openais) as caught:
        yield caught


@DIALECT
@STREAM
async def test_overflow_says_how_long_and_how_much_may_be(
    rendering: Rendering, tmp_path: Path, dialect: str, stream: bool
) -> None:
    gateway = await RunningGateway.start(rendering, tmp_path, max_context=20)
    async with refused(dialect, anthropic.BadRequestError, openai.BadRequestError) as caught:
        await ask(dialect, gateway.url, "word " * 50, stream=stream)
    tokens = len(rendering.render([{"role": "user", "content": "word " * 50}]))
    if dialect == "anthropic-messages":
        error = caught.value.body["error"]
        assert error == {
            "type": "invalid_request_error",
            "message": f"prompt is too long: {tokens} tokens > 20 maximum",
        }
    else:
        assert caught.value.code == "context_length_exceeded" and str(tokens) in str(caught.value)
    assert await gateway.records() == []
    await gateway.stop()


@DIALECT
@STREAM
async def test_a_full_disk_is_an_overload(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, dialect: str, stream: bool
) -> None:
    def full() -> None:
        raise StorageFull("the disk is full", fix="free space")

    monkeypatch.setattr(gateway.app.log, "check", full)
    async with refused(dialect, anthropic.OverloadedError, openai.InternalServerError) as caught:
        await ask(dialect, gateway.url, "hi", stream=stream)
    status, kind = (529, "overloaded_error") if dialect == "anthropic-messages" else (503, "server_error")
    body = caught.value.body
    assert caught.value.status_code == status and kind in (
        body.get("type"),
        body.get("error", {}).get("type"),
    )
    assert "the disk is full" in str(caught.value)


@DIALECT
@STREAM
async def test_pictures_are_refused_by_name(gateway: RunningGateway, dialect: str, stream: bool) -> None:
    picture = PICTURES[dialect]
    async with refused(dialect, anthropic.BadRequestError, openai.BadRequestError) as caught:
        await ask(dialect, gateway.url, [picture], stream=stream)
    assert picture["type"] in str(caught.value) and "text only" in str(caught.value)


@DIALECT
async def test_a_picture_that_a_tool_shows_is_refused_by_name(gateway: RunningGateway, dialect: str) -> None:
    picture = PICTURES[dialect]
    result: dict[str, Any] = {
        "anthropic-messages": {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "x", "content": [picture]}],
        },
        "openai-chat": {"role": "tool", "tool_call_id": "x", "content": [picture]},
        "openai-responses": {"type": "function_call_output", "call_id": "x", "output": [picture]},
    }[dialect]
    with pytest.raises(VisibleFault, match=f"{picture['type']}.*text only"):
        await Client(dialect, False, gateway.url).ask([{"role": "user", "content": "look"}, result])
    assert await gateway.records() == []


@DIALECT
@STREAM
async def test_a_bad_request_names_its_field(gateway: RunningGateway, dialect: str, stream: bool) -> None:
    limit = {"openai-chat": "max_tokens", "openai-responses": "max_output_tokens"}.get(dialect, "max_tokens")
    async with refused(dialect, anthropic.BadRequestError, openai.BadRequestError) as caught:
        await ask(dialect, gateway.url, "hi", stream=stream, extra_body={limit: 0})
    assert limit in str(caught.value)


@DIALECT
@STREAM
async def test_a_closed_execution_is_not_found(gateway: RunningGateway, dialect: str, stream: bool) -> None:
    strange = gateway.url.replace(KEY, "other")
    async with refused(dialect, anthropic.NotFoundError, openai.NotFoundError):
        await ask(dialect, strange, "hi", stream=stream)


@DIALECT
@STREAM
async def test_usage_is_what_was_recorded(gateway: RunningGateway, dialect: str, stream: bool) -> None:
    gateway.engine()
    gateway.script.answers = ["hello<|im_end|>"]
    more = {"stream_options": {"include_usage": True}} if dialect == "openai-chat" and stream else {}
    answer = await ask(dialect, gateway.url, "hi", stream=stream, **more)
    if stream and dialect != "anthropic-messages":
        answer = getattr(answer[-1], "response", answer[-1])
    (record,) = await gateway.records()
    usage = answer.usage.to_dict()
    given = [usage.get("input_tokens", usage.get("prompt_tokens"))]
    given.append(usage.get("output_tokens", usage.get("completion_tokens")))
    assert given == [len(record.prompt_ids), len(record.output_ids)]


async def test_usage_of_the_prompt_is_in_the_first_event(gateway: RunningGateway) -> None:
    """Claude Code decides by it when to compact."""
    gateway.engine()
    gateway.script.answers = ["hello<|im_end|>"]
    async with (
        anthropic.AsyncAnthropic(base_url=gateway.url, api_key="x", max_retries=0) as claude,
        claude.messages.stream(
            model="m", max_tokens=9, messages=[{"role": "user", "content": "hi"}]
        ) as events,
    ):
        first: Any = await anext(aiter(events))
    (record,) = await gateway.records()
    assert first.message.usage.input_tokens == len(record.prompt_ids)


@DIALECT
async def test_what_is_far_too_long_is_refused_without_being_tokenized(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, dialect: str
) -> None:
    """Other calls wait while the tokenizer works."""
    lengths: list[int] = []
    encoded = gateway.app.rendering.tokenizer._encoded

    def spy(text: str, special: bool) -> list[int]:
        lengths.append(len(text))
        return encoded(text, special)

    monkeypatch.setattr(gateway.app.rendering.tokenizer, "_encoded", spy)
    limit = gateway.app.max_context
    for size, seen in ((2 * BYTES_PER_TOKEN * limit, False), (BYTES_PER_TOKEN * limit // 2, True)):
        lengths.clear()
        async with refused(dialect, anthropic.BadRequestError, openai.BadRequestError) as caught:
            await ask(dialect, gateway.url, "a\n" * (size // 3), stream=False)
        assert (max(lengths, default=0) > size // 3) is seen and f"{limit}" in str(caught.value)


def kept(gateway: RunningGateway) -> list[int]:
    """How much is remembered of what the execution sent."""
    execution = gateway.app.executions[7, 1]
    contexts = execution.lineage.contexts.values()
    return [*execution.history.sizes(), len(contexts), sum(len(context.children) for context in contexts)]


@DIALECT
@pytest.mark.parametrize("why", ["too long", "a picture", "budget"])
async def test_a_refused_request_leaves_nothing_behind_and_the_next_lives_on_recorded_ids(
    rendering: Rendering, tmp_path: Path, dialect: str, why: str
) -> None:
    gateway = await RunningGateway.start(
        rendering, tmp_path, max_context=150, max_calls=1 if why == "budget" else 0
    )
    gateway.engine()
    gateway.script.answers = ["hello<|im_end|>", "bye<|im_end|>"]
    client = Client(dialect, False, gateway.url, 20)
    asked: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    asked += (await client.ask(asked)).echo
    before = kept(gateway)
    extra: Any = {"too long": "word " * 200, "a picture": [PICTURES[dialect]], "budget": "more"}[why]
    for number in range(3):
        foreign = {"role": "assistant", "content": f"not yours {number}"}
        with pytest.raises(VisibleFault):
            await client.ask(
                [
                    *asked,
                    foreign,
                    {"role": "user", "content": f"{number}"},
                    {"role": "user", "content": extra},
                ]
            )
        assert kept(gateway) == before
    gateway.app.settings.max_calls = 0
    await client.ask(asked)
    first, second = await gateway.records()
    known = [*first.prompt_ids, *first.output_ids]
    assert second.prompt_ids[: len(known)].tolist() == known and second.forks == ()
    await gateway.stop()


def test_ids_of_any_length_are_not_kept() -> None:
    canonical._minted.cache_clear()
    assert canonical.handle_call("call_e" + "9" * 1000 + "a1c0_0") is None
    assert canonical.handle_call("call_e1a1c0_0") == "e1a1c0"
    assert canonical._minted.cache_info().currsize == 1
