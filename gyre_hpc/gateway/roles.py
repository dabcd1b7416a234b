"""Who asked: the role a request claims, from headers, system prompt, tools and the last message. A hint, never an identity.

In this order: what the harness says in our own header, the rules of `harness.roles`, the headers of Claude Code and Codex.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from gyre_hpc.config import RoleRule
from gyre_hpc.gateway.canonical import Request
from gyre_hpc.records import LeafRole

ROLE_HEADER = "x-agent-role"
"""A harness that knows its roles says them here in our words."""
_ROLES = frozenset(role.value for role in LeafRole)
CODEX_TURN_HEADER = "x-codex-turn-metadata"
"""JSON: `request_kind` is turn or compaction, `thread_source` says subagent for sub-agents (Codex 0.171)."""
SUB_AGENT_HEADERS = ("x-claude-code-agent-id", "x-parent-session-id")
SUB_AGENT_MARK = b"cc_is_subagent=true"
SUMMARY_WORDS = ("create a detailed summary of the conversation", "your task is to create a detailed summary")


def role_hint(headers: Mapping[str, str], request: Request, rules: Sequence[RoleRule] = ()) -> LeafRole:
    """The role this request claims; UNKNOWN when it claims none."""
    claimed = headers.get(ROLE_HEADER, "")
    if claimed in _ROLES:
        return LeafRole(claimed)
    for rule in rules:
        if _holds(rule, headers, request):
            return LeafRole(rule.role)
    if CODEX_TURN_HEADER in headers:
        return _codex_role(headers[CODEX_TURN_HEADER])
    sub_agent = any(name in headers for name in SUB_AGENT_HEADERS) or SUB_AGENT_MARK in bytes(request.raws[0])
    summary = _asks_for_summary(request)
    if sub_agent:
        return LeafRole.SUB_AGENT_SUMMARY if summary else LeafRole.SUB_AGENT
    if "x-claude-code-session-id" in headers:
        return LeafRole.MAIN_SUMMARY if summary else LeafRole.MAIN
    return LeafRole.UNKNOWN


class _CodexTurn(msgspec.Struct):
    request_kind: str = ""
    thread_source: str = ""


def _codex_role(text: str) -> LeafRole:
    try:
        turn = msgspec.json.decode(text, type=_CodexTurn)
    except msgspec.DecodeError:
        return LeafRole.UNKNOWN
    sub_agent = turn.thread_source == "subagent"
    match turn.request_kind:
        case "turn":
            return LeafRole.SUB_AGENT if sub_agent else LeafRole.MAIN
        case "compaction":
            return LeafRole.SUB_AGENT_SUMMARY if sub_agent else LeafRole.MAIN_SUMMARY
    return LeafRole.UNKNOWN


def _holds(rule: RoleRule, headers: Mapping[str, str], request: Request) -> bool:
    if rule.header and rule.header not in headers:
        return False
    if rule.tool and not _offers(rule.tool, request):
        return False
    if rule.system and rule.system not in _head(request):
        return False
    return not rule.last or rule.last.lower() in _last(request)


def _offers(tool: str, request: Request) -> bool:
    if tool in ("any", "none"):
        return bool(request.tools) is (tool == "any")
    return any(item["function"].get("name") == tool for item in request.tools)


def _head(request: Request) -> str:
    """The system turn at the head, if there is one."""
    turns = request.fresh.get(0) or request.read(request.raws[0])
    return turns[0].content if turns and turns[0].role == "system" else ""


def _last(request: Request) -> str:
    """The last turn in lower case, if it is not the assistant's."""
    last = len(request.units) - 1
    turns = request.fresh.get(last) or request.read(request.raws[last])
    return turns[-1].content.lower() if turns and turns[-1].role != "assistant" else ""


def _asks_for_summary(request: Request) -> bool:
    """Whether the last turn is a compaction instruction."""
    text = _last(request)
    return any(words in text for words in SUMMARY_WORDS)
