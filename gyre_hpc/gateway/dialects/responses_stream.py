"""The OpenAI Responses answer: output items, and the grammar of one streamed answer.

`response.created`, then `response.in_progress` as often as the connection must be kept alive (comments do not count as
life), then each item added, filled and done, then `response.completed`, or `response.incomplete` for an answer cut by
length. Sequence numbers have no gaps. Items: reasoning (text as its summary, our handle as `encrypted_content`),
message (always there when nothing is called), one item per tool call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from gyre_hpc.gateway.canonical import ToolForm, signature_handle, tool_handle
from gyre_hpc.gateway.dialects.base import Reply
from gyre_hpc.gateway.parts import Part, Reasoning, Sent, Text, ToolCall
from gyre_hpc.gateway.rendering import ParsedToolCall
from gyre_hpc.records import FinishReason

Item = dict[str, Any]


class ResponsesStream:
    """One streamed answer."""

    def __init__(self, call: str, model: str, created: int) -> None:
        self._response = _envelope(call, model, created)
        self._sequence = 0
        self._sent = Sent()
        self._output: list[Item] = []

    def open(self) -> bytes:
        return self._event("response.created", response=self._response)

    def beat(self) -> bytes:
        return self._event("response.in_progress", response=self._response)

    def progress(self, reply: Reply) -> bytes:
        return b"".join(self._adding(_items(reply, self._sent.rest(reply.answer), "completed")))

    def finish(self, reply: Reply) -> bytes:
        return b"".join(self._closing(reply))

    def _closing(self, reply: Reply) -> Iterator[bytes]:
        yield from self._adding(_last_items(reply, self._sent))
        whole = finished_response(reply, self._output)
        yield self._event(f"response.{whole['status']}", response=whole)

    def _adding(self, items: Iterable[Item]) -> Iterator[bytes]:
        """Each item added, filled and done."""
        for item in items:
            index = len(self._output)
            self._output.append(item)
            place = {"output_index": index, "item_id": item["id"]}
            yield self._event("response.output_item.added", output_index=index, item=_emptied(item))
            for kind, fields in _filling(item):
                yield self._event(kind, **place, **fields)
            yield self._event("response.output_item.done", output_index=index, item=item)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = msgspec.json.encode({"type": kind, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return f"event: {kind}\ndata: ".encode() + data + b"\n\n"


def finished_response(reply: Reply, output: list[Item] | None = None) -> dict[str, Any]:
    """The response object of a finished answer, with the items that were sent for it, if any were."""
    cut = reply.finish is FinishReason.LENGTH
    return {
        **_envelope(reply.call, reply.model, reply.created),
        "status": _status(reply),
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": list(_last_items(reply, Sent())) if output is None else output,
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": reply.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": reply.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + reply.output_tokens,
        },
    }


def _envelope(call: str, model: str, created: int) -> dict[str, Any]:
    return {
        "id": f"resp_{call}",
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "usage": None,
    }


def _status(reply: Reply) -> str:
    return "incomplete" if reply.finish is FinishReason.LENGTH else "completed"


def _last_items(reply: Reply, sent: Sent) -> Iterator[Item]:
    """All items that are not sent; a message in any case when nothing is called."""
    yield from _items(reply, sent.rest(reply.answer), _status(reply))
    if not reply.answer.content and not reply.answer.tool_calls:
        yield _message_item(reply, Text(0, ""), _status(reply))


def _items(reply: Reply, parts: Iterable[Part], status: str) -> Iterator[Item]:
    for part in parts:
        match part:
            case Reasoning():
                yield {
                    "id": tool_handle("rs", reply.call, 0),
                    "type": "reasoning",
                    "summary": [{"type": "summary_text", "text": part.text}],
                    "encrypted_content": signature_handle(reply.call),
                }
            case Text():
                yield _message_item(reply, part, status)
            case ToolCall():
                yield _tool_item(reply, part.index, part.call)


def _message_item(reply: Reply, part: Text, status: str) -> Item:
    text = part.text.removeprefix("\n") if part.number else part.text
    return {
        "id": tool_handle("msg", reply.call, part.number),
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}],
    }


def _tool_item(reply: Reply, index: int, call: ParsedToolCall) -> Item:
    """A call in the form its tool wants; a name that was not offered is a plain function's."""
    form = reply.forms.get(call.name) or ToolForm(False, "", call.name)
    kind, prefix = ("custom_tool_call", "ctc") if form.custom else ("function_call", "fc")
    item: Item = {
        "id": tool_handle(prefix, reply.call, index),
        "type": kind,
        "status": "completed",
        "call_id": tool_handle("call", reply.call, index),
        "name": form.name,
    }
    if form.namespace:
        item["namespace"] = form.namespace
    if form.custom:
        item["input"] = _freeform_input(call.arguments)
    else:
        item["arguments"] = call.arguments
    return item


def _freeform_input(arguments: str) -> str:
    """The text handed to a custom tool: its one argument, or all that was given when that is missing."""
    given = msgspec.json.decode(arguments)
    text = given.get("input") if isinstance(given, dict) else None
    return text if isinstance(text, str) else arguments


def _emptied(item: Item) -> Item:
    """The item as output_item.added shows it."""
    empty: Item = {"summary": [], "content": [], "arguments": "", "input": "", "status": "in_progress"}
    return {key: empty.get(key, value) for key, value in item.items()}


def _filling(item: Item) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events that build an item, without its place."""
    match item["type"]:
        case "reasoning":
            place: dict[str, Any] = {"summary_index": 0}
            part = item["summary"][0]
            yield "response.reasoning_summary_part.added", {**place, "part": {**part, "text": ""}}
            yield "response.reasoning_summary_text.delta", {**place, "delta": part["text"]}
            yield "response.reasoning_summary_text.done", {**place, "text": part["text"]}
            yield "response.reasoning_summary_part.done", {**place, "part": part}
        case "message":
            place = {"content_index": 0}
            part = item["content"][0]
            yield "response.content_part.added", {**place, "part": {**part, "text": ""}}
            if part["text"]:
                yield "response.output_text.delta", {**place, "delta": part["text"], "logprobs": []}
            yield "response.output_text.done", {**place, "text": part["text"], "logprobs": []}
            yield "response.content_part.done", {**place, "part": part}
        case "function_call":
            yield "response.function_call_arguments.delta", {"delta": item["arguments"]}
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", done
        case _:
            yield "response.custom_tool_call_input.delta", {"delta": item["input"]}
            yield "response.custom_tool_call_input.done", {"input": item["input"]}
