"""One conversation in all the spellings a harness may give it: the prompt stays what it was, in recorded ids.

Per dialect a list of accidents (what harnesses were seen to change between two calls without meaning anything by it)
and a list of changes that do mean something. Any set of accidents leads to the very same context, without a fork.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_hpc.gateway.canonical import Request
from gyre_hpc.gateway.dialects.anthropic import AnthropicMessages
from gyre_hpc.gateway.dialects.base import Dialect
from gyre_hpc.gateway.dialects.chat import ChatCompletions
from gyre_hpc.gateway.dialects.responses import OpenAIResponses
from gyre_hpc.gateway.rendering import Rendering

from .bent import Harness, Json, answered, begun, bend, echoed

Change = Callable[[Json, random.Random], None]
TOOLS = (
    '\n<tool_call>\n{"name": "t", "arguments": {"a": 9000, "b": "x y"}}\n</tool_call>'
    '\n<tool_call>\n{"name": "t", "arguments": {"c": [1, {"d": null, "e": true}]}}\n</tool_call>'
)


def blocks(body: Json, kind: str = "") -> Iterator[Json]:
    """Content blocks of an Anthropic body, parts of a Chat body."""
    for message in body.get("messages") or body["input"]:
        content = message.get("content")
        yield from (b for b in (content if isinstance(content, list) else ()) if kind in ("", b["type"]))


def by_role(body: Json, *roles: str) -> Iterator[Json]:
    return (message for message in body.get("messages") or body["input"] if message.get("role") in roles)


def of_type(body: Json, kind: str) -> Iterator[Json]:
    return (item for item in body["input"] if item.get("type") == kind)


# ---- accidents all dialects share --------------------------------------------------------------------------------


def to_blocks(kind: str) -> Change:
    def change(body: Json, chance: random.Random) -> None:
        for message in by_role(body, "user", "system", "developer"):
            if isinstance(message.get("content"), str) and chance.random() < 0.7:
                message["content"] = [{"type": kind, "text": message["content"]}]

    return change


def to_strings(body: Json, chance: random.Random) -> None:
    for message in by_role(body, "user", "system", "developer"):
        content = message.get("content")
        if isinstance(content, list) and len(content) == 1 and "text" in content[0]:
            message["content"] = content[0]["text"]


# ---- Anthropic Messages --------------------------------------------------------------------------------------------


def move_cache_marks(body: Json, chance: random.Random) -> None:
    for block in blocks(body):
        block.pop("cache_control", None)
        if chance.random() < 0.3:
            block["cache_control"] = {"type": "ephemeral"}


def change_billing(body: Json, chance: random.Random) -> None:
    nonce = f"x-anthropic-billing-header: cc_version=2.1.220.{chance.randrange(999)}; cch={chance.random()};"
    body["system"] = [{"type": "text", "text": nonce}, {"type": "text", "text": "be good"}]


def drop_billing(body: Json, chance: random.Random) -> None:
    body["system"] = "be good"


def rewrite_inputs(body: Json, chance: random.Random) -> None:
    for block in blocks(body, "tool_use"):
        block["input"] = bend(block["input"])


def drop_unknown_keys(body: Json, chance: random.Random) -> None:
    for block in blocks(body, "tool_use"):
        block["input"].pop("b", None)


def trim_thinking(body: Json, chance: random.Random) -> None:
    for block in blocks(body, "thinking"):
        block["thinking"] = block["thinking"].strip()


def drop_thinking(body: Json, chance: random.Random) -> None:
    for message in by_role(body, "assistant"):
        message["content"] = [b for b in message["content"] if b["type"] != "thinking"]


def keep_alive(body: Json, chance: random.Random) -> None:
    for number, message in enumerate(by_role(body, "assistant")):
        block = {"type": "thinking", "thinking": "", "signature": f"keep:e1a1c{number}"}
        message["content"] = [block, *message["content"]]


def empty_text(body: Json, chance: random.Random) -> None:
    for message in by_role(body, "assistant"):
        message["content"].append({"type": "text", "text": ""})


def results_as_blocks(body: Json, chance: random.Random) -> None:
    for block in blocks(body, "tool_result"):
        if isinstance(block["content"], str):
            block["content"] = [{"type": "text", "text": block["content"]}]


def null_fields(body: Json, chance: random.Random) -> None:
    for block in blocks(body, "text"):
        block["citations"] = None


# ---- Chat Completions --------------------------------------------------------------------------------------------------


def calls(body: Json) -> Iterator[Json]:
    return (call for message in body["messages"] for call in message.get("tool_calls") or ())


def parsed(arguments: Any) -> Any:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def rewrite_arguments(body: Json, chance: random.Random) -> None:
    for call in calls(body):
        arguments = bend(parsed(call["function"]["arguments"]))
        call["function"]["arguments"] = json.dumps(arguments, indent=chance.choice([None, 2]))


def arguments_as_objects(body: Json, chance: random.Random) -> None:
    for call in calls(body):
        call["function"]["arguments"] = parsed(call["function"]["arguments"])


def trim_reasoning(body: Json, chance: random.Random) -> None:
    for message in by_role(body, "assistant"):
        if "reasoning_content" in message:
            message["reasoning_content"] = f"\n{message['reasoning_content'].strip()}  "


def rename_reasoning(body: Json, chance: random.Random) -> None:
    for message in by_role(body, "assistant"):
        if "reasoning_content" in message:
            message["reasoning"] = message.pop("reasoning_content")


def drop_reasoning(body: Json, chance: random.Random) -> None:
    for message in by_role(body, "assistant"):
        message.pop("reasoning_content", None)
        message.pop("reasoning", None)


def spell_absence(body: Json, chance: random.Random) -> None:
    """Null, missing and empty are one."""
    for message in by_role(body, "assistant"):
        message |= {"refusal": None, "function_call": None, "audio": None, "annotations": []}
        if not message.get("content"):
            message["content"] = chance.choice([None, "", []])
        if not message.get("tool_calls"):
            message["tool_calls"] = chance.choice([None, []])


def as_developer(body: Json, chance: random.Random) -> None:
    for message in by_role(body, "system", "developer"):
        message["role"] = chance.choice(["system", "developer"])


# ---- Responses ---------------------------------------------------------------------------------------------------------


def drop_ids(body: Json, chance: random.Random) -> None:
    for item in body["input"]:
        item.pop("id", None)
        item.pop("status", None)


def null_ids(body: Json, chance: random.Random) -> None:
    for item in body["input"]:
        item |= {"id": None, "status": None}


def drop_reasoning_items(body: Json, chance: random.Random) -> None:
    body["input"] = [item for item in body["input"] if item.get("type") != "reasoning"]


def drop_reasoning_text(body: Json, chance: random.Random) -> None:
    for item in of_type(body, "reasoning"):
        item |= {"content": None, "summary": []}


def rewrite_item_arguments(body: Json, chance: random.Random) -> None:
    for item in of_type(body, "function_call"):
        item["arguments"] = json.dumps(bend(json.loads(item["arguments"])), indent=1)


def spell_messages(body: Json, chance: random.Random) -> None:
    for message in by_role(body, "user", "system", "developer"):
        message["type"] = "message"
    for message in by_role(body, "assistant"):
        for part in message["content"]:
            part |= {"annotations": [], "logprobs": None}


ACCIDENTS: dict[type[Dialect], list[Change]] = {
    AnthropicMessages: [
        to_blocks("text"), to_strings, move_cache_marks, change_billing, drop_billing, rewrite_inputs,
        drop_unknown_keys, trim_thinking, drop_thinking, keep_alive, empty_text, results_as_blocks, null_fields,
    ],
    ChatCompletions: [
        to_blocks("text"), to_strings, rewrite_arguments, arguments_as_objects, trim_reasoning, rename_reasoning,
        drop_reasoning, spell_absence, as_developer,
    ],
    OpenAIResponses: [
        to_blocks("input_text"), to_strings, drop_ids, null_ids, drop_reasoning_items, drop_reasoning_text,
        rewrite_item_arguments, spell_messages, as_developer,
    ],
}  # fmt: skip


# ---- what means something ----------------------------------------------------------------------------------------------


def other_question(body: Json, chance: random.Random) -> None:
    *_, last = by_role(body, "user")
    last["content"] = "something else"


def other_space(body: Json, chance: random.Random) -> None:
    next(by_role(body, "user"))["content"] = "start "


def one_message_less(body: Json, chance: random.Random) -> None:
    (body.get("messages") or body["input"]).pop(0)


def another_tool(body: Json, chance: random.Random) -> None:
    body["tools"] = [
        {"name": "t", "type": "function", "input_schema": {}, "parameters": {}, "function": {"name": "t"}}
    ]


MEANT = [other_question, other_space, one_message_less, another_tool]


def conversation(rendering: Rendering, make: type[Dialect]) -> tuple[Harness, Json]:
    """Two answers that think, one with tools, and the body that goes on behind them."""
    harness = begun(rendering, make())
    if make is not AnthropicMessages:
        harness.messages.insert(0, {"role": "system", "content": "be good"})
    harness.messages[-1:-1] = [{"role": "user", "content": "before"}]
    harness.system = "be good" if make is AnthropicMessages else None
    name, _ = answered(harness, "hm  ", "I look." + TOOLS)
    echoed(harness, name, harness.messages)
    harness.messages.append({"role": "system", "content": "a reminder"})
    name, _ = answered(harness, "so", "found it")
    echoed(harness, name, harness.messages, "and now?")
    return harness, copy.deepcopy(harness.body())


def read(harness: Harness, body: Json) -> Request:
    return harness.dialect.read(json.dumps(body).encode(), harness.history)


@settings(max_examples=60)
@given(st.sampled_from(list(ACCIDENTS)), st.data(), st.randoms(use_true_random=False))
def test_any_accidents_lead_to_the_same_context_without_a_fork(
    rendering: Rendering, make: type[Dialect], data: st.DataObject, chance: random.Random
) -> None:
    harness, body = conversation(rendering, make)
    known = harness.lineage.prompt(read(harness, body)).context
    for change in data.draw(st.lists(st.sampled_from(ACCIDENTS[make]), max_size=6)):
        change(body, chance)
    again = harness.lineage.prompt(read(harness, body))
    assert again.context is known
    assert not harness.lineage.mismatches


@pytest.mark.parametrize(
    ("make", "accident"), [(make, accident) for make, all in ACCIDENTS.items() for accident in all]
)
def test_each_accident_alone(rendering: Rendering, make: type[Dialect], accident: Change) -> None:
    harness, body = conversation(rendering, make)
    known = harness.lineage.prompt(read(harness, body)).context
    accident(body, random.Random(1))
    assert harness.lineage.prompt(read(harness, body)).context is known and not harness.lineage.mismatches


@pytest.mark.parametrize("make", list(ACCIDENTS))
@pytest.mark.parametrize("change", MEANT)
def test_what_means_something_leads_elsewhere(
    rendering: Rendering, make: type[Dialect], change: Change
) -> None:
    harness, body = conversation(rendering, make)
    known = harness.lineage.prompt(read(harness, body)).context.ids().tolist()
    change(body, random.Random(1))
    assert harness.lineage.prompt(read(harness, body)).context.ids().tolist() != known
