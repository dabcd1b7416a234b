"""The token law: child prompt = parent prompt + trimmed output + delta in recorded ids, however the harness echoes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_hpc.gateway.dialects.base import Dialect
from gyre_hpc.gateway.dialects.chat import ChatCompletions
from gyre_hpc.gateway.lineage import Mismatch
from gyre_hpc.gateway.rendering import Rendering

from .bent import DIALECTS, Harness, Json, untidy

texts = st.text(st.characters(codec="utf-8", exclude_characters="<>\x00"), max_size=12)
turn = st.fixed_dictionaries(
    {
        "text": texts,
        "think": st.booleans(),
        "tools": st.lists(
            st.dictionaries(st.sampled_from("abc"), st.integers(-5, 5) | texts, max_size=3), max_size=2
        ),
        "close": st.booleans(),
        "next": texts,
        "results": st.lists(texts, min_size=2, max_size=2),
    }
)


@settings(max_examples=60, deadline=None)
@given(make=st.sampled_from(DIALECTS), seed=st.integers(0, 999), turns=st.lists(turn, min_size=1, max_size=4))
def test_every_child_prompt_is_parent_output_and_delta(
    rendering: Rendering, make: Callable[[], Dialect], seed: int, turns: list[Json]
) -> None:
    harness = Harness(rendering, make(), random.Random(seed))
    harness.messages.append({"role": "user", "content": "start"})
    prompt = harness.lineage.prompt(harness.request())
    recorded: dict[str, list[int]] = {}
    for step in turns:
        body = f"<think>\nx{step['text']}\n</think>\n\n" if step["think"] else ""
        body += "say " + step["text"]
        for arguments in step["tools"]:
            body += "\n<tool_call>\n" + json.dumps({"name": "t", "arguments": arguments}) + "\n</tool_call>"
        output = untidy(rendering, body + ("<|im_end|>" if step["close"] else ""), harness.chance)
        name, parsed = harness.answer(prompt, output)
        recorded[name] = prompt.context.ids().tolist() + output
        handles = harness.echo(name, parsed)
        if handles:
            harness.results(handles, step["results"])
        harness.messages.append({"role": "user", "content": "next " + step["next"]})

        before = recorded[name]
        prompt = harness.lineage.prompt(harness.request())
        child = prompt.context.ids().tolist()
        assert prompt.reasons == () and prompt.spliced == (name,)
        assert child[: len(before)] == before
        delta = rendering.text(child[len(before) :])
        assert delta.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
        assert prompt.context.length == len(child)
        base, shared, rest = prompt.context.base()
        assert recorded[base][:shared] + rest.tolist() == child


@pytest.fixture(params=DIALECTS)
def harness(request: pytest.FixtureRequest, rendering: Rendering) -> Harness:
    harness = Harness(rendering, request.param(), random.Random(1))
    harness.messages = [{"role": "user", "content": "start"}]
    return harness


def sampled(harness: Harness, text: str) -> tuple[str, list[int]]:
    """One call on the present history, echoed into it; its name and prompt + output ids."""
    prompt = harness.lineage.prompt(harness.request())
    output = untidy(harness.rendering, text + "<|im_end|>", harness.chance)
    name, parsed = harness.answer(prompt, output)
    harness.results(harness.echo(name, parsed), ["ok"] * 9) if "tool_call" in text else harness.echo(
        name, parsed
    )
    return name, prompt.context.ids().tolist() + output


TOOL = 'go\n<tool_call>\n{"name": "t", "arguments": {"a": 1}}\n</tool_call>'


def test_an_identical_request_has_the_identical_prompt(harness: Harness) -> None:
    first, second = (harness.lineage.prompt(harness.request()) for _ in range(2))
    assert first.context is second.context


def test_a_turn_of_somebody_else_is_rendered_and_the_rest_stays_recorded(harness: Harness) -> None:
    _, ids = sampled(harness, TOOL)
    harness.messages += [{"role": "assistant", "content": "not yours"}, {"role": "user", "content": "on"}]
    prompt = harness.lineage.prompt(harness.request())
    assert prompt.reasons == (Mismatch.FOREIGN_TURN,)
    child = prompt.context.ids().tolist()
    assert child[: len(ids)] == ids and "not yours<|im_end|>" in harness.rendering.text(child[len(ids) :])


def test_an_edited_text_is_not_replaced_by_what_was_sampled(harness: Harness) -> None:
    sampled(harness, "first version")
    harness.messages[-1] = {"role": "assistant", "content": "second version"}
    harness.messages.append({"role": "user", "content": "on"})
    prompt = harness.lineage.prompt(harness.request())
    assert prompt.reasons == (Mismatch.FOREIGN_TURN,) and prompt.spliced == ()
    assert "second version" in harness.rendering.text(prompt.context.ids().tolist())
    assert harness.lineage.mismatches[Mismatch.FOREIGN_TURN] == 1


def test_a_kept_tail_after_compaction_is_spliced_under_its_new_root(harness: Harness) -> None:
    name, ids = sampled(harness, TOOL)
    harness.messages[0] = {"role": "user", "content": "summary of what was"}
    prompt = harness.lineage.prompt(harness.request())
    output = list(harness.lineage.generated[name].output)
    child = prompt.context.ids().tolist()
    assert prompt.spliced == (name,) and prompt.reasons == ()
    assert child[: len(ids)] != ids
    assert any(child[i : i + len(output)] == output for i in range(len(child)))
    assert prompt.context.base()[0] == ""


def test_unknown_and_partly_echoed_handles_are_counted(harness: Harness) -> None:
    name, _ = sampled(harness, TOOL + TOOL[2:])
    whole = json.dumps(harness.messages)
    harness.messages = json.loads(whole.replace(name, "e9a9c9"))
    assert harness.lineage.prompt(harness.request()).reasons == (Mismatch.UNKNOWN_HANDLE,)
    harness.messages = json.loads(whole)
    items = [message for message in harness.messages if message.get("type") == "function_call"]
    if items:
        harness.messages.remove(items[-1])
    else:
        parts = harness.messages[1].get("tool_calls") or harness.messages[1]["content"]
        parts.pop()
    assert harness.lineage.prompt(harness.request()).reasons == (Mismatch.PARTIAL_ECHO,)


def test_a_branch_from_the_middle_shares_the_recorded_prefix(harness: Harness) -> None:
    _, first = sampled(harness, TOOL)
    fork = len(harness.messages)
    sampled(harness, "more")
    harness.messages[fork:] = [{"role": "user", "content": "summarise"}]
    prompt = harness.lineage.prompt(harness.request())
    assert prompt.context.ids().tolist()[: len(first)] == first and prompt.reasons == ()


def test_other_tools_make_another_root(harness: Harness) -> None:
    function = {"name": "t", "parameters": {}}
    tool: Json = {
        "openai-chat": {"type": "function", "function": function},
        "openai-responses": {"type": "function", **function},
        "anthropic-messages": {"name": "t", "input_schema": {}},
    }[harness.dialect.name]
    plain, equipped = (
        harness.lineage.prompt(harness.request()),
        harness.lineage.prompt(harness.request([tool])),
    )
    assert plain.digest != equipped.digest and plain.context.length < equipped.context.length


def test_what_cannot_be_bridged_is_rendered_afresh_and_later_turns_build_on_that(
    rendering: Rendering,
) -> None:
    harness = Harness(rendering, ChatCompletions(), random.Random(2))
    harness.messages = [{"role": "user", "content": "start"}]
    sampled(harness, "<think>\nnever closed")
    harness.messages[-1] = {"role": "assistant", "content": ""}
    harness.messages.append({"role": "user", "content": "on"})
    prompt = harness.lineage.prompt(harness.request())
    assert Mismatch.BRIDGE_REFUSED in prompt.reasons and prompt.context.parent is None
    _, ids = sampled(harness, "fine")
    harness.messages.append({"role": "user", "content": "and"})
    again = harness.lineage.prompt(harness.request())
    assert again.reasons == () and again.context.ids().tolist()[: len(ids)] == ids
