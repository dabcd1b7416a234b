"""Rendering: the laws of render, bridge, turn and parse on a tiny tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_hpc.errors import ConfigError, MissingInput
from gyre_hpc.gateway.rendering import AnswerStatus, Rendering

TOOLS = [
    {"type": "function", "function": {"name": "bash", "description": "run", "parameters": {"type": "object"}}}
]
START = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "list the files"}]


def ids(rendering: Rendering, text: str) -> list[int]:
    return rendering.tokenizer.encode(text)


@given(
    st.lists(st.sampled_from(["<|im_end|>", "<think>", " tool", "ü", "\U0001f600", "\r\n", "\0"]) | st.text())
)
def test_texts_have_the_ids_that_the_tokenizer_gives_them(rendering: Rendering, parts: list[str]) -> None:
    text = "".join(parts)
    expected = rendering.tokenizer.backend.encode(text, add_special_tokens=False).ids
    assert rendering.tokenizer.encode(text) == expected


def test_a_bridge_keeps_every_sampled_id_and_appends_only_the_delta(rendering: Rendering) -> None:
    prompt = rendering.render(START, TOOLS)
    odd = [*(ids(rendering, c)[0] for c in "ls"), *ids(rendering, " done<|im_end|>")]
    child = rendering.bridge(prompt, odd, [{"role": "tool", "content": "a.py"}], TOOLS)
    assert child is not None
    assert child[: len(prompt) + len(odd)] == prompt + odd
    assert rendering.text(child[len(prompt) + len(odd) :]).endswith(
        "</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_an_output_cut_by_length_is_closed_in_the_delta(rendering: Rendering) -> None:
    prompt, cut = rendering.render(START), ids(rendering, "half a sen")
    child = rendering.bridge(prompt, cut, [{"role": "user", "content": "go on"}])
    assert child is not None
    assert rendering.text(child[len(prompt) + len(cut) :]).startswith("<|im_end|>\n<|im_start|>user\ngo on")


@pytest.mark.parametrize("thinking", [False, True])
def test_past_thinking_survives_a_new_user_turn(model_dir: Path, thinking: bool) -> None:
    rendering = Rendering(model_dir, "qwen3", thinking)
    prompt = rendering.render(START)
    output = ids(rendering, "<think>\nhmm\n</think>\n\nyes<|im_end|>")
    child = rendering.bridge(prompt, output, [{"role": "user", "content": "why"}])
    assert child is not None and child[len(prompt) : len(prompt) + len(output)] == output


def test_a_turn_of_somebody_else_reads_like_a_generated_one(rendering: Rendering) -> None:
    message = {"role": "assistant", "content": "hello"}
    turn = rendering.turn(message)
    assert turn == ids(rendering, "hello<|im_end|>")
    more = [{"role": "user", "content": "and"}]
    assert rendering.bridge(rendering.render(START), turn or [], more) == rendering.render(
        [*START, message, *more]
    )


def test_parse_reads_thinking_text_and_tool_calls(rendering: Rendering) -> None:
    text = '<think>\nplan\n</think>\n\nok\n<tool_call>\n{"name": "bash", "arguments": {"n": 9000.0}}\n</tool_call><|im_end|>'
    answer = rendering.parse(ids(rendering, text))
    assert (answer.content, answer.reasoning, answer.status) == ("ok", "plan", AnswerStatus.OK)
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [("bash", '{"n": 9000.0}')]


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "bash", "arguments": ',
        '{"arguments": {}}',
        '{"name": "b", "arguments": [1]}',
        '{"name": "b", "arguments": {"x": NaN}}',
    ],
)
def test_an_unreadable_tool_call_stays_as_text(rendering: Rendering, body: str) -> None:
    answer = rendering.parse(ids(rendering, f"<tool_call>\n{body}\n</tool_call><|im_end|>"))
    assert answer.tool_calls == () and answer.status is AnswerStatus.MALFORMED_TOOL_CALL
    assert body.strip() in answer.content


def test_a_lone_surrogate_in_arguments_stays_valid_json(rendering: Rendering) -> None:
    text = '<tool_call>\n{"name": "b", "arguments": {"x": "\\ud83d"}}\n</tool_call>'
    assert rendering.parse(ids(rendering, text)).tool_calls[0].arguments.encode() == b'{"x": "\\ud83d"}'


def test_generation_ending_in_thinking_is_said(model_dir: Path) -> None:
    rendering = Rendering(model_dir, "qwen3", thinking=True)
    assert rendering.parse(ids(rendering, "<think>\nhm")).status is AnswerStatus.OPEN_REASONING


def test_bad_models_and_renderers_are_named(tmp_path: Path, model_dir: Path) -> None:
    with pytest.raises(MissingInput, match=r"tokenizer\.json"):
        Rendering(tmp_path, "qwen3", thinking=False)
    with pytest.raises(ConfigError, match=r"model\.renderer=qwen33"):
        Rendering(model_dir, "qwen33", thinking=False)
