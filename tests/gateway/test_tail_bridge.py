"""For some renderers a turn is continued from the end of its prompt alone, so that the cost does not grow with the history: what
comes out is what the library makes of the whole prompt."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from gyre_hpc.gateway.rendering import INLINE_SYSTEM_MARK, TAIL_BRIDGE, Rendering

from .conftest import write_tokenizer

VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PIECES = [
    "hello", "\n", "<think>\n", "hm", "\n</think>\n\n", "</think>", "<|im_end|>", "<|endoftext|>", "<|im_start|>",
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', "<tool_call>", "<tool_call>\n<function=f>\n</function>\n</tool_call>",
]  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
]
ROUNDS = st.lists(
    st.tuples(st.lists(st.sampled_from(PIECES), max_size=6), st.sampled_from(["user", "tool", "system"])),
    min_size=1,
    max_size=4,
)
_made: dict[tuple[str, bool], Rendering] = {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tokenizer(tmp_path_factory.mktemp("vision"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in VISION])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def made(folder: Path, renderer: str, thinking: bool) -> Rendering:
    if (renderer, thinking) not in _made:
        _made[renderer, thinking] = Rendering(folder, renderer, thinking)
    return _made[renderer, thinking]


@pytest.mark.parametrize("renderer", sorted(TAIL_BRIDGE))
@pytest.mark.parametrize("thinking", [False, True])
@given(rounds=ROUNDS, tools=st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_end_of_a_prompt_is_enough_to_go_on(
    folder: Path, renderer: str, thinking: bool, rounds: list[tuple[list[str], str]], tools: bool
) -> None:
    rendering = made(folder, renderer, thinking)
    assert rendering.tail_only
    offered = TOOLS if tools else None
    prompt = rendering.render([{"role": "user", "content": "go"}], offered)
    for pieces, role in rounds:
        output = [token for piece in pieces for token in rendering.tokenizer.encode(piece)]
        fresh = [{"role": role, "content": "more", "tool_call_id": "x"}]
        whole = rendering._renderer.bridge_to_next_turn(
            prompt, output, rendering._in_place(fresh, first=False), tools=offered
        )
        tail = rendering.extend((), output, fresh, offered)
        if whole is None:
            assert tail is None
            return
        assert tail is not None and [*prompt, *tail] == list(whole.token_ids)
        prompt = list(whole.token_ids)


@pytest.mark.parametrize("renderer", sorted(TAIL_BRIDGE))
def test_a_system_turn_stands_where_it_was_sent_also_under_templates_that_refuse_it(
    folder: Path, renderer: str
) -> None:
    rendering = made(folder, renderer, False)
    spoken = [("system", "head"), ("user", "one"), ("system", "inner"), ("user", "two")]
    prompt = rendering.render([{"role": role, "content": text} for role, text in spoken])
    output = rendering.tokenizer.encode("fine<|im_end|>")
    late = [{"role": role, "content": text} for role, text in [("system", "late"), ("user", "three")]]
    tail = rendering.extend(prompt, output, late)
    assert tail is not None
    text = rendering.text([*prompt, *tail])
    places = [text.index(word) for word in ("head", "one", "inner", "two", "fine", "late", "three")]
    assert places == sorted(places)
    assert text.count("<|im_start|>system") == (3 if rendering.inline_system else 1)
    assert rendering.inline_system is (renderer == "qwen3")
    for word in ("inner", "late") if not rendering.inline_system else ():
        assert f"<|im_start|>user\n{INLINE_SYSTEM_MARK.format(word)}<|im_end|>" in text
