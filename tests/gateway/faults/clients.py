"""Vendor clients as harnesses use them: one question, the answer read to its end, and its echo.

A client repeats its request when the connection breaks before anything of the answer came, as every measured harness
does; whatever else goes wrong is a visible fault and raises.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import anthropic
import httpx2
import openai

DIALECTS = ("anthropic-messages", "openai-chat", "openai-responses")
BROKEN = (anthropic.APIConnectionError, openai.APIConnectionError, httpx2.TransportError)
"""What a client raises when its connection breaks."""
TIMEOUT_S = 240.0


class VisibleFault(AssertionError):
    """Something that a harness would see."""


@dataclass
class Outcome:
    """What a client has in hand."""

    thinking: str = ""
    text: str = ""
    tools: list[tuple[str, Any]] = field(default_factory=list)
    finish: str = ""
    output_tokens: int = 0
    prompt_tokens: int = 0
    echo: list[dict[str, Any]] = field(default_factory=list)
    """The answer, and a result for each tool call, as the next request carries them."""
    repeats: int = 0


@dataclass
class Client:
    """One agent: a dialect, streamed or not, and the base URL of its execution."""

    dialect: str
    stream: bool
    url: str
    max_tokens: int = 400
    began: bool = False
    """Something of the answer under way has come."""

    async def ask(self, messages: list[dict[str, Any]]) -> Outcome:
        """Ask until answered. Raises VisibleFault."""
        repeats = 0
        while True:
            self.began = False
            try:
                outcome = await self._once(messages)
            except BROKEN as error:
                if self.began:
                    raise VisibleFault(f"{self}: broken inside the answer: {error!r}") from error
                repeats += 1
            except (anthropic.APIError, openai.APIError) as error:
                raise VisibleFault(f"{self}: {error!r}") from error
            else:
                outcome.repeats = repeats
                return outcome

    async def _once(self, messages: list[dict[str, Any]]) -> Outcome:
        options: dict[str, Any] = {"api_key": "x", "max_retries": 0, "timeout": TIMEOUT_S}
        if self.dialect == "anthropic-messages":
            async with anthropic.AsyncAnthropic(base_url=self.url, **options) as claude:
                return await self._anthropic(claude, messages)
        async with openai.AsyncOpenAI(base_url=f"{self.url}/v1", **options) as gpt:
            return await (self._chat if self.dialect == "openai-chat" else self._responses)(gpt, messages)

    async def _anthropic(self, claude: anthropic.AsyncAnthropic, messages: Any) -> Outcome:
        asked: Any = {"model": "m", "max_tokens": self.max_tokens, "messages": messages}
        if self.stream:
            async with claude.messages.stream(**asked) as stream:
                async for event in stream:
                    if event.type == "content_block_delta" and event.delta.type != "thinking_delta":
                        self.began = True
                message = await stream.get_final_message()
            if message.stop_reason is None:
                raise VisibleFault(f"{self}: a clean end without an end event")
        else:
            message = await claude.messages.create(**asked)
        blocks = [block.to_dict() for block in message.content]
        tools = [block for block in message.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": tool.id, "content": "ok"} for tool in tools]
        return Outcome(
            "".join(block.thinking for block in message.content if block.type == "thinking"),
            "".join(block.text for block in message.content if block.type == "text"),
            [(tool.name, tool.input) for tool in tools],
            str(message.stop_reason),
            message.usage.output_tokens,
            message.usage.input_tokens,
            [
                {"role": "assistant", "content": blocks},
                {"role": "user", "content": [*results, {"type": "text", "text": "on"}]},
            ],
        )

    async def _chat(self, gpt: openai.AsyncOpenAI, messages: Any) -> Outcome:
        asked: Any = {"model": "m", "max_tokens": self.max_tokens, "messages": messages}
        message: dict[str, Any] = {
            "role": "assistant",
            "content": "",
            "reasoning_content": "",
            "tool_calls": [],
        }
        if self.stream:
            finish, usage = await self._chat_stream(gpt, asked, message)
        else:
            answer = await gpt.chat.completions.create(**asked)
            message |= answer.choices[0].message.to_dict()
            finish, usage = answer.choices[0].finish_reason, answer.usage
        tools = message["tool_calls"] or []
        if not tools:
            del message["tool_calls"]
        return Outcome(
            message["reasoning_content"],
            message["content"] or "",
            [(tool["function"]["name"], json.loads(tool["function"]["arguments"])) for tool in tools],
            str(finish),
            usage.completion_tokens,
            usage.prompt_tokens,
            [
                message,
                *({"role": "tool", "tool_call_id": tool["id"], "content": "ok"} for tool in tools),
                {"role": "user", "content": "on"},
            ],
        )

    async def _chat_stream(self, gpt: openai.AsyncOpenAI, asked: Any, message: dict[str, Any]) -> Any:
        finish = usage = None
        async for chunk in await gpt.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        ):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                delta = choice.delta.to_dict()
                finish = choice.finish_reason or finish
                self.began |= any(delta.get(key) for key in ("content", "reasoning_content", "tool_calls"))
                for key in ("content", "reasoning_content"):
                    message[key] += delta.get(key) or ""
                for part in delta.get("tool_calls") or []:  # type: ignore[attr-defined]
                    assert part.pop("index") == len(message["tool_calls"])
                    message["tool_calls"].append(part)
        if finish is None:
            raise VisibleFault(f"{self}: a clean end without an end event")
        return finish, usage

    async def _responses(self, gpt: openai.AsyncOpenAI, messages: Any) -> Outcome:
        asked: Any = {"model": "m", "max_output_tokens": self.max_tokens, "input": messages}
        response: Any = None
        if self.stream:
            async for event in await gpt.responses.create(**asked, stream=True):
                self.began |= event.type not in ("response.created", "response.in_progress")
                if event.type in ("response.completed", "response.incomplete"):
                    response = event.response
            if response is None:
                raise VisibleFault(f"{self}: a clean end without an end event")
        else:
            response = await gpt.responses.create(**asked)
        items = [item.to_dict() for item in response.output]
        tools = [item for item in items if item["type"] == "function_call"]
        thinking = [part["text"] for item in items if item["type"] == "reasoning" for part in item["summary"]]
        return Outcome(
            "".join(thinking),
            response.output_text,
            [(tool["name"], json.loads(tool["arguments"])) for tool in tools],
            response.status,
            response.usage.output_tokens,
            response.usage.input_tokens,
            [
                *items,
                *({"type": "function_call_output", "call_id": t["call_id"], "output": "ok"} for t in tools),
                {"role": "user", "content": "on"},
            ],
        )
