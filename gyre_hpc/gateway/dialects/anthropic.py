"""Anthropic Messages: `POST .../v1/messages`, streamed or not.

Reading: system blocks (the billing header is dropped), tool results and text of one user message become turns in the
order given, system messages inside the conversation stay in place, thinking blocks become reasoning except those that
only kept a connection alive. Writing: one content block per part, thinking first with a signature that is our handle;
while the generation runs, an open thinking block with the handle `keep:<call>` gets empty deltas and a ping, because
a ping alone does not count as life.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from gyre_hpc.gateway.canonical import (
    EchoedCall,
    History,
    Request,
    Turn,
    digest,
    joined_text,
    keepalive_handle,
    read_json,
    signature_handle,
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
    read_wishes,
    text_field,
)
from gyre_hpc.gateway.parts import Part, Reasoning, Sent, Text
from gyre_hpc.records import FinishReason

BILLING_HEADER = "x-anthropic-billing-header:"
_STATUS = {
    RefusalKind.INVALID: (400, "invalid_request_error"),
    RefusalKind.TOO_LONG: (400, "invalid_request_error"),
    RefusalKind.TOO_LARGE: (413, "request_too_large"),
    RefusalKind.SLOW: (408, "invalid_request_error"),
    RefusalKind.BUDGET: (400, "invalid_request_error"),
    RefusalKind.NOT_FOUND: (404, "not_found_error"),
    RefusalKind.OVERLOADED: (529, "overloaded_error"),
}
_STOP_REASON = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
}
_NOTHING = msgspec.Raw(b"")


class _Body(msgspec.Struct):
    """Outline of a request; fields that only state wishes are kept raw."""

    messages: list[msgspec.Raw]
    model: str = ""
    max_tokens: int | None = None
    system: msgspec.Raw = _NOTHING
    tools: msgspec.Raw = _NOTHING
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: msgspec.Raw = _NOTHING
    top_p: msgspec.Raw = _NOTHING
    top_k: msgspec.Raw = _NOTHING
    tool_choice: msgspec.Raw = _NOTHING
    thinking: msgspec.Raw = _NOTHING
    output_config: msgspec.Raw = _NOTHING
    context_management: msgspec.Raw = _NOTHING


_WISHES = ("temperature", "top_p", "top_k", "tool_choice", "thinking", "output_config", "context_management")


class AnthropicMessages:
    """The dialect."""

    name = "anthropic-messages"

    def read(self, body: bytes, history: History) -> Request:
        outline = decode_body(body, _Body)
        if not outline.messages:
            raise invalid("messages: at least one message is required")
        if outline.max_tokens is not None and outline.max_tokens < 1:
            raise invalid("max_tokens: must be greater than or equal to 1")
        raws = outline.messages
        if outline.system and outline.system != b"null":
            raws = [msgspec.Raw(b'{"role":"system","content":' + bytes(outline.system) + b"}"), *raws]
        units, fresh = history.read(raws, read_turns)
        tools, tools_digest = _tools(outline.tools, history)
        return Request(
            dialect=self.name,
            model=outline.model,
            units=units,
            raws=raws,
            read=read_turns,
            tools=tools,
            tools_digest=tools_digest,
            max_tokens=outline.max_tokens,
            stop=tuple(outline.stop_sequences or ()),
            stream=bool(outline.stream),
            wishes=read_wishes(outline, _WISHES),
            fresh=fresh,
        )

    def stream(self, request: Request, call: str, created: int, prompt_tokens: int) -> AnthropicStream:
        return AnthropicStream(call, request.model, prompt_tokens)

    def answer(self, reply: Reply) -> bytes:
        message = _envelope(reply.call, reply.model, reply.prompt_tokens)
        message["content"] = [_block(reply.call, part)[0] for part in Sent().rest(reply.answer)]
        message["stop_reason"], message["stop_sequence"] = _stop(reply), reply.stop_sequence
        message["usage"]["output_tokens"] = reply.output_tokens
        return msgspec.json.encode(message)

    def error(self, refusal: Refusal) -> tuple[int, bytes]:
        status, kind = _STATUS[refusal.kind]
        text = refusal.message
        if refusal.kind is RefusalKind.TOO_LONG:
            text = f"prompt is too long: {refusal.tokens} tokens > {refusal.limit} maximum"
        return status, msgspec.json.encode({"type": "error", "error": {"type": kind, "message": text}})


class AnthropicStream:
    """Grammar of one streamed answer: message_start, blocks, message_delta, message_stop."""

    def __init__(self, call: str, model: str, prompt_tokens: int) -> None:
        self._call = call
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._keeping = False
        self._index = 0
        """Of the open block, else of the next one."""
        self._sent = Sent()

    def open(self) -> bytes:
        return _event("message_start", message=_envelope(self._call, self._model, self._prompt_tokens))

    def beat(self) -> bytes:
        events = b""
        if not self._keeping:
            self._keeping = True
            block = {"type": "thinking", "thinking": "", "signature": ""}
            events = _event("content_block_start", index=self._index, content_block=block)
        delta = {"type": "thinking_delta", "thinking": ""}
        return events + _event("content_block_delta", index=self._index, delta=delta) + _event("ping")

    def progress(self, reply: Reply) -> bytes:
        parts = list(self._sent.rest(reply.answer))
        return b"".join(self._filling(reply.call, parts)) if parts else b""

    def finish(self, reply: Reply) -> bytes:
        return b"".join(self._closing(reply))

    def _closing(self, reply: Reply) -> Iterator[bytes]:
        yield from self._filling(reply.call, self._sent.rest(reply.answer))
        stop = {"stop_reason": _stop(reply), "stop_sequence": reply.stop_sequence}
        yield _event("message_delta", delta=stop, usage={"output_tokens": reply.output_tokens})
        yield _event("message_stop")

    def _filling(self, call: str, parts: Iterable[Part]) -> Iterator[bytes]:
        """The block that kept the connection alive is closed; then one block per part."""
        if self._keeping:
            self._keeping = False
            delta = {"type": "signature_delta", "signature": keepalive_handle(self._call)}
            yield _event("content_block_delta", index=self._index, delta=delta)
            yield _event("content_block_stop", index=self._index)
            self._index += 1
        for part in parts:
            block, deltas = _block(call, part)
            yield _event("content_block_start", index=self._index, content_block=_emptied(block))
            for delta in deltas:
                yield _event("content_block_delta", index=self._index, delta=delta)
            yield _event("content_block_stop", index=self._index)
            self._index += 1


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + msgspec.json.encode({"type": kind, **fields}) + b"\n\n"


def _envelope(call: str, model: str, prompt_tokens: int) -> dict[str, Any]:
    usage = {
        "input_tokens": prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 0,
    }
    return {
        "id": f"msg_{call}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def _stop(reply: Reply) -> str:
    return "stop_sequence" if reply.stop_sequence is not None else _STOP_REASON[reply.finish]


def _block(call: str, part: Part) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A content block, whole and as the deltas that build it."""
    if isinstance(part, Reasoning):
        signature = signature_handle(call)
        return {"type": "thinking", "thinking": part.text, "signature": signature}, [
            {"type": "thinking_delta", "thinking": part.text},
            {"type": "signature_delta", "signature": signature},
        ]
    if isinstance(part, Text):
        text = part.text.removeprefix("\n") if part.number else part.text
        return {"type": "text", "text": text}, [{"type": "text_delta", "text": text}]
    whole = {
        "type": "tool_use",
        "id": tool_handle("toolu", call, part.index),
        "name": part.call.name,
        "input": msgspec.Raw(part.call.arguments.encode()),
    }
    return whole, [{"type": "input_json_delta", "partial_json": part.call.arguments}]


