"""Every event of a streamed answer has the shape that the vendor's own library declares for it, keep-alives included."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pydantic
import pytest

from gyre_hpc.gateway.parts import DeliverMode
from gyre_hpc.gateway.rendering import Rendering

from .fakes import RunningGateway
from .faults.clients import DIALECTS

TOOL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
ANSWERS = {
    "all": f"<think>\nhm\n</think>\n\nlooking\n{TOOL}\n{TOOL}<|im_end|>",
    "text": "looking twice<|im_end|>",
    "call": f"{TOOL}<|im_end|>",
    "nothing": "<|im_end|>",
    "cut": "looking for ever",
}
EVENT: dict[str, Any] = {
    "anthropic-messages": anthropic.types.RawMessageStreamEvent,
    "openai-chat": openai.types.chat.ChatCompletionChunk,
    "openai-responses": openai.types.responses.ResponseStreamEvent,
}
PATH = {
    "anthropic-messages": "messages",
    "openai-chat": "chat/completions",
    "openai-responses": "responses",
}
BEAT = {
    "anthropic-messages": b"thinking_delta",
    "openai-chat": b'"content":""',
    "openai-responses": b"in_progress",
}
"""What a keep-alive contains."""


async def streamed(gateway: RunningGateway, dialect: str, limit: int) -> list[tuple[str, bytes]]:
    """(name, data) of every event of one answer, its engine silent until three keep-alives have come."""
    messages = [{"role": "user", "content": "go"}]
    body: dict[str, Any] = {"model": "m", "stream": True, "max_tokens": limit, "messages": messages}
    if dialect == "openai-responses":
        body = {"model": "m", "stream": True, "max_output_tokens": limit, "input": messages}
    if dialect == "openai-chat":
        body["stream_options"] = {"include_usage": True}
    received = b""
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{gateway.url}/v1/{PATH[dialect]}", json=body) as response,
    ):
        assert response.content_type == "text/event-stream"
        async for piece in response.content.iter_any():
            received += piece
            if received.count(BEAT[dialect]) > 3:
                gateway.engines["http://cell-0-0"].go.set()
    events = [event.split(b"\n") for event in received.removesuffix(b"\n\n").split(b"\n\n")]
    assert all(lines[-1].startswith(b"data: ") for lines in events)
    return [
        (
            lines[0].removeprefix(b"event: ").decode() if len(lines) > 1 else "",
            lines[-1].removeprefix(b"data: "),
        )
        for lines in events
    ]


@pytest.mark.parametrize("mode", list(DeliverMode))
@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_every_event_is_one_the_vendor_declares(
    rendering: Rendering, tmp_path: Path, dialect: str, answer: str, mode: DeliverMode
) -> None:
    gateway = await RunningGateway.start(rendering, tmp_path, keepalive_s=0.02)
    gateway.app.deliver = mode
    gateway.engine(pause_after=0)
    gateway.script.answers = [ANSWERS[answer]]
    limit = len(rendering.tokenizer.encode(ANSWERS["cut"])) - 1 if answer == "cut" else 300
    async with asyncio.timeout(60):
        events = await streamed(gateway, dialect, limit)
    await gateway.stop()
    if dialect == "openai-chat":
        assert events.pop() == ("", b"[DONE]")
    declared = pydantic.TypeAdapter(EVENT[dialect])
    for name, data in events:
        if name == "ping":
            assert json.loads(data) == {"type": "ping"}
            continue
        assert name == ("" if dialect == "openai-chat" else json.loads(data)["type"])
        declared.validate_json(data)
