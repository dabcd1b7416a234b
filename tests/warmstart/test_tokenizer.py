"""The tiny tokenizer: any text survives, specials are single, what must be copied is a token of its own."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gyre_hpc.executions.patchkit.family import MODULE_NAMES
from gyre_hpc.warmstart.tokenizer import SPECIALS, train_tokenizer

MODEL = Path(__file__).parents[2] / "gyre_hpc" / "models" / "patchkit"
SHIPPED = Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@given(st.text())
def test_any_text_survives(text: str) -> None:
    assert SHIPPED.decode(SHIPPED.encode(text).ids, skip_special_tokens=False) == text


def test_specials_are_single_tokens_in_order() -> None:
    assert [SHIPPED.encode(token).ids for token in SPECIALS] == [[i] for i in range(len(SPECIALS))]


def test_names_digits_and_operators_are_tokens_of_their_own() -> None:
    for name in MODULE_NAMES:
        tokens = [
            SHIPPED.decode([i]) for i in SHIPPED.encode(f"sed -i '3s/.*/    return x % 7/' {name}.py").ids
        ]
        assert {"%", "7", name} <= set(tokens)


def test_a_fixed_phrase_becomes_few_tokens() -> None:
    phrase = '\n{"name": "bash", "arguments": {"command": "cat ash.py"}}\n'
    assert len(SHIPPED.encode(phrase).ids) <= 3


def test_training_is_deterministic() -> None:
    texts = ["fix ash now<|im_end|>", "fix bay now<|im_end|>"]
    assert train_tokenizer(texts, 300).to_str() == train_tokenizer(texts, 300).to_str()
