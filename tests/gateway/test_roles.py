"""Who asked: our own header first, then the configured rules, then what Claude Code and Codex say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gyre_hpc.config import RoleRule
from gyre_hpc.errors import ConfigError
from gyre_hpc.gateway.canonical import History, Request
from gyre_hpc.gateway.dialects.chat import ChatCompletions
from gyre_hpc.gateway.roles import role_hint
from gyre_hpc.hydra_app import compose

BASH: Any = {"type": "function", "function": {"name": "bash", "parameters": {}}}


def asked(*texts: str, tools: tuple[Any, ...] = (BASH,), history: History | None = None) -> Request:
    roles = ["system", *["user"] * len(texts)]
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    body = {"messages": messages, "tools": list(tools)}
    return ChatCompletions().read(json.dumps(body).encode(), history or History())


RULES = [
    RoleRule("unknown", system="title generator"),
    RoleRule("sub-agent", header="x-parent"),
    RoleRule("main-summary", tool="none", last="SUMMARISE"),
    RoleRule("main", tool="bash"),
]


@pytest.mark.parametrize(
    ("headers", "request_", "role"),
    [
        ({}, asked("You are a title generator", "go"), "unknown"),
        ({"x-parent": "1"}, asked("s", "go"), "sub-agent"),
        ({}, asked("s", "please summarise it", tools=()), "main-summary"),
        ({}, asked("s", "please summarise it"), "main"),
        ({}, asked("s", "go", tools=()), "unknown"),
        ({}, asked("s", "title generator"), "main"),
        ({"x-agent-role": "main", "x-parent": "1"}, asked("s", "go"), "main"),
    ],
)
def test_the_first_rule_that_holds_gives_the_role(
    headers: dict[str, str], request_: Request, role: str
) -> None:
    assert role_hint(headers, request_, RULES) == role


def test_a_rule_holds_for_a_conversation_that_was_read_before() -> None:
    history = History()
    for _ in range(2):
        assert role_hint({}, asked("s", "go", history=history), RULES) == "main"


@pytest.mark.parametrize(
    ("turn", "role"),
    [
        ({"request_kind": "turn", "thread_source": "user"}, "main"),
        ({"request_kind": "compaction", "thread_source": "user"}, "main-summary"),
        ({"request_kind": "turn", "thread_source": "subagent"}, "sub-agent"),
        ({"request_kind": "compaction", "thread_source": "subagent"}, "sub-agent-summary"),
        ({"request_kind": "review"}, "unknown"),
        ({}, "unknown"),
        ({"request_kind": 3}, "unknown"),
    ],
)
def test_codex_says_it_in_its_turn_metadata(turn: dict[str, Any], role: str) -> None:
    headers = {"x-codex-turn-metadata": json.dumps(turn)}
    assert role_hint(headers, asked("s", "go")) == role
    assert role_hint({"x-codex-turn-metadata": "{"}, asked("s", "go")) == "unknown"


def test_a_rule_with_an_unknown_role_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"harness\.roles\.role=mian"):
        compose(["harness.roles=[{role: mian}]"])
