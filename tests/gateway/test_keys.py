"""Keys open what they were made for and nothing else; unknown and revoked ones look alike."""

from __future__ import annotations

import hmac
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_hpc.gateway.keys import Keys


@given(st.lists(st.text(min_size=1), min_size=1, unique=True), st.text())
def test_a_key_opens_its_item_alone(keys: list[str], other: str) -> None:
    store: Keys[str] = Keys()
    for key in keys:
        store.add(key, f"item of {key!r}")
    assert [store.find(key) for key in keys] == [f"item of {key!r}" for key in keys]
    assert (store.find(other) is not None) == (other in keys)


def test_a_revoked_item_has_no_key_left() -> None:
    store: Keys[object] = Keys()
    one, two = object(), object()
    for key, item in (("a", one), ("b", two), ("c", one)):
        store.add(key, item)
    store.revoke(one)
    assert [store.find(key) for key in "abc"] == [None, two, None]
    assert len(store) == 1


def test_every_look_up_is_one_comparison_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known, revoked and never seen: the work is the same, and no plain comparison sees the key."""
    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest

    def spy(known: Any, given: Any) -> bool:
        compared.append((known, given))
        return real(known, given)

    store: Keys[int] = Keys()
    store.add("k" * 32, 1)
    monkeypatch.setattr(hmac, "compare_digest", spy)
    for key in ("k" * 32, "k" * 31 + "x", "", "\ud800" * 4):
        store.find(key)
    assert [given for _, given in compared] == [
        key.encode("utf-8", "surrogatepass") for key in ("k" * 32, "k" * 31 + "x", "", "\ud800" * 4)
    ]
    assert {len(known) for known, _ in compared} == {32}
    assert all(b"k" * 16 not in digest for digest in store._items)
