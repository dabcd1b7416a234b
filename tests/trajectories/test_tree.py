"""The tree against a slow, obvious oracle, and the cases a harness produces, each by name."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_hpc.bench.tree import call_record
from gyre_hpc.errors import CorruptRecord
from gyre_hpc.records import CallRecord, Delivery, Int32
from gyre_hpc.trajectories.strands import Strands
from gyre_hpc.trajectories.tree import Tree, build_tree
from tests.trajectories.oracle import Oracle


def ids(*values: int) -> Int32:
    return np.array(values, np.int32)


def record(ordinal: int, prompt: list[int], output: list[int], **flags: object) -> CallRecord:
    return call_record(ordinal, ids(*prompt), ids(*output), **flags)  # type: ignore[arg-type]


def laid(calls: list[CallRecord]) -> Strands:
    strands = Strands()
    for call in calls:
        strands.add(call)
    return strands


def tree_of(calls: list[CallRecord]) -> Tree:
    return build_tree(laid(calls))


def described(tree: Tree, node: int) -> list[tuple[int, int, bool]]:
    """(id, call, target) of every token on the path to the end of `node`."""
    return [
        (id, int(tree.call[n]), bool(tree.target[n])) for n in tree.path(node) for id in tree.ids(n).tolist()
    ]


def assert_same(tree: Tree, oracle: Oracle) -> None:
    for tip, token in zip(tree.tip.tolist(), oracle.tips, strict=True):
        expected = [(t.id, t.call, oracle.is_target(t)) for t in token.path()]
        assert described(tree, tip) == expected
    assert int(tree.sizes.sum()) == len(oracle.tokens())
    leaf_paths = Counter(tuple(described(tree, leaf)) for leaf in tree.leaves())
    assert leaf_paths == Counter(
        tuple((t.id, t.call, oracle.is_target(t)) for t in token.path())
        for token in oracle.tokens()
        if not token.children
    )


@st.composite
def executions(draw: st.DrawFn) -> list[CallRecord]:
    """Prompts that extend, cut, edit or repeat earlier contexts over an alphabet of two, so that everything collides."""
    texts = st.lists(st.integers(0, 1), max_size=4)
    calls: list[CallRecord] = []
    for ordinal in range(draw(st.integers(1, 9))):
        base: list[int] = []
        if calls and draw(st.integers(0, 5)):
            earlier = draw(st.sampled_from(calls))
            base = [*earlier.prompt_ids.tolist(), *earlier.output_ids.tolist()]
            base = base[: draw(st.integers(0, len(base)))] if draw(st.booleans()) else base
        prompt = base + draw(texts) or [draw(st.integers(0, 1))]
        delivery = draw(st.sampled_from(Delivery))
        accepted = delivery is Delivery.COMPLETE or (delivery is Delivery.PARTIAL and draw(st.booleans()))
        constrained = draw(st.integers(0, 4)) == 0
        output = draw(texts)
        calls.append(
            record(ordinal, prompt, output, delivery=delivery, accepted=accepted, constrained=constrained)
        )
    return calls


@settings(max_examples=250, deadline=None)
@given(executions())
def test_the_tree_equals_the_oracle(calls: list[CallRecord]) -> None:
    oracle = Oracle()
    for call in calls:
        oracle.add(call)
    tree = tree_of(calls)
    assert_same(tree, oracle)
    assert np.all(tree.parent < np.arange(tree.nodes))
    assert np.all(tree.sizes > 0)


@settings(max_examples=100, deadline=None)
@given(executions(), st.randoms(use_true_random=False))
def test_neither_arrival_order_nor_late_metadata_changes_the_tree(
    calls: list[CallRecord], random: object
) -> None:
    shuffled = list(calls)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    early = [replace(call, delivery=Delivery.NONE, accepted=False) for call in shuffled]
    first, second = tree_of(calls), tree_of(early + shuffled)
    np.testing.assert_array_equal(first.tokens, second.tokens)
    np.testing.assert_array_equal(first.parent, second.parent)
    np.testing.assert_array_equal(first.call, second.call)
    np.testing.assert_array_equal(first.target, second.target)


@settings(max_examples=100, deadline=None)
@given(executions())
def test_the_recorded_calls_come_back_exactly(calls: list[CallRecord]) -> None:
    for before, after in zip(calls, laid(calls).records(), strict=True):
        np.testing.assert_array_equal(before.prompt_ids, after.prompt_ids)
        np.testing.assert_array_equal(before.output_ids, after.output_ids)


# ---- cases by name ---------------------------------------------------------------------------------------------


def sampled(tree: Tree) -> dict[int, list[int]]:
    """Target ids by call."""
    found: dict[int, list[int]] = {}
    for node in np.flatnonzero(tree.target).tolist():
        found.setdefault(int(tree.call[node]), []).extend(tree.ids(node).tolist())
    return found


def test_a_chain_needs_one_strand_and_unique_tokens_only() -> None:
    prompt, calls = [1, 2], []
    for ordinal in range(50):
        calls.append(record(ordinal, prompt, [10 + ordinal]))
        prompt = [*prompt, 10 + ordinal, 100 + ordinal]
    strands = laid(calls)
    assert len(strands.strands) == 1
    assert strands.unique_tokens == len(prompt) - 1


def test_trimmed_end_tokens_leave_the_chain_in_one_strand() -> None:
    prompt, calls = [1, 2], []
    for ordinal in range(50):
        calls.append(record(ordinal, prompt, [10, 99]))
        prompt = [*prompt, 10, 200 + ordinal]
    strands = laid(calls)
    longest = max(strands.strands, key=lambda strand: strand.size)
    assert longest.size == len(prompt)
    assert all(strand.size == 1 for strand in strands.strands if strand is not longest)


def test_interleaved_agents_form_a_forest() -> None:
    tree = tree_of(
        [
            record(0, [1, 2], [3]),
            record(1, [7, 8], [9]),
            record(2, [1, 2, 3, 4], [5]),
            record(3, [7, 8, 9, 6], [5]),
        ]
    )
    assert int((tree.parent < 0).sum()) == 2
    assert sorted(len(described(tree, leaf)) for leaf in tree.leaves()) == [5, 5]


def test_a_branch_in_the_middle_of_a_chain() -> None:
    tree = tree_of([record(0, [1, 2], [3]), record(1, [1, 2, 3, 4], [5]), record(2, [1, 2, 3, 8], [9])])
    assert [token[0] for token in described(tree, int(tree.tip[2]))] == [1, 2, 3, 8, 9]
    assert sampled(tree) == {0: [3], 1: [5], 2: [9]}
    assert int(tree.sizes.sum()) == 7


def test_an_undelivered_call_replaced_by_a_retry_is_a_sibling_without_targets() -> None:
    lost = record(0, [1, 2], [3, 4], delivery=Delivery.NONE, accepted=False)
    tree = tree_of([lost, record(1, [1, 2], [3, 5]), record(2, [1, 2, 3, 5, 6], [7])])
    assert sampled(tree) == {1: [3, 5], 2: [7]}
    assert tree.call[tree.path(int(tree.tip[2]))].tolist() == [-1, 1, -1, 2]


def test_a_retry_with_the_same_text_carries_the_continuation() -> None:
    lost = record(0, [1, 2], [3, 4], delivery=Delivery.NONE, accepted=False)
    tree = tree_of([lost, record(1, [1, 2], [3, 4]), record(2, [1, 2, 3, 4, 6], [7])])
    assert tree.call[tree.path(int(tree.tip[2]))].tolist() == [-1, 1, -1, 2]


def test_a_retry_is_still_found_after_a_longer_branch_has_split_its_prompt() -> None:
    tree = tree_of(
        [
            record(0, [0, 1, 1], [2, 3]),
            record(1, [0, 1, 1], [2, 4]),
            record(2, [0, 5, 5, 5, 5, 5, 5], [6]),
            record(3, [0, 1, 1, 2, 3, 9], [7]),
        ]
    )
    assert [call for _, call, _ in described(tree, int(tree.tip[3]))] == [-1, -1, -1, 0, 0, -1, 3]


def test_identical_prompts_with_equal_outputs_are_two_samplings() -> None:
    tree = tree_of([record(0, [1, 2], [3, 4]), record(1, [1, 2], [3, 4])])
    assert sampled(tree) == {0: [3, 4], 1: [3, 4]}


def test_targets_of_a_partly_delivered_call_end_where_delivery_ended() -> None:
    partly = record(0, [1, 2], [3, 4, 5, 6], delivery=Delivery.PARTIAL, accepted=True)
    tree = tree_of([partly, record(1, [1, 2, 3, 4, 9], [7])])
    assert sampled(tree) == {0: [3, 4], 1: [7]}


def test_echoed_text_under_another_parent_is_context() -> None:
    tree = tree_of([record(0, [1, 2], [3, 4]), record(1, [8, 3, 4], [9])])
    assert sampled(tree) == {0: [3, 4], 1: [9]}


def test_constrained_calls_are_never_targets() -> None:
    assert sampled(tree_of([record(0, [1, 2], [3], constrained=True)])) == {}


def test_a_node_knows_its_recorded_log_probabilities_and_versions() -> None:
    first = replace(record(0, [1, 2], [3, 4, 5]), logprobs=np.array([-1, -2, -3], np.float32))
    tree = tree_of([first, record(1, [1, 2, 3, 8], [9])])
    rest = next(node for node in range(tree.nodes) if tree.ids(node).tolist() == [4, 5])
    assert tree.recorded(rest)[0].tolist() == [-2, -3]


@pytest.mark.parametrize(
    "broken",
    [record(0, [], [3]), replace(record(0, [1], [3]), logprobs=np.zeros(2, np.float32))],
)
def test_a_damaged_record_is_refused(broken: CallRecord) -> None:
    with pytest.raises(CorruptRecord, match="call c0"):
        Strands().add(broken)
