"""System and developer turns inside a conversation keep their places over the wire, and probes of every kind are answered."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from gyre_hpc.gateway.rendering import INLINE_SYSTEM_MARK

from .fakes import RunningGateway
from .faults.clients import DIALECTS, Client

ROLES = [(dialect, "system") for dialect in DIALECTS]
ROLES += [(dialect, "developer") for dialect in DIALECTS if dialect.startswith("openai")]
CALL = '<tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("takes_inline", [True, False])
@pytest.mark.parametrize(("dialect", "role"), ROLES)
async def test_an_inner_system_turn_stands_where_it_was_sent(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, dialect: str, role: str, takes_inline: bool
) -> None:
    monkeypatch.setattr(gateway.app.rendering, "inline_system", takes_inline)
    gateway.engine()
    gateway.script.answers = [f"<think>\nhm\n</think>\n\n{CALL}\n{CALL}<|im_end|>", "done<|im_end|>"]
    client = Client(dialect, True, gateway.url, 300)
    asked: list[dict[str, Any]] = [
        {"role": "user", "content": "first"},
        {"role": role, "content": "agents: one"},
        {"role": "user", "content": "second"},
    ]
    outcome = await client.ask(asked)
    assert len(outcome.tools) == 2
    await client.ask([*asked, *outcome.echo, {"role": role, "content": "a reminder"}])
    first, second = await gateway.records()
    text = gateway.app.rendering.text
    prompt = text(first.prompt_ids.tolist())
    known = [*first.prompt_ids, *first.output_ids]
    delta = text(second.prompt_ids[len(known) :].tolist())
    assert second.prompt_ids[: len(known)].tolist() == known
    assert prompt.index("first") < prompt.index("agents: one") < prompt.index("second")
    assert delta.count("ok") == 2 and delta.rindex("ok") < delta.index("on<") < delta.index("a reminder")
    for spoken, place in (("agents: one", prompt), ("a reminder", delta)):
        shown = f"system\n{spoken}" if takes_inline else f"user\n{INLINE_SYSTEM_MARK.format(spoken)}"
        assert f"<|im_start|>{shown}<|im_end|>" in place


async def test_probes_are_answered_below_the_prefix_and_leave_no_record(gateway: RunningGateway) -> None:
    async with httpx2.AsyncClient() as client:
        for path in ("", "/api/hello", "/v1/messages", "/v1/models"):
            assert (await client.head(gateway.url + path)).status_code == 200
        for path in ("/v1/models", "/models", "/v1/models/anything"):
            assert (await client.get(gateway.url + path)).status_code == 200
        strange = gateway.url[:-1] + "x"
        assert (await client.head(f"{strange}/api/hello")).status_code == 404
    assert await gateway.records() == []
