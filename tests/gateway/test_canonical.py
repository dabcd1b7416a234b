"""The canonicaliser: which spellings of a conversation are one, and which are not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gyre_hpc.gateway.canonical import History, canonical_arguments
from gyre_hpc.gateway.dialects.anthropic import AnthropicMessages
from gyre_hpc.gateway.dialects.base import Dialect, Refusal
from gyre_hpc.gateway.dialects.chat import ChatCompletions
from gyre_hpc.gateway.dialects.responses import OpenAIResponses
from gyre_hpc.gateway.rendering import INLINE_SYSTEM_MARK, Rendering

ANTHROPIC, CHAT, RESPONSES = AnthropicMessages(), ChatCompletions(), OpenAIResponses()


def units(dialect: Dialect, messages: Any, **more: Any) -> list[bytes]:
    where = "input" if dialect is RESPONSES else "messages"
    body = json.dumps({"model": "m", "max_tokens": 1, where: messages, **more}).encode()
    return [unit.digest for unit in dialect.read(body, History()).units]


def turns(dialect: Dialect, messages: Any, **more: Any) -> list[dict[str, Any]]:
    body = json.dumps({"model": "m", "max_tokens": 1, "messages": messages, **more}).encode()
    request = dialect.read(body, History())
    return request.messages(0, len(request.units))


SAME = [
    (ANTHROPIC, {"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "a"}]}),
    (
        ANTHROPIC,
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": "a"},
    ),
    (
        ANTHROPIC,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "s"}, {"type": "text", "text": "a"}]},
        {"role": "assistant", "content": "a\n"},
    ),
    (
        ANTHROPIC,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_e1a1c1_0", "name": "t", "input": {"a": 1}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "", "signature": "keep:e1a1c1"},
                {"type": "text", "text": ""},
                {"type": "tool_use", "id": "toolu_e1a1c1_0", "name": "t", "input": {}},
            ],
        },
    ),
    (
        ANTHROPIC,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "t", "input": {"a": 1, "b": 2.0}}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "y", "name": "t", "input": {"b": 2, "a": 1}}]},
    ),
    (CHAT, {"role": "assistant", "content": None}, {"role": "assistant"}),
    (CHAT, {"role": "assistant", "content": ""}, {"role": "assistant", "content": [], "reasoning_content": "r"}),
    (CHAT, {"role": "developer", "content": "a"}, {"role": "system", "content": [{"type": "text", "text": "a"}]}),
    (
        CHAT,
        {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "t", "arguments": '{"a": 9000.0}'}}]},
        {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "t", "arguments": '{"a":9000}'}}]},
    ),
    (RESPONSES, {"role": "user", "content": "a"}, {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}),
    (RESPONSES, {"role": "developer", "content": "a"}, {"role": "system", "content": "a", "id": None}),
    (
        RESPONSES,
        {"type": "function_call", "call_id": "x", "name": "t", "arguments": '{"a": 9000.0, "b": 1}'},
        {"type": "function_call", "id": "fc_1", "call_id": "x", "name": "t", "arguments": '{"b":1,"a":9000}', "status": "completed"},
    ),
    (
        RESPONSES,
        {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"type": "message", "id": "msg_x", "role": "assistant", "content": "a\n"},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "one", "other"), SAME)
def test_spellings_of_one_message(dialect: Dialect, one: Any, other: Any) -> None:
    assert units(dialect, [one]) == units(dialect, [other])


@pytest.mark.parametrize(
    ("dialect", "one", "other"),
    [
        (CHAT, {"role": "user", "content": "a"}, {"role": "user", "content": "a "}),
        (CHAT, {"role": "user", "content": "a"}, {"role": "system", "content": "a"}),
        (CHAT, {"role": "tool", "tool_call_id": "x", "content": "a"}, {"role": "tool", "tool_call_id": "y", "content": "a"}),
        (CHAT, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}),
        (
            RESPONSES,
            {"type": "function_call_output", "call_id": "x", "output": "a"},
            {"type": "function_call_output", "call_id": "y", "output": "a"},
        ),
    ],
)  # fmt: skip
def test_different_messages_stay_different(dialect: Dialect, one: Any, other: Any) -> None:
    assert units(dialect, [one]) != units(dialect, [other])


def test_the_billing_block_never_reaches_a_prompt() -> None:
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.220.abc;"},
        {"type": "text", "text": "be good"},
    ]
    found = turns(ANTHROPIC, [{"role": "user", "content": "a"}], system=system)
    assert found[0] == {"role": "system", "content": "be good"}


def test_results_and_text_of_one_message_keep_their_order() -> None:
    blocks = [
        {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "2"}]},
        {"type": "tool_result", "tool_use_id": "a", "content": "1", "is_error": True},
        {"type": "text", "text": "reminder"},
    ]
    found = turns(ANTHROPIC, [{"role": "user", "content": blocks}])
    assert [(turn["role"], turn["content"]) for turn in found] == [
        ("tool", "2"),
        ("tool", "1"),
        ("user", "reminder"),
    ]


@pytest.mark.parametrize("dialect", [ANTHROPIC, CHAT])
def test_a_system_turn_inside_the_conversation_stays_in_place(dialect: Dialect, rendering: Rendering) -> None:
    messages = [{"role": role, "content": role[0]} for role in ("user", "system", "user")]
    found = turns(dialect, messages)
    assert [turn["role"] for turn in found] == ["user", "system", "user"]
    assert "<|im_start|>system\ns<|im_end|>" in rendering.text(rendering.render(found))


def test_a_renderer_that_refuses_it_gets_a_marked_user_turn(
    rendering: Rendering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "inline_system", False)
    messages = [{"role": role, "content": role[0]} for role in ("system", "user", "system", "user")]
    text = rendering.text(rendering.render(messages))
    assert text.startswith("<|im_start|>system\ns<|im_end|>")
    assert f"<|im_start|>user\n{INLINE_SYSTEM_MARK.format('s')}<|im_end|>" in text


def test_lone_surrogates_of_a_cut_text_are_replaced() -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"a\\ud83d"}]}'
    request = CHAT.read(body, History())
    assert request.messages(0, 1)[0]["content"] == "a\ufffd"


def test_server_tools_are_not_offered_to_the_policy() -> None:
    tools = [
        {"type": "web_search_20250305", "name": "web_search"},
        {"name": "t", "input_schema": {"type": "object"}},
    ]
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "a"}], "tools": tools}).encode()
    assert [tool["function"]["name"] for tool in ANTHROPIC.read(body, History()).tools] == ["t"]


def test_wishes_are_kept_and_obeyed_by_nobody() -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "a"}], "temperature": 0, "seed": 3}).encode()
    assert CHAT.read(body, History()).wishes == {"temperature": 0, "seed": 3}
    with pytest.raises(Refusal, match="2 choices"):
        CHAT.read(json.dumps({"messages": [{"role": "user", "content": "a"}], "n": 2}).encode(), History())


def test_only_messages_not_sent_before_are_fresh() -> None:
    history, first = History(), {"role": "user", "content": "a"}
    for messages, fresh in (([first], 1), ([first], 0), ([first, {"role": "user", "content": "b"}], 1)):
        assert len(CHAT.read(json.dumps({"messages": messages}).encode(), history).fresh) == fresh


def test_arguments_are_compared_as_values() -> None:
    assert canonical_arguments('{"a": [1.0, {"c": 2, "b": true}]}') == canonical_arguments(
        '{"a":[1,{"b":true,"c":2.0}]}'
    )
    assert canonical_arguments('{"a": true}') != canonical_arguments('{"a": 1}')
    assert canonical_arguments("no json") == "no json" and canonical_arguments("") == "{}"
