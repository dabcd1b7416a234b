"""Micro-steps: the layout law (who sees whom), the target rule, and refusal of broken arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_hpc.errors import CorruptRecord
from gyre_hpc.records import Int32
from gyre_hpc.trajectories.micro_steps import MicroStep, NodeTargets, build


def targets(places: list[tuple[int, int, int]]) -> NodeTargets:
    """Targets from (node, index, path)."""
    columns = np.array(places, np.int32).reshape(-1, 3)
    ones = np.ones(len(places), np.float32)
    return NodeTargets(
        node=columns[:, 0],
        index=columns[:, 1],
        path=columns[:, 2],
        weight=ones / len(places),
        advantage=ones,
        behaviour_logprob=-ones,
        version=np.zeros(len(places), np.int32),
    )


def tokens(*values: int) -> Int32:
    return np.array(values, np.int32)


def fork() -> MicroStep:
    """Root 10 11, children 12 13 and 14, and a second root 20 21; handed over breadth first."""
    return build(
        "3.0",
        3,
        [-1, 0, -1, 0],
        [tokens(10, 11), tokens(12, 13), tokens(20, 21), tokens(14)],
        targets([(1, 0, 0), (1, 1, 0), (3, 0, 1), (2, 1, 2)]),
        np.array([7, 7, 8], np.int32),
    )


def test_nodes_are_laid_out_depth_first_with_positions_by_depth() -> None:
    step = fork()
    assert step.ids.tolist() == [10, 11, 12, 13, 14, 20, 21]
    assert step.pos.tolist() == [0, 1, 2, 3, 2, 0, 1]
    assert step.tin.tolist() == [0, 0, 1, 1, 2, 3, 3]
    assert step.tout.tolist() == [3, 3, 2, 2, 3, 4, 4]


def test_the_last_token_of_a_node_predicts_the_first_token_of_each_child() -> None:
    step = fork()
    assert step.row.tolist() == [1, 2, 1, 5]
    assert step.target.tolist() == [12, 13, 14, 21]


def test_segments_name_the_ancestor_spans_with_adjacent_ones_merged() -> None:
    spans = [(s.start, s.end, s.ancestors) for s in fork().segments()]
    assert spans == [(0, 2, ()), (2, 4, ((0, 2),)), (4, 5, ((0, 2),)), (5, 7, ())]
    chain = build("0.0", 0, [-1, 0, 1], [tokens(1), tokens(2), tokens(3)], targets([(2, 0, 0)]), tokens(0))
    assert chain.segments()[2].ancestors == ((0, 2),)


def test_arrays_round_trip() -> None:
    step = fork()
    again = MicroStep.from_arrays("3.0", 3, step.to_arrays())
    for name, array in step.to_arrays().items():
        np.testing.assert_array_equal(array, again.to_arrays()[name])


def test_the_first_token_of_a_root_cannot_be_a_target() -> None:
    with pytest.raises(ValueError, match="first token of a root"):
        build("0.0", 0, [-1], [tokens(1, 2)], targets([(0, 0, 0)]), tokens(0))


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("tin", lambda a: a[::-1].copy(), "depth-first"),
        ("tout", lambda a: a + np.int32(9), "interval"),
        ("pos", lambda a: a * np.int32(2), "positions"),
        ("row", lambda a: a + np.int32(100), "row leaves"),
        ("path", lambda a: np.zeros_like(a), "no target"),
        ("weight", lambda a: a * np.float32(0), "weight"),
        ("advantage", lambda a: a * np.float32(np.nan), "advantage"),
        ("behaviour_logprob", lambda a: -a, "log-probability"),
        ("ids", lambda a: a.astype(np.int64), "int64"),
        ("version", lambda a: a[1:], "sizes differ"),
    ],
)
def test_a_broken_array_is_refused_by_name(field: str, change: object, message: str) -> None:
    arrays = fork().to_arrays()
    arrays[field] = change(arrays[field])  # type: ignore[operator]
    with pytest.raises(CorruptRecord, match=message):
        MicroStep.from_arrays("3.0", 3, arrays)


@st.composite
def forests(draw: st.DrawFn) -> list[int]:
    count = draw(st.integers(1, 12))
    return [draw(st.integers(-1, node - 1)) for node in range(count)]


@settings(max_examples=60, deadline=None)
@given(forests(), st.data())
def test_a_token_sees_exactly_its_path(parents: list[int], data: st.DataObject) -> None:
    sizes = [data.draw(st.integers(1, 3)) for _ in parents]
    names = iter(range(1000))
    arrays = [np.array([next(names) for _ in range(size)], np.int32) for size in sizes]
    node, index = len(parents) - 1, sizes[-1] - 1
    if parents[node] < 0 and index == 0:
        arrays[node] = np.append(arrays[node], np.int32(next(names)))
        index = 1
    step = build("0.0", 0, parents, arrays, targets([(node, index, 0)]), tokens(0))
    step.validate()
    paths: list[list[int]] = []
    for at, parent in enumerate(parents):
        paths.append((paths[parent] if parent >= 0 else []) + arrays[at].tolist())
    path_of = {token: path for array, path in zip(arrays, paths, strict=True) for token in array.tolist()}
    for query, token in enumerate(step.ids.tolist()):
        sees = (step.tin <= step.tin[query]) & (step.tin[query] < step.tout) & (step.pos <= step.pos[query])
        path = path_of[token]
        assert step.ids[sees].tolist() == path[: path.index(token) + 1]
    for segment in step.segments():
        visible = [t for start, end in segment.ancestors for t in step.ids[start:end].tolist()]
        assert (
            visible + step.ids[segment.start : segment.end].tolist() == path_of[int(step.ids[segment.start])]
        )
