"""A harness's session under two base URLs is found out, recorded and forgotten with its execution."""

from __future__ import annotations

from typing import Any

import pytest

from gyre_hpc.composition import compose
from gyre_hpc.gateway.sessions import MOST, SHARED_SESSION, Sessions

from .fakes import KEY, RunningGateway

ASK: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
HEADER = "x-session"


@pytest.mark.parametrize(("closed", "reasons"), [(False, (SHARED_SESSION,)), (True, ())])
async def test_one_session_under_two_base_urls_is_recorded_with_the_call(
    gateway: RunningGateway, closed: bool, reasons: tuple[str, ...]
) -> None:
    gateway.engine()
    gateway.app.sessions = Sessions(HEADER)
    gateway.script.answers = ["one<|im_end|>"] * 4
    for name in ("mine", "of my sub-agent", "mine"):
        await gateway.chat([{"role": "user", "content": name}], {HEADER: name})
    if closed:
        await gateway.app.close_execution(7, 1)
    gateway.app.open_execution(8, 1, "o" * 32)
    gateway.url = gateway.url.replace(KEY, "o" * 32)
    await gateway.chat(ASK, {HEADER: "mine"})
    *own, other = await gateway.records()
    assert [record.forks for record in own] == [(), (), ()]
    assert (other.execution, other.forks) == (8, reasons) and other.lawful


def test_a_client_that_sends_ever_new_sessions_is_not_kept() -> None:
    sessions: Sessions[str] = Sessions(HEADER)
    assert not any(sessions.shared({HEADER: str(number)}, "one") for number in range(10 * MOST))
    assert len(sessions._owners) == MOST
    assert sessions.shared({HEADER: "0"}, "two") and not sessions.shared({}, "two")
    sessions.forget("one")
    assert not sessions.shared({HEADER: "0"}, "two") and not sessions._owners.keys() - {"0"}


@pytest.mark.parametrize("name", ["claude_code", "codex", "opencode"])
def test_harnesses_that_name_their_session_say_in_which_header(name: str) -> None:
    assert compose([f"harness={name}"]).harness.session.endswith("session-id")
