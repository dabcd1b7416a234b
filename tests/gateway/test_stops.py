"""Stop strings: the window finds exactly what decoding the whole answer after each chunk would find."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_hpc.gateway.rendering import Rendering
from gyre_hpc.gateway.stops import find_stop

TEXTS = st.text(alphabet="ab \né漢😀<", max_size=60)
STOPS = st.lists(st.text(alphabet="ab \né漢😀<", max_size=4), min_size=1, max_size=3)


def obvious(rendering: Rendering, ids: list[int], stops: list[str]) -> tuple[str, int] | None:
    """Decode everything, and again token by token."""
    text = rendering.text(ids)
    found = [stop for stop in stops if stop and stop in text]
    if not found:
        return None
    first, count = min(found, key=text.index), len(ids)
    while count > 1 and first in rendering.text(ids[: count - 1]):
        count -= 1
    return first, count


@given(text=TEXTS, stops=STOPS, data=st.data())
@settings(max_examples=300, deadline=None)
def test_a_window_finds_what_the_whole_text_has(
    rendering: Rendering, text: str, stops: list[str], data: st.DataObject
) -> None:
    ids = rendering.tokenizer.encode(text)
    known = 0
    while known < len(ids):
        end = data.draw(st.integers(known + 1, len(ids)))
        found = find_stop(rendering.text, ids[:end], known, stops)
        assert found == obvious(rendering, ids[:end], stops)
        if found is not None:
            return
        known = end


@pytest.mark.parametrize("count", [200, 2000])
def test_a_look_at_one_more_token_decodes_no_more_of_a_longer_answer(
    rendering: Rendering, count: int
) -> None:
    ids = rendering.tokenizer.encode("abé " * count)
    decoded: list[int] = []

    def text_of(part: list[int]) -> str:
        decoded.append(len(part))
        return rendering.text(part)

    assert find_stop(text_of, ids, len(ids) - 1, ["never"]) is None  # type: ignore[arg-type]
    assert sum(decoded) < 100


def test_the_first_stop_in_the_text_wins_whatever_their_order(rendering: Rendering) -> None:
    ids = rendering.tokenizer.encode("one two three")
    assert find_stop(rendering.text, ids, 0, ["three", "two"]) == (
        "two",
        len(rendering.tokenizer.encode("one two")),
    )
