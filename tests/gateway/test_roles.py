"""Who asked: our own header first, then the rules of the harness."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gyre_hpc.composition import compose
from gyre_hpc.config import RoleRule
from gyre_hpc.errors import ConfigError
from gyre_hpc.gateway.canonical import History, Request
from gyre_hpc.gateway.dialects.chat import ChatCompletions
from gyre_hpc.gateway.roles import role_hint

BASH: Any = {"type": "function", "function": {"name": "bash", "parameters": {}}}


def asked(*texts: str, tools: tuple[Any, ...] = (BASH,), history: History | None = None) -> Request:
    roles = ["system", *["user"] * len(texts)]
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    body = {"messages": messages, "tools": list(tools)}
    return ChatCompletions().read(json.dumps(body).encode(), history or History())


RULES = [
    RoleRule("unknown", system="title generator"),
    RoleRule("main", header="x-turn", header_has=["kind=turn", "own=1"]),
    RoleRule("sub-agent", header="x-parent"),
    RoleRule("main-summary", tool="none", last="SUMMARISE"),
    RoleRule("main", tool="bash"),
]


@pytest.mark.parametrize(
    ("headers", "request_", "role"),
    [
        ({}, asked("You are a title generator", "go"), "unknown"),
        ({"x-parent": "1"}, asked("s", "go"), "sub-agent"),
        ({"x-parent": "1", "x-turn": "own=1;kind=turn"}, asked("s", "go"), "main"),
        ({"x-parent": "1", "x-turn": "kind=turn"}, asked("s", "go"), "sub-agent"),
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
        ({"request_kind": "review", "thread_source": "user"}, "unknown"),
        ({}, "unknown"),
        ({"request_kind": 3}, "unknown"),
    ],
)
def test_codex_says_it_in_its_turn_metadata(turn: dict[str, Any], role: str) -> None:
    rules = compose(["harness=codex"]).harness.roles
    headers = {"x-codex-turn-metadata": json.dumps(turn, separators=(",", ":"))}
    assert role_hint(headers, asked("s", "go"), rules) == role
    assert role_hint({"x-codex-turn-metadata": "{"}, asked("s", "go"), rules) == "unknown"
    assert role_hint({}, asked("s", "go"), rules) == "unknown"


SESSION, AGENT = "x-claude-code-session-id", "x-claude-code-agent-id"
COMPACT = "CRITICAL: Respond with TEXT ONLY.\n\nYour task is to create a detailed summary of the conversation so far"


@pytest.mark.parametrize(
    ("names", "request_", "role"),
    [
        ([SESSION], asked("s", "go"), "main"),
        ([SESSION], asked("s", COMPACT), "main-summary"),
        ([SESSION], asked("s", "write the title", tools=()), "unknown"),
        ([SESSION, AGENT], asked("s", "go"), "sub-agent"),
        ([SESSION, AGENT], asked("s", COMPACT), "sub-agent-summary"),
        ([], asked("s", "go"), "unknown"),
    ],
)
def test_claude_code_names_its_sub_agents(names: list[str], request_: Request, role: str) -> None:
    rules = compose(["harness=claude_code"]).harness.roles
    assert role_hint(dict.fromkeys(names, "1"), request_, rules) == role


def test_a_rule_with_an_unknown_role_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"harness\.roles\.role=mian"):
        compose(["harness.roles=[{role: mian}]"])


def test_texts_of_a_header_need_the_header() -> None:
    with pytest.raises(ConfigError, match="without a header never holds"):
        compose(["harness.roles=[{role: main, header_has: [x]}]"])


def test_an_agent_that_does_not_name_itself_again_is_known_by_a_header() -> None:
    rules, past = compose(["harness=opencode"]).harness.roles, set[tuple[str, str]]()
    own, parent = {"x-session-id": "2"}, {"x-session-id": "2", "x-parent-session-id": "1"}
    assert role_hint(own, asked("s", "sum", tools=()), rules, past) == "main-summary"
    assert role_hint(parent, asked("s", "go"), rules, past) == "sub-agent"
    assert role_hint(own, asked("s", "sum", tools=()), rules, past) == "sub-agent-summary"
    assert role_hint({"x-session-id": "1"}, asked("s", "sum", tools=()), rules, past) == "main-summary"


def test_a_system_turn_behind_the_last_one_is_passed_over() -> None:
    messages = [{"role": "user", "content": "please summarise"}, {"role": "system", "content": "a reminder"}]
    read = ChatCompletions().read(json.dumps({"messages": messages}).encode(), History())
    assert role_hint({}, read, [RoleRule("main-summary", last="summarise")]) == "main-summary"
