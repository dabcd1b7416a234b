"""Who asked: the role a request claims, from headers, system prompt, tools and the last message. A hint, never an identity.

What the harness says in our own header, else the first of the rules `harness.roles` that holds (conf/harness/NAME.yaml).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gyre_hpc.config import RoleRule
from gyre_hpc.gateway.canonical import Request
from gyre_hpc.records import LeafRole

ROLE_HEADER = "x-agent-role"
"""A harness that knows its roles says them here in our words."""
_ROLES = frozenset(role.value for role in LeafRole)


Past = set[tuple[str, str]]
"""(header value, role) of earlier calls of an execution, for headers that rules compare."""


class Asker(NamedTuple):
    """Who sends a request; `same` as `compared` says, `shared` as `Sessions.shared`."""

    role: LeafRole
    same: tuple[str, ...]
    shared: bool = False


def role_hint(
    headers: Mapping[str, str], request: Request, rules: Sequence[RoleRule] = (), past: Past | None = None
) -> LeafRole:
    """The role this request claims; UNKNOWN when it claims none. `headers`: names without regard to case.

    `past` belongs to the execution and is kept up to date here.
    """
    past = set() if past is None else past
    claimed = headers.get(ROLE_HEADER, "")
    fitting = (rule.role for rule in rules if _holds(rule, headers, request, past))
    role = LeafRole(claimed if claimed in _ROLES else next(fitting, LeafRole.UNKNOWN))
    past.update((value, role.value) for value in compared(headers, rules))
    return role


def compared(headers: Mapping[str, str], rules: Sequence[RoleRule]) -> tuple[str, ...]:
    """Values of the headers that rules compare with those of earlier calls: with the role, what `past` keeps of a call."""
    return tuple(headers[name] for name in dict.fromkeys(rule.same for rule in rules) if name in headers)


def _holds(rule: RoleRule, headers: Mapping[str, str], request: Request, past: Past) -> bool:
    if rule.header and rule.header not in headers:
        return False
    if any(text not in headers.get(rule.header, "") for text in rule.header_has):
        return False
    if rule.same and (headers.get(rule.same, ""), rule.after) not in past:
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
    """The last turn that is not a system turn, in lower case; "" if it is the assistant's."""
    for index in range(len(request.units) - 1, -1, -1):
        turns = request.fresh.get(index) or request.read(request.raws[index])
        spoken = [turn for turn in turns if turn.role != "system"]
        if spoken:
            return spoken[-1].content.lower() if spoken[-1].role != "assistant" else ""
    return ""
