"""Several answers to one prompt that read the same: each echo goes on behind its own, and doubt is counted."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_hpc.gateway.dialects.anthropic import AnthropicMessages
from gyre_hpc.gateway.dialects.base import Dialect
from gyre_hpc.gateway.dialects.chat import ChatCompletions
from gyre_hpc.gateway.lineage import Mismatch
from gyre_hpc.gateway.rendering import Rendering

from .bent import DIALECTS, Harness, Json, answered, begun, echoed
from .fakes import RunningGateway

TEXT = "the very same answer"
TOOL = 'go\n<tool_call>\n{"name": "t", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(params=DIALECTS)
def harness(request: pytest.FixtureRequest, rendering: Rendering) -> Harness:
    return begun(rendering, request.param())


@pytest.mark.parametrize("reasonings", [("one way", "another way"), ("the same", "the same")])
def test_each_echo_goes_on_behind_its_own_answer(harness: Harness, reasonings: tuple[str, str]) -> None:
    start = harness.messages
    calls = [answered(harness, reasoning, TEXT) for reasoning in reasonings]
    by_text_alone = isinstance(harness.dialect, ChatCompletions) and len(set(reasonings)) == 1
    for name, ids in calls:
        own = calls[-1][1] if by_text_alone else ids
        assert echoed(harness, name, start)[: len(own)] == own
    assert harness.lineage.mismatches[Mismatch.AMBIGUOUS_ECHO] == (2 if by_text_alone else 0)
    assert set(harness.lineage.mismatches) <= {Mismatch.AMBIGUOUS_ECHO}


def test_equal_ids_leave_no_doubt(rendering: Rendering) -> None:
    harness = begun(rendering, ChatCompletions())
    start = harness.messages
    for name in ("e1a1c0", "e1a1c1"):
        prompt = harness.lineage.prompt(harness.request())
        output = rendering.tokenizer.encode(f"{TEXT}<|im_end|>")
        assert harness.answer(prompt, output)[0] == name
    echoed(harness, "e1a1c1", start)
    assert not harness.lineage.mismatches


def test_an_answer_that_no_client_received_is_not_the_one_that_comes_back(rendering: Rendering) -> None:
    harness = begun(rendering, ChatCompletions())
    start = harness.messages
    (first, ids), _ = answered(harness, "", TEXT), answered(harness, "", TEXT)
    harness.lineage.delivered.add(first)
    assert echoed(harness, first, start)[: len(ids)] == ids
    assert not harness.lineage.mismatches


def test_a_turn_that_loses_its_handles_later_stays_where_it_was(harness: Harness) -> None:
    start = harness.messages
    calls = [answered(harness, reasoning, TEXT) for reasoning in ("one way", "another way")]
    first, ids = calls[0]
    echoed(harness, first, start)
    second, more = answered(harness, "", TOOL)
    assert more[: len(ids)] == ids
    kept = copy.deepcopy(harness.messages)
    kept[1:-1] = [{"role": "assistant", "content": TEXT}]
    assert echoed(harness, second, kept)[: len(more)] == more
    assert not harness.lineage.mismatches


def test_handles_that_come_and_go_do_not_make_another_context(rendering: Rendering) -> None:
    harness = begun(rendering, AnthropicMessages())
    name, _ = answered(harness, "hm", TEXT)
    echoed(harness, name, harness.messages)
    known = harness.lineage.prompt(harness.request()).context
    harness.messages[1] = {"role": "assistant", "content": TEXT}
    assert harness.lineage.prompt(harness.request()).context is known


async def test_one_prompt_under_two_spellings_survives_a_restart(
    gateway: RunningGateway, tmp_path: Path
) -> None:
    """With its reasoning and without it the echo leads to the same prompt, asked for under two digests."""
    gateway.engine(0)
    gateway.script.answers = ["<think>\nhm\n</think>\n\none<|im_end|>", "two<|im_end|>"]
    ask = {"role": "user", "content": "go"}
    echo = (await gateway.chat([ask]))["choices"][0]["message"]
    assert echo["reasoning_content"]
    bare = {"role": "assistant", "content": "one"}
    await gateway.chat([ask, echo, ask])
    gateway.script.outputs.pop()
    gateway.script.answers = ["three<|im_end|>"]
    await gateway.chat([ask, bare, ask])
    (tmp_path / "again").mkdir()
    shutil.copy(gateway.path, tmp_path / "again")
    again = await RunningGateway.start(gateway.app.rendering, tmp_path / "again")
    again.engine(0)
    again.script.answers = ["four<|im_end|>"]
    assert (await again.chat([ask, bare, ask, {"role": "assistant", "content": "three"}, ask]))[
        "status"
    ] == 200
    *_, third, fourth = await again.records()
    known = [*third.prompt_ids, *third.output_ids]
    assert fourth.prompt_ids[: len(known)].tolist() == known and fourth.forks == ()
    await again.stop()


step = st.tuples(st.integers(0, 9), st.sampled_from(["", "a", "b"]), st.sampled_from([TEXT, "other", TOOL]))


@settings(max_examples=40)
@given(st.sampled_from(DIALECTS), st.integers(0, 99), st.lists(step, min_size=2, max_size=8))
def test_branches_of_equal_texts_keep_to_their_own_recorded_ids(
    rendering: Rendering, make: Callable[[], Dialect], seed: int, steps: list[tuple[int, str, str]]
) -> None:
    """Every prompt starts with the recorded ids of the call it echoes, or the doubt is counted and the text is equal."""
    harness = begun(rendering, make(), seed)
    branches: list[tuple[list[Json], list[int]]] = [(harness.messages, [])]
    for pick, reasoning, text in steps:
        before, _ = branches[pick % len(branches)]
        harness.messages = copy.deepcopy(before)
        name, ids = answered(harness, reasoning, text)
        doubts = harness.lineage.mismatches[Mismatch.AMBIGUOUS_ECHO]
        child = echoed(harness, name, before, "go on")
        counted = harness.lineage.mismatches[Mismatch.AMBIGUOUS_ECHO]
        if counted == doubts:
            assert child[: len(ids)] == ids
        else:
            assert text != TOOL and isinstance(harness.dialect, ChatCompletions | AnthropicMessages)
            assert not reasoning or rendering.text(child).startswith(rendering.text(ids))
        branches.append((copy.deepcopy(harness.messages), child))
    assert set(harness.lineage.mismatches) <= {Mismatch.AMBIGUOUS_ECHO}
