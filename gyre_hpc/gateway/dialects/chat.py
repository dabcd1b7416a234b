"""OpenAI Chat Completions: `POST .../chat/completions`, streamed or not.

Reading: `developer` is `system`, `function` is `tool`, content parts are joined, null, missing and "" are one; messages
keep their places. Writing: `reasoning_content`, then content, then one index per tool call; while the generation runs a
stream gets chunks with an empty content delta, because comments do not count as life everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from gyre_hpc.gateway.canonical import (
    EchoedCall,
    History,
    Request,
    Turn,
    digest,
    joined_text,
    read_json,
    tool_handle,
)
from gyre_hpc.gateway.dialects.base import (
    Refusal,
    RefusalKind,
    Reply,
    block_kind,
    decode_body,
    decode_message,
    invalid,
    list_field,
    read_wishes,
    text_field,
)
from gyre_hpc.gateway.parts import Reasoning, Sent, Text, ToolCall
from gyre_hpc.gateway.rendering import ParsedToolCall

_STATUS = {
    RefusalKind.INVALID: (400, "invalid_request_error", "invalid_value"),
    RefusalKind.TOO_LONG: (400, "invalid_request_error", "context_length_exceeded"),
    RefusalKind.TOO_LARGE: (413, "invalid_request_error", "request_too_large"),
    RefusalKind.SLOW: (408, "invalid_request_error", "request_timeout"),
    RefusalKind.BUDGET: (400, "invalid_request_error", "budget_exhausted"),
    RefusalKind.NOT_FOUND: (404, "invalid_request_error", "not_found"),
    RefusalKind.OVERLOADED: (503, "server_error", "overloaded"),
}
_ROLES = {"system": "system", "developer": "system", "user": "user", "tool": "tool", "function": "tool"}
_NOTHING = msgspec.Raw(b"")


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct):
    """Outline of a request; fields that only state wishes are kept raw."""

    messages: list[msgspec.Raw]
    model: str = ""
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    tools: msgspec.Raw = _NOTHING
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: int | None = None
    temperature: msgspec.Raw = _NOTHING
    top_p: msgspec.Raw = _NOTHING
    top_k: msgspec.Raw = _NOTHING
    seed: msgspec.Raw = _NOTHING
    presence_penalty: msgspec.Raw = _NOTHING
    frequency_penalty: msgspec.Raw = _NOTHING
    logit_bias: msgspec.Raw = _NOTHING
    tool_choice: msgspec.Raw = _NOTHING
    parallel_tool_calls: msgspec.Raw = _NOTHING
    response_format: msgspec.Raw = _NOTHING
    reasoning_effort: msgspec.Raw = _NOTHING
    logprobs: msgspec.Raw = _NOTHING


_WISHES = (
    "temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty", "logit_bias", "tool_choice",
    "parallel_tool_calls", "response_format", "reasoning_effort", "logprobs",
)  # fmt: skip


class ChatCompletions:
    """The dialect."""

    name = "openai-chat"

    def read(self, body: bytes, history: History) -> Request:
        outline = decode_body(body, _Body)
        limit = outline.max_completion_tokens or outline.max_tokens
        if not outline.messages:
            raise invalid("messages: at least one message is required")
        if outline.n not in (None, 1):
            raise invalid(f"n: {outline.n} choices are not supported; send {outline.n} requests")
        if limit is not None and limit < 1:
            raise invalid("max_tokens: must be at least 1")
        units, fresh = history.read(outline.messages, read_turns)
        tools, tools_digest = _tools(outline.tools, history)
        options = outline.stream_options
        return Request(
            dialect=self.name,
            model=outline.model,
            units=units,
            raws=outline.messages,
            read=read_turns,
            tools=tools,
            tools_digest=tools_digest,
            max_tokens=limit,
            stop=(outline.stop,) if isinstance(outline.stop, str) else tuple(outline.stop or ()),
            stream=bool(outline.stream),
            include_usage=bool(options and options.include_usage),
            wishes=read_wishes(outline, _WISHES),
            fresh=fresh,
        )

    def stream(self, request: Request, call: str, created: int, prompt_tokens: int) -> ChatStream:
        return ChatStream(call, request.model, created, request.include_usage)

    def answer(self, reply: Reply) -> bytes:
        choice = {
            "index": 0,
            "message": _message(reply),
            "logprobs": None,
            "finish_reason": reply.finish.value,
        }
        return msgspec.json.encode(
            {
                "id": f"chatcmpl-{reply.call}",
                "object": "chat.completion",
                "created": reply.created,
                "model": reply.model,
                "choices": [choice],
                "usage": _usage(reply),
            }
        )

    def error(self, refusal: Refusal) -> tuple[int, bytes]:
        status, kind, code = _STATUS[refusal.kind]
        text = refusal.message
        if refusal.kind is RefusalKind.TOO_LONG:
            text = (
                f"This model's maximum context length is {refusal.limit} tokens. However, your messages resulted in"
                f" {refusal.tokens} tokens. Please reduce the length of the messages."
            )
        error = {"message": text, "type": kind, "param": None, "code": code}
        return status, msgspec.json.encode({"error": error})


class ChatStream:
    """Grammar of one streamed answer: role, deltas, finish_reason, usage when asked, [DONE]."""

    def __init__(self, call: str, model: str, created: int, include_usage: bool) -> None:
        self._head = {
            "id": f"chatcmpl-{call}",
            "object": "chat.completion.chunk",
            "created": created,
            "model": model,
        }
        self._include_usage = include_usage
        self._sent = Sent()

    def open(self) -> bytes:
        return self._delta({"role": "assistant", "content": ""})

    def beat(self) -> bytes:
        return self._delta({"content": ""})

    def progress(self, reply: Reply) -> bytes:
        return b"".join(self._filling(reply))

    def finish(self, reply: Reply) -> bytes:
        return b"".join(self._closing(reply))

    def _closing(self, reply: Reply) -> Iterator[bytes]:
        yield from self._filling(reply)
        yield self._delta({}, finish_reason=reply.finish.value)
        if self._include_usage:
            yield self._chunk([], usage=_usage(reply))
        yield b"data: [DONE]\n\n"

    def _filling(self, reply: Reply) -> Iterator[bytes]:
        """A delta per part not sent yet."""
        for part in self._sent.rest(reply.answer):
            match part:
                case Reasoning():
                    yield self._delta({"reasoning_content": part.text})
                case Text():
                    yield self._delta({"content": part.text})
                case ToolCall():
                    call = _call_of(reply.call, part.index, part.call)
                    yield self._delta({"tool_calls": [{"index": part.index, **call}]})

    def _delta(self, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return self._chunk([choice])

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return b"data: " + msgspec.json.encode({**self._head, "choices": choices, **more}) + b"\n\n"


def _call_of(owner: str, index: int, call: ParsedToolCall) -> dict[str, Any]:
    return {
        "id": tool_handle("call", owner, index),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _message(reply: Reply) -> dict[str, Any]:
    answer = reply.answer
    calls = [_call_of(reply.call, index, call) for index, call in enumerate(answer.tool_calls)]
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if calls:
        message["content"] = answer.content or None
        message["tool_calls"] = calls
    return message


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.output_tokens,
        "total_tokens": reply.prompt_tokens + reply.output_tokens,
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
    }


def _tools(raw: msgspec.Raw, history: History) -> tuple[tuple[dict[str, Any], ...], bytes]:
    key = bytes(raw)
    if key not in history.tools:
        try:
            given = read_json(raw) if key else []
        except ValueError as error:
            raise invalid(f"tools: {error}") from error
        if not isinstance(given or [], list):
            raise invalid("tools: must be a list")
        for tool in given or []:
            if not isinstance(tool, dict) or not isinstance(tool.get("function"), dict):
                raise invalid("tools: only tools of type 'function' are supported")
        tools = tuple({"type": "function", "function": tool["function"]} for tool in given or [])
        history.tools[key] = (tools, digest(tools))
    return history.tools[key]


def read_turns(raw: msgspec.Raw) -> tuple[Turn, ...]:
    """The turn of one message. Raises Refusal for what cannot be served."""
    message = decode_message(raw)
    role = text_field(message, "role")
    text = _text(message.get("content"))
    if role == "assistant":
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        calls = tuple(_call(call) for call in list_field(message, "tool_calls"))
        return (Turn("assistant", text, reasoning if isinstance(reasoning, str) else "", calls),)
    if role not in _ROLES:
        raise invalid(f"messages: unexpected role {role!r}")
    return (Turn(_ROLES[role], text, tool_call_id=str(message.get("tool_call_id") or "")),)


def _call(call: Any) -> EchoedCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise invalid("messages: a tool call without a function is not supported")
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode()
    return EchoedCall(str(call.get("id") or ""), str(function.get("name") or ""), arguments)


def _text(content: Any) -> str:
    """Text of null, a string or text parts. Raises Refusal for anything else."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise invalid("messages: content must be a string or a list of parts")
    parts: list[str] = []
    for part in content:
        kind = block_kind(part)
        if kind not in ("text", "refusal"):
            raise invalid(
                f"messages: content part of type {kind!r} is not supported: this model reads text only"
            )
        parts.append(text_field(part, "text") or text_field(part, "refusal"))
    return joined_text(parts)
