"""What a legal answer is, per dialect: whole or streamed, or a clean refusal. Raises AssertionError saying what is wrong.

Written from the vendors' references, and from their client libraries in `vendor_reads` (slower, for a share of the answers).
"""

from __future__ import annotations

import json
from typing import Any

import anthropic.types
import openai.types.chat
import openai.types.responses

Event = dict[str, Any]
REFUSALS = {400, 404, 405, 408, 413}


def check(dialect: str, status: int, head: bytes, body: bytes) -> None:
    """One answer to one request."""
    if status != 200:
        assert status in REFUSALS, f"status {status}"
        _refusal(dialect, head, body)
    elif b"text/event-stream" in head:
        _STREAMS[dialect](events(body))
    else:
        _WHOLES[dialect](json.loads(body))


def vendor_reads(dialect: str, head: bytes, body: bytes) -> None:
    """The vendor's own types take the answer. Raises pydantic.ValidationError."""
    if b"text/event-stream" not in head:
        _VENDORS[dialect].model_validate(json.loads(body))
    elif dialect == "responses":
        whole = events(body)[-1]["response"]
        openai.types.responses.Response.model_validate(whole)
    elif dialect == "chat":
        for event in events(body):
            openai.types.chat.ChatCompletionChunk.model_validate(event)


def events(body: bytes) -> list[Event]:
    """The data of all server-sent events; [DONE] is left out."""
    assert body.endswith(b"\n\n"), "a stream ends between two events"
    found: list[Event] = []
    for block in body[:-2].split(b"\n\n"):
        lines = block.split(b"\n")
        assert lines[-1].startswith(b"data: "), block[:200]
        if lines[-1] == b"data: [DONE]":
            continue
        event = json.loads(lines[-1][6:])
        if len(lines) == 2:
            assert lines[0] == b"event: " + event["type"].encode(), lines[0]
        found.append(event)
    return found


def _refusal(dialect: str, head: bytes, body: bytes) -> None:
    if b"text/plain" in head:
        return
    answer = json.loads(body)
    error = answer["error"]
    assert isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str)
    if dialect in ("messages", "count"):
        assert answer["type"] == "error"
    else:
        assert isinstance(error["code"], str)


def _message(answer: Event) -> None:
    assert answer["type"] == "message" and answer["role"] == "assistant" and answer["id"].startswith("msg_")
    assert answer["stop_reason"] in ("end_turn", "max_tokens", "tool_use", "stop_sequence")
    assert (answer["stop_reason"] == "tool_use") <= any(b["type"] == "tool_use" for b in answer["content"])
    for block in answer["content"]:
        _block(block)
    assert answer["usage"]["input_tokens"] > 0 and answer["usage"]["output_tokens"] >= 0


def _block(block: Event) -> None:
    match block["type"]:
        case "text":
            assert isinstance(block["text"], str)
        case "thinking":
            assert isinstance(block["thinking"], str) and isinstance(block["signature"], str)
        case "tool_use":
            assert isinstance(block["input"], dict) and block["name"] and block["id"]
        case other:
            raise AssertionError(f"block of type {other}")


def _message_stream(given: list[Event]) -> None:
    given = [event for event in given if event["type"] != "ping"]
    assert given[0]["type"] == "message_start" and given[-1]["type"] == "message_stop"
    assert given[-2]["type"] == "message_delta" and given[-2]["delta"]["stop_reason"]
    blocks: list[Event] = []
    arguments: list[str] = []
    is_open = False
    for event in given[1:-2]:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(blocks)
            is_open, arguments = True, []
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            assert is_open and event["index"] == len(blocks) - 1
            _fill(blocks[-1], event["delta"], arguments)
        else:
            assert event["type"] == "content_block_stop" and is_open and event["index"] == len(blocks) - 1
            is_open = False
            if arguments:
                blocks[-1]["input"] = json.loads("".join(arguments))
    assert not is_open
    usage = {**given[0]["message"]["usage"], **given[-2]["usage"]}
    _message({**given[0]["message"], "content": blocks, **given[-2]["delta"], "usage": usage})


