"""Roles, selection and advantages: which sampled tokens are trained, once each, and with what advantage."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_hpc.bench.tree import call_record
from gyre_hpc.records import CallRecord, ExecutionId, LeafRole
from gyre_hpc.trajectories.advantages import advantages
from gyre_hpc.trajectories.roles import leaf_roles
from gyre_hpc.trajectories.selection import select, target_tokens
from gyre_hpc.trajectories.strands import Strands
from gyre_hpc.trajectories.tree import Tree, build_tree

E = ExecutionId(5)


def record(ordinal: int, prompt: list[int], output: list[int], **flags: object) -> CallRecord:
    arrays = np.array(prompt, np.int32), np.array(output, np.int32)
    return call_record(ordinal, *arrays, **flags)  # type: ignore[arg-type]


def tree_of(calls: list[CallRecord]) -> Tree:
    strands = Strands()
    for call in calls:
        strands.add(call)
    return build_tree(strands)


def branches(role_by_branch: dict[int, LeafRole], size: int = 4) -> Tree:
    """One shared answer (call 0) and one further call per branch."""
    calls = [record(0, [1], [2, 2])]
    for branch, role in role_by_branch.items():
        calls.append(record(branch, [1, 2, 2, 100 + branch], [3] * size, role=role))
    return tree_of(calls)


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    calls: list[CallRecord] = []
    for ordinal in range(draw(st.integers(1, 10))):
        base: list[int] = []
        if calls and draw(st.integers(0, 4)):
            earlier = draw(st.sampled_from(calls))
            base = [*earlier.prompt_ids.tolist(), *earlier.output_ids.tolist()]
        prompt = [*base, *draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))]
        output = draw(st.lists(st.integers(0, 3), max_size=4))
        role, accepted = draw(st.sampled_from(LeafRole)), draw(st.integers(0, 5)) > 0
        calls.append(record(ordinal, prompt, output, role=role, accepted=accepted))
    return tree_of(calls)


@settings(max_examples=100, deadline=None)
@given(trees(), st.integers(1, 6), st.integers(0, 3))
def test_each_sampled_token_is_a_target_at_most_once(tree: Tree, j_max: int, seed: int) -> None:
    paths = select(tree, E, seed, j_max)
    assert len(paths) <= j_max
    counted = Counter(node for path in paths for node in path.targets)
    assert all(count == 1 for count in counted.values())
    assert all(tree.target[node] for node in counted)
    for path in paths:
        assert path.targets and path.nodes[-1] == path.targets[-1]
        assert list(path.nodes) == tree.path(path.leaf)[: len(path.nodes)]
        assert set(path.targets) <= set(path.nodes)


@settings(max_examples=100, deadline=None)
@given(trees(), st.integers(0, 3))
def test_without_a_bound_every_sampled_token_is_trained(tree: Tree, seed: int) -> None:
    paths = select(tree, E, seed, j_max=1000)
    assert target_tokens(tree, paths) == int(tree.sizes[tree.target].sum())


@settings(max_examples=50, deadline=None)
@given(trees(), st.integers(0, 3))
def test_fewer_paths_are_a_beginning_of_more_paths(tree: Tree, seed: int) -> None:
    assert select(tree, E, seed, 2) == select(tree, E, seed, 5)[:2]


def test_selection_depends_on_run_seed_and_execution_only() -> None:
    tree = branches(dict.fromkeys(range(1, 9), LeafRole.MAIN))
    drawn = {
        (seed, execution): [path.leaf for path in select(tree, ExecutionId(execution), seed, 5)]
        for seed in range(4)
        for execution in range(4)
    }
    again = [path.leaf for path in select(tree, ExecutionId(3), 2, 5)]
    assert drawn[(2, 3)] == again
    assert len({tuple(leaves) for leaves in drawn.values()}) > 8


def test_the_highest_role_goes_first() -> None:
    roles = dict(enumerate(reversed(LeafRole), start=1))
    tree = branches(roles)
    assert [path.role for path in select(tree, E, 0, 9)] == list(LeafRole)


def test_a_lower_role_is_drawn_only_when_higher_ones_are_trained() -> None:
    tree = branches({1: LeafRole.SUB_AGENT, 2: LeafRole.MAIN, 3: LeafRole.MAIN})
    for seed in range(10):
        assert [path.role for path in select(tree, E, seed, 3)] == [
            LeafRole.MAIN,
            LeafRole.MAIN,
            LeafRole.SUB_AGENT,
        ]


def test_leaves_are_drawn_in_proportion_to_their_untrained_tokens() -> None:
    tree = tree_of([record(0, [1], [7] * 30), record(1, [2], [8] * 10)])
    firsts = Counter(select(tree, ExecutionId(execution), 0, 1)[0].leaf for execution in range(2000))
    assert firsts[int(tree.tip[0])] / 2000 == pytest.approx(0.75, abs=0.04)


def test_a_shared_answer_belongs_to_the_first_path_drawn_through_it() -> None:
    tree = branches(dict.fromkeys(range(1, 4), LeafRole.MAIN))
    shared = int(tree.tip[0])
    owners = [shared in path.targets for path in select(tree, E, 0, 3)]
    assert owners == [True, False, False]


def test_the_leaf_takes_the_role_of_the_call_that_ends_there() -> None:
    tree = tree_of(
        [
            record(0, [1], [2], role=LeafRole.MAIN),
            record(1, [1, 2, 3], [4], role=LeafRole.MAIN_SUMMARY),
            record(2, [9], [4], role=LeafRole.UNKNOWN),
        ]
    )
    assert leaf_roles(tree) == {int(tree.tip[1]): LeafRole.MAIN_SUMMARY, int(tree.tip[2]): LeafRole.UNKNOWN}


def test_toy_token_counts_of_eight_branches() -> None:
    """TOY: 60 % shared prefix, 40 % own suffix; token counts only, never a speed (reference: 2.105 and 3.077)."""
    shared, own = 60, 40
    calls = [record(branch, [1] * shared, [10 + branch] * own) for branch in range(8)]
    tree = tree_of(calls)
    rows = 8 * (shared + own)
    assert rows / len(tree.tokens) == pytest.approx(2.105, abs=1e-3)
    kept = {node for path in select(tree, E, 0, 5) for node in path.nodes}
    assert rows / int(tree.sizes[sorted(kept)].sum()) == pytest.approx(3.077, abs=1e-3)


def test_advantages_are_centred_and_scaled_by_the_groups_deviation() -> None:
    found = advantages([0.0, 1.0, 1.0, 0.0], eps=0.1, std=True)
    assert found == pytest.approx([-0.5 / 0.6, 0.5 / 0.6, 0.5 / 0.6, -0.5 / 0.6])
    assert advantages([0.0, 1.0], eps=0.1, std=False) == [-0.5, 0.5]


@given(st.floats(-1e3, 1e3), st.integers(1, 9))
def test_equal_rewards_give_no_advantage_at_all(reward: float, count: int) -> None:
    assert advantages([reward] * count, eps=0.1, std=True) is None
    assert advantages([], eps=0.1, std=True) is None
