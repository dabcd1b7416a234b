from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gyre_hpc.engines.torch.pool import PagePool, PrefixKeys

PAGES = 9


class PoolLaws(RuleBasedStateMachine):
    """Holders take, share, publish and release pages in any order; a model of who holds what is kept beside the pool."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES)
        self.holders: list[list[int]] = []
        self.content: dict[int, int] = {}
        """What the last owner wrote on a page; a findable page must still carry it."""
        self.keyed: dict[bytes, int] = {}
        self.written = 0

    def count(self, page: int) -> int:
        return sum(pages.count(page) for pages in self.holders)

    @rule()
    def allocate(self) -> None:
        page = self.pool.allocate()
        if page is None:
            assert self.pool.held == PAGES - 1
            return
        assert page != 0
        assert self.count(page) == 0, "a held page was handed out"
        self.written += 1
        self.content[page] = self.written
        self.holders.append([page])

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), key=st.sampled_from([b"k0", b"k1", b"k2", b"k3", b"k4"]))
    def publish(self, data: st.DataObject, key: bytes) -> None:
        page = data.draw(st.sampled_from(self.holders))[0]
        findable = self.pool.finds(key)
        self.pool.publish(page, key)
        if not findable and self.pool.finds(key):
            self.keyed[key] = self.content[page]

    @rule(keys=st.lists(st.sampled_from([b"k0", b"k1", b"k2", b"k3", b"k4"]), max_size=4, unique=True))
    def share(self, keys: list[bytes]) -> None:
        findable = [self.pool.finds(key) for key in keys]
        pages = self.pool.acquire_prefix(keys)
        assert len(pages) == [*findable, False].index(False)
        for key, page in zip(keys, pages, strict=False):
            assert self.content[page] == self.keyed[key], "a found page carries other content"
        if pages:
            self.holders.append(pages)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holders) - 1))
        self.pool.release(self.holders.pop(index))

    @rule()
    def flush(self) -> None:
        self.pool.flush()
        assert not any(self.pool.finds(key) for key in self.keyed)

    @invariant()
    def no_page_leaks_or_doubles(self) -> None:
        held = {page for pages in self.holders for page in pages}
        assert self.pool.held == len(held)
        assert self.pool.available == PAGES - 1 - len(held)


PoolLaws.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolLaws = PoolLaws.TestCase


def test_a_released_page_cannot_be_released_or_published() -> None:
    pool = PagePool(3)
    page = pool.allocate()
    assert page is not None
    pool.release([page])
    with pytest.raises(ValueError, match=f"page {page}"):
        pool.release([page])
    with pytest.raises(ValueError, match=f"page {page}"):
        pool.publish(page, b"key")


def test_the_longest_unused_suffix_is_evicted_before_its_prefix() -> None:
    pool = PagePool(4)
    pages = [page for page in (pool.allocate() for _ in range(3)) if page is not None]
    for page, key in zip(pages, (b"a", b"b", b"c"), strict=True):
        pool.publish(page, key)
    pool.release(pages)
    assert pool.allocate() == pages[2]
    assert (pool.finds(b"a"), pool.finds(b"b"), pool.finds(b"c")) == (True, True, False)


def _keys(
    ids: list[int], namespace: str = "w1", layout: bytes = b"layout", page_tokens: int = 2
) -> list[bytes]:
    chain = PrefixKeys(namespace, layout, page_tokens)
    chain.extend(ids)
    return chain.keys


def test_a_key_covers_namespace_layout_and_the_whole_prefix() -> None:
    base = _keys([1, 2, 3, 4, 5])
    assert len(base) == 2
    assert _keys([1, 2, 3, 4, 9, 9])[:2] == base
    assert _keys([1, 2, 3, 9])[0] == base[0]
    assert set(base).isdisjoint(_keys([1, 2, 3, 4], namespace="w2"))
    assert set(base).isdisjoint(_keys([1, 2, 3, 4], layout=b"other"))
    assert _keys([9, 2, 3, 4])[1] != base[1]


def test_keys_grow_with_the_ids_as_if_made_at_once() -> None:
    chain = PrefixKeys("w1", b"layout", 2)
    for length in range(6):
        chain.extend([1, 2, 3, 4, 5][:length])
    assert chain.keys == _keys([1, 2, 3, 4, 5])
