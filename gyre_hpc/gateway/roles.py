"""Who asked: the role a request claims, from headers, system prompt and the last message. A hint, never an identity."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

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


def role_hint(headers: Mapping[str, str], request: Request) -> LeafRole:
    """The role this request claims; UNKNOWN when it claims none."""
    claimed = headers.get(ROLE_HEADER, "")
    if claimed in _ROLES:
        return LeafRole(claimed)
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


def _asks_for_summary(request: Request) -> bool:
    """Whether the last turn is a compaction instruction."""
    last = len(request.units) - 1
    turns = request.fresh.get(last) or request.read(request.raws[last])
    if not turns or turns[-1].role == "assistant":
        return False
    text = turns[-1].content.lower()
    return any(words in text for words in SUMMARY_WORDS)