def _fill(block: Event, delta: Event, arguments: list[str]) -> None:
    match delta["type"]:
        case "text_delta":
            block["text"] += delta["text"]
        case "thinking_delta":
            block["thinking"] += delta["thinking"]
        case "signature_delta":
            block["signature"] += delta["signature"]
        case other:
            assert other == "input_json_delta" and block["type"] == "tool_use"
            arguments.append(delta["partial_json"])


def _completion(answer: Event) -> None:
    (choice,) = answer["choices"]
    assert answer["object"] == "chat.completion" and answer["id"]
    assert choice["finish_reason"] in ("stop", "length", "tool_calls")
    message = choice["message"]
    calls = message.get("tool_calls", [])
    assert message["role"] == "assistant" and (isinstance(message["content"], str) or calls)
    assert (choice["finish_reason"] == "tool_calls") <= bool(calls)
    for call in calls:
        assert isinstance(json.loads(call["function"]["arguments"]), dict) and call["function"]["name"]
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > 0


def _completion_stream(given: list[Event]) -> None:
    assert all(event["object"] == "chat.completion.chunk" for event in given)
    choices = [choice for event in given for choice in event["choices"]]
    assert choices[0]["delta"]["role"] == "assistant" and choices[-1]["finish_reason"]
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    assert [call["index"] for call in calls] == list(range(len(calls)))
    content = "".join(choice["delta"].get("content") or "" for choice in choices)
    usage = given[-1].get("usage") or {"prompt_tokens": 1, "completion_tokens": 0, "total_tokens": 1}
    message = {"role": "assistant", "content": content, "tool_calls": calls}
    choice = {"message": message, "finish_reason": choices[-1]["finish_reason"]}
    _completion({"object": "chat.completion", "id": given[0]["id"], "choices": [choice], "usage": usage})


def _response(answer: Event) -> None:
    assert answer["object"] == "response" and answer["status"] in ("completed", "incomplete")
    assert (answer["status"] == "incomplete") == (answer["incomplete_details"] is not None)
    assert answer["output"], "an answer has an item"
    for item in answer["output"]:
        assert item["id"] and item["type"] in ("reasoning", "message", "function_call", "custom_tool_call")
        if item["type"] == "function_call":
            assert isinstance(json.loads(item["arguments"]), dict) and item["name"] and item["call_id"]
        if item["type"] == "custom_tool_call":
            assert isinstance(item["input"], str)
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 0


def _response_stream(given: list[Event]) -> None:
    assert [event["sequence_number"] for event in given] == list(range(len(given)))
    assert given[0]["type"] == "response.created"
    done: list[Event] = []
    open_item: Event | None = None
    for event in given[1:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "in_progress":
            assert not done and open_item is None
        elif kind == "output_item.added":
            assert open_item is None and event["output_index"] == len(done)
            open_item = event["item"]
        elif kind == "output_item.done":
            assert open_item is not None and event["item"]["id"] == open_item["id"]
            done.append(event["item"])
            open_item = None
        else:
            assert open_item is not None and event["item_id"] == open_item["id"]
    last = given[-1]
    assert open_item is None and last["type"] == f"response.{last['response']['status']}"
    assert last["response"]["output"] == done
    _response(last["response"])


def _count(answer: Event) -> None:
    assert answer["input_tokens"] > 0


_WHOLES = {"messages": _message, "chat": _completion, "responses": _response, "count": _count}
_STREAMS = {"messages": _message_stream, "chat": _completion_stream, "responses": _response_stream}
_VENDORS: dict[str, Any] = {
    "messages": anthropic.types.Message,
    "chat": openai.types.chat.ChatCompletion,
    "responses": openai.types.responses.Response,
    "count": anthropic.types.MessageTokensCount,
}
