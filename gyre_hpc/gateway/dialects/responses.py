"""OpenAI Responses: `POST .../v1/responses`, streamed or not.

Reading: the input's items keep their places; the items of one answer (reasoning, message, calls: those that follow each
other and carry handles of the same call) are one assistant turn; `developer` is `system`, `instructions` a system turn
before all. Custom (freeform) tools are offered to the policy as functions with the one string argument `input`, tools
of a namespace under `namespace.name`; server tools are not offered. Nothing is stored: what refers to an earlier
response is refused. Writing (responses_stream.py): each item carries handles of ours, reasoning in `encrypted_content`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import xxhash

from gyre_hpc.gateway.canonical import (
    EchoedCall,
    History,
    Owner,
    Request,
    ToolForm,
    Turn,
    digest,
    handle_call,
    joined_text,
    read_json,
    signature_handle,
)
from gyre_hpc.gateway.dialects.base import (
    Refusal,
    RefusalKind,
    Reply,
    block_kind,
    decode_body,
    invalid,
    list_field,
    read_wishes,
    text_field,
)
from gyre_hpc.gateway.dialects.responses_stream import ResponsesStream, finished_response

_STATUS = {
    RefusalKind.INVALID: (400, "invalid_request_error", "invalid_value"),
    RefusalKind.TOO_LONG: (400, "invalid_request_error", "context_length_exceeded"),
    RefusalKind.TOO_LARGE: (413, "invalid_request_error", "request_too_large"),
    RefusalKind.SLOW: (408, "invalid_request_error", "request_timeout"),
    RefusalKind.BUDGET: (400, "invalid_request_error", "budget_exhausted"),
    RefusalKind.NOT_FOUND: (404, "invalid_request_error", "not_found"),
    RefusalKind.OVERLOADED: (503, "server_error", "server_is_overloaded"),
}
_ROLES = {"system": "system", "developer": "system", "user": "user"}
_ANSWERED = frozenset({"reasoning", "function_call", "custom_tool_call"})
_RESULTS = frozenset({"function_call_output", "custom_tool_call_output"})
_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text"})
_NOTHING = msgspec.Raw(b"")
FREEFORM = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The tool's whole input, as text."}},
    "required": ["input"],
}
"""Parameters of a custom tool as the policy sees it."""


class _Body(msgspec.Struct):
    """Outline of a request; fields that only state wishes are kept raw."""

    input: msgspec.Raw
    model: str = ""
    instructions: str | None = None
    tools: msgspec.Raw = _NOTHING
    max_output_tokens: int | None = None
    stream: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: msgspec.Raw = _NOTHING
    prompt: msgspec.Raw = _NOTHING
    temperature: msgspec.Raw = _NOTHING
    top_p: msgspec.Raw = _NOTHING
    tool_choice: msgspec.Raw = _NOTHING
    parallel_tool_calls: msgspec.Raw = _NOTHING
    reasoning: msgspec.Raw = _NOTHING
    text: msgspec.Raw = _NOTHING
    truncation: msgspec.Raw = _NOTHING
    store: msgspec.Raw = _NOTHING
    include: msgspec.Raw = _NOTHING


_WISHES = (
    "temperature", "top_p", "tool_choice", "parallel_tool_calls", "reasoning", "text", "truncation", "store", "include",
)  # fmt: skip
_ABSENT = (b"", b"null")


class _Head(msgspec.Struct):
    """What decides which turn an item belongs to."""

    type: str | None = None
    role: str | None = None
    id: str | None = None
    call_id: str | None = None
    encrypted_content: str | None = None

    @property
    def answered(self) -> bool:
        """Whether the item is (part of) an assistant turn."""
        return self.type in _ANSWERED or (self.type in (None, "message") and self.role == "assistant")

    @property
    def call(self) -> str | None:
        """The call that minted the item."""
        handles = (self.encrypted_content, self.call_id, self.id)
        return next((call for text in handles if text and (call := handle_call(text))), None)


class OpenAIResponses:
    """The dialect."""

    name = "openai-responses"

    def read(self, body: bytes, history: History) -> Request:
        outline = decode_body(body, _Body)
        _refuse_stored(outline)
        limit = outline.max_output_tokens
        if limit is not None and limit < 1:
            raise invalid("max_output_tokens: must be at least 1")
        raws = list(_turns(_items(outline.input), history))
        if not raws:
            raise invalid("input: at least one item is required")
        if outline.instructions:
            head = {"type": "message", "role": "system", "content": outline.instructions}
            raws.insert(0, msgspec.Raw(msgspec.json.encode(head)))
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
            max_tokens=limit,
            stream=bool(outline.stream),
            wishes=read_wishes(outline, _WISHES),
            forms=history.forms[bytes(outline.tools)],
            fresh=fresh,
        )

    def stream(self, request: Request, call: str, created: int, prompt_tokens: int) -> ResponsesStream:
        return ResponsesStream(call, request.model, created)

    def answer(self, reply: Reply) -> bytes:
        return msgspec.json.encode(finished_response(reply))

    def error(self, refusal: Refusal) -> tuple[int, bytes]:
        status, kind, code = _STATUS[refusal.kind]
        text = refusal.message
        if refusal.kind is RefusalKind.TOO_LONG:
            text = (
                f"Your input exceeds the context window of this model: {refusal.tokens} tokens > {refusal.limit}"
                " maximum. Please adjust your input and try again."
            )
        error = {"message": text, "type": kind, "param": None, "code": code}
        return status, msgspec.json.encode({"error": error})


def _refuse_stored(outline: _Body) -> None:
    """Whatever needs an earlier response, a prompt or a job kept at the server."""
    given = {
        "previous_response_id": outline.previous_response_id is not None,
        "conversation": bytes(outline.conversation) not in _ABSENT,
        "prompt": bytes(outline.prompt) not in _ABSENT,
        "background": bool(outline.background),
    }
    for name, present in given.items():
        if present:
            raise invalid(f"{name}: nothing is stored here (store=false); send the whole input")


def _items(given: msgspec.Raw) -> list[msgspec.Raw]:
    """The items of an input that may be a bare text. Raises Refusal."""
    if memoryview(given)[0] == ord('"'):
        return [msgspec.Raw(b'{"role":"user","content":' + bytes(given) + b"}")]
    try:
        return msgspec.json.decode(given, type=list[msgspec.Raw])
    except msgspec.DecodeError as error:
        raise invalid(f"input: must be a text or a list of items ({error})") from error


def _turns(items: list[msgspec.Raw], history: History) -> Iterator[msgspec.Raw]:
    """The items, those of one answer put together in a JSON array."""
    group: list[msgspec.Raw] = []
    owner: str | None = None
    for raw, (answered, call) in zip(items, _owners(items, history), strict=True):
        if group and (not answered or (owner and call and call != owner)):
            yield _array(group)
            group, owner = [], None
        if answered:
            group.append(raw)
            owner = owner or call
        else:
            yield raw
    if group:
        yield _array(group)


def _array(items: list[msgspec.Raw]) -> msgspec.Raw:
    return msgspec.Raw(b"[" + b",".join(items) + b"]")


def _owners(items: list[msgspec.Raw], history: History) -> list[Owner]:
    """The owner of each item; an item that was sent before costs one lookup by the hash of its bytes."""
    keys = list(map(xxhash.xxh3_128_digest, items))
    found = list(map(history.owners.get, keys))
    owners: list[Owner] = found  # type: ignore[assignment]
    for index in range(len(items)):
        if found[index] is None:
            head = _head(items[index])
            owners[index] = history.owners[keys[index]] = (head.answered, head.call)
    return owners


def _head(raw: msgspec.Raw) -> _Head:
    try:
        return msgspec.json.decode(raw, type=_Head)
    except msgspec.ValidationError as error:
        raise invalid(f"input: {error}") from error
    except msgspec.DecodeError:
        try:
            return msgspec.convert(read_json(raw), _Head)
        except (ValueError, msgspec.ValidationError) as error:
            raise invalid(f"input: {error}") from error


def _tools(raw: msgspec.Raw, history: History) -> tuple[tuple[dict[str, Any], ...], bytes]:
    """Tools in the OpenAI Chat shape that renderers print, with `history.forms` saying how each is called."""
    key = bytes(raw)
    if key not in history.forms:
        try:
            given = read_json(raw) if key else []
        except ValueError as error:
            raise invalid(f"tools: {error}") from error
        if not isinstance(given or [], list):
            raise invalid("tools: must be a list")
        offered = [item for tool in given or [] for item in _offered(tool)]
        tools = tuple(tool for tool, _ in offered)
        history.tools[key] = (tools, digest(tools))
        history.forms[key] = {tool["function"]["name"]: form for tool, form in offered}
    return history.tools[key]


def _offered(tool: Any, namespace: str = "") -> Iterator[tuple[dict[str, Any], ToolForm]]:
    """What the policy sees of a tool, and how a call to it is written. Nothing for tools that a server would run."""
    if not isinstance(tool, dict):
        raise invalid("tools: each tool must be an object")
    kind, name = tool.get("type"), str(tool.get("name", ""))
    shown = f"{namespace}.{name}" if namespace else name
    if kind == "namespace":
        for inner in list_field(tool, "tools", "tools"):
            yield from _offered(inner, name)
    elif kind in ("function", "custom"):
        custom = kind == "custom"
        text = _freeform_text(tool) if custom else tool.get("description") or ""
        parameters = FREEFORM if custom else tool.get("parameters") or {"type": "object", "properties": {}}
        function = {"name": shown, "description": text, "parameters": parameters}
        yield {"type": "function", "function": function}, ToolForm(custom, namespace, name)


def _freeform_text(tool: dict[str, Any]) -> str:
    """Description of a custom tool, with the grammar of its input."""
    text, form = str(tool.get("description") or ""), tool.get("format")
    if isinstance(form, dict) and form.get("definition"):
        text += f"\nThe input follows this {form.get('syntax') or ''} grammar:\n{form['definition']}"
    return text


def read_turns(raw: msgspec.Raw) -> tuple[Turn, ...]:
    """The turn of one item, or of all items of one answer. Raises Refusal for what cannot be served."""
    try:
        value = read_json(raw)
    except ValueError as error:
        raise invalid(f"input: {error}") from error
    if isinstance(value, list):
        return (_assistant(value),)
    kind = value.get("type") or "message"
    if kind in _RESULTS:
        return (Turn("tool", _text(value.get("output")), tool_call_id=str(value.get("call_id") or "")),)
    if kind != "message":
        raise invalid(f"input: item of type {kind!r} is not supported: send the items of the conversation")
    role = value.get("role")
    if role not in _ROLES:
        raise invalid(f"input: unexpected role {role!r}")
    return (Turn(_ROLES[role], _text(value.get("content"))),)


def _assistant(items: list[dict[str, Any]]) -> Turn:
    text: list[str] = []
    reasoning: list[str] = []
    signatures: list[str] = []
    calls: list[EchoedCall] = []
    for item in items:
        match item.get("type") or "message":
            case "message":
                text.append(_text(item.get("content")))
                signatures += _signature(item.get("id"))
            case "reasoning":
                signatures += _signature(item.get("encrypted_content")) or _signature(item.get("id"))
                reasoning.append(_text(item.get("content")) or _text(item.get("summary")))
            case "function_call":
                calls.append(_call(item, str(item.get("arguments") or "{}")))
            case _:
                calls.append(_call(item, msgspec.json.encode({"input": item.get("input") or ""}).decode()))
    return Turn(
        "assistant", joined_text(text), joined_text(reasoning), tuple(calls), signatures=tuple(signatures)
    )


def _call(item: dict[str, Any], arguments: str) -> EchoedCall:
    namespace, name = item.get("namespace"), str(item.get("name") or "")
    return EchoedCall(str(item.get("call_id") or ""), f"{namespace}.{name}" if namespace else name, arguments)


def _signature(handle: Any) -> list[str]:
    """The handle in the form that all dialects share, if it is one of ours."""
    call = handle_call(handle) if isinstance(handle, str) else None
    return [signature_handle(call)] if call else []


def _text(content: Any) -> str:
    """Text of null, a string or text parts. Raises Refusal for anything else."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise invalid("input: content must be a string or a list of parts")
    parts: list[str] = []
    for part in content:
        kind = block_kind(part)
        if kind not in _TEXT_PARTS:
            raise invalid(
                f"input: content part of type {kind!r} is not supported: this model reads text only"
            )
        parts.append(text_field(part, "text", "input") or text_field(part, "refusal", "input"))
    return joined_text(parts)