def _emptied(block: dict[str, Any]) -> dict[str, Any]:
    """The block as content_block_start shows it."""
    empty = {"thinking": "", "signature": "", "text": "", "input": {}}
    return {key: empty.get(key, value) for key, value in block.items()}


def _tools(raw: msgspec.Raw, history: History) -> tuple[tuple[dict[str, Any], ...], bytes]:
    key = bytes(raw)
    if key not in history.tools:
        try:
            given = read_json(raw) if key else []
        except ValueError as error:
            raise invalid(f"tools: {error}") from error
        if not isinstance(given or [], list):
            raise invalid("tools: must be a list")
        tools = tuple(
            _tool(tool) for tool in given or [] if isinstance(tool, dict) and "input_schema" in tool
        )
        history.tools[key] = (tools, digest(tools))
    return history.tools[key]


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """The OpenAI shape that renderers print. Server tools have no schema and are not offered to the policy."""
    function = {
        "name": tool.get("name", ""),
        "description": tool.get("description", ""),
        "parameters": tool["input_schema"],
    }
    return {"type": "function", "function": function}


def read_turns(raw: msgspec.Raw) -> tuple[Turn, ...]:
    """The turns of one message. Raises Refusal for what cannot be served."""
    message = decode_message(raw)
    role, content = message.get("role"), message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    if not isinstance(blocks, list):
        raise invalid("messages: content must be a string or a list of blocks")
    if role == "assistant":
        return (_assistant(blocks),)
    if role in ("user", "system"):
        return _given(role, blocks)
    raise invalid(f"messages: unexpected role {role!r}")


def _assistant(blocks: list[Any]) -> Turn:
    text: list[str] = []
    reasoning: list[str] = []
    signatures: list[str] = []
    calls: list[EchoedCall] = []
    for block in blocks:
        match block_kind(block):
            case "text":
                text.append(text_field(block, "text"))
            case "thinking":
                signature = text_field(block, "signature")
                signatures.append(signature)
                if not signature.startswith("keep:"):
                    reasoning.append(text_field(block, "thinking"))
            case "tool_use":
                arguments = msgspec.json.encode(block.get("input") or {}).decode()
                calls.append(EchoedCall(str(block.get("id", "")), str(block.get("name", "")), arguments))
            case "redacted_thinking":
                pass
            case other:
                raise invalid(
                    f"messages: content block of type {other!r} is not supported in an assistant message"
                )
    return Turn(
        "assistant", joined_text(text), joined_text(reasoning), tuple(calls), signatures=tuple(signatures)
    )


def _given(role: str, blocks: list[Any]) -> tuple[Turn, ...]:
    """Turns of a user or system message: runs of text, and tool results one by one, in the order given."""
    turns: list[Turn] = []
    text: list[str] = []
    for block in blocks:
        if block_kind(block) == "tool_result":
            if text:
                turns.append(Turn(role, joined_text(text)))
                text = []
            handle = str(block.get("tool_use_id", ""))
            turns.append(Turn("tool", _text(block.get("content")), tool_call_id=handle))
        else:
            text.append(_text([block]))
    if text or not turns:
        turns.append(Turn(role, joined_text(text)))
    return tuple(turns)


def _text(content: Any) -> str:
    """Text of a string or of text blocks. Raises Refusal for anything else."""
    if isinstance(content, str):
        return content
    if not isinstance(content or [], list):
        raise invalid("messages: content must be a string or a list of blocks")
    parts: list[str] = []
    for block in content or []:
        kind = block_kind(block)
        if kind != "text":
            raise invalid(
                f"messages: content block of type {kind!r} is not supported: this model reads text only"
            )
        text = text_field(block, "text")
        if not text.startswith(BILLING_HEADER):
            parts.append(text)
    return joined_text(parts)
