"""Bad nodes: who is called one, for how long, and which of them the run's next job is not given."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_hpc.config_cluster import ClusterConfig
from gyre_hpc.launch.nodes import bad_nodes as module
from gyre_hpc.launch.nodes.bad_nodes import (
    BadNodes,
    excluded_nodes,
    node_states,
    read_bad_nodes,
    spared,
    submitted_exclude,
)
from gyre_hpc.layout import RunLayout


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def bad_nodes(layout: RunLayout, clock: Clock, **keys: float) -> BadNodes:
    return BadNodes(layout, ClusterConfig(**keys), clock)  # type: ignore[arg-type]


def test_a_node_is_bad_after_so_many_deaths_within_the_window_and_is_named_once(tmp_path: Path) -> None:
    clock = Clock()
    nodes = bad_nodes(RunLayout(tmp_path), clock, bad_node_deaths=3, bad_node_window_s=100)
    assert [nodes.died("n1", "a") for _ in range(2)] == [None, None] and not nodes.names
    assert nodes.died("n2", "b") is None
    clock.now += 99
    found = nodes.died("n1", "cell-1: exited with 1: no such device")
    assert found is not None and "3 cells" in found.why and "no such device" in found.why
    assert nodes.names == {"n1"} and nodes.died("n1", "c") is None


def test_deaths_far_apart_make_no_node_bad(tmp_path: Path) -> None:
    clock = Clock()
    nodes = bad_nodes(RunLayout(tmp_path), clock, bad_node_deaths=2, bad_node_window_s=100)
    for _ in range(50):
        assert nodes.died("n1", "a") is None
        clock.now += 100


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60)), max_size=30),
)
def test_bad_is_who_died_often_enough_in_some_window(limit: int, deaths: list[tuple[int, int]]) -> None:
    clock = Clock()
    nodes = bad_nodes(RunLayout(Path("/nonexistent")), clock, bad_node_deaths=limit, bad_node_window_s=100)
    times: dict[str, list[float]] = {}
    for node, later in deaths:
        clock.now += later
        nodes.died(f"n{node}", "x")
        times.setdefault(f"n{node}", []).append(clock.now)
    expected = {
        node
        for node, at in times.items()
        if any(last - first < 100 for first, last in zip(at, at[limit - 1 :], strict=False))
    }
    assert nodes.names == expected


def test_bad_nodes_outlive_their_controller_and_expire(tmp_path: Path) -> None:
    layout, clock = RunLayout(tmp_path), Clock()
    assert bad_nodes(layout, clock, bad_node_expire_s=500).lost("n1", "down*") is not None
    clock.now += 400
    later = bad_nodes(layout, clock, bad_node_expire_s=500)
    assert later.names == {"n1"} and later.lost("n1", "down*") is None
    assert later.unfit("n2", "nhc: disk full") is not None
    clock.now += 200
    assert later.names == {"n2"}
    assert [bad.node for bad in read_bad_nodes(layout, clock.now)] == ["n2"]
    assert bad_nodes(layout, clock).names == {"n2"}
    assert later.died("n1", "x") is None, "an old loss is forgiven"


def test_a_damaged_file_calls_no_node_bad(tmp_path: Path) -> None:
    RunLayout(tmp_path).bad_nodes.write_text("{")
    assert read_bad_nodes(RunLayout(tmp_path), 0.0) == []


def states(**nodes: str) -> dict[str, dict[str, str]]:
    return {"": nodes}


def test_nodes_the_job_cannot_do_without_are_not_excluded() -> None:
    idle = states(n0="idle", n1="mix", n2="alloc", n3="down")
    assert spared(["n0", "n3"], {"": 2}, idle) == ["n0", "n3"]
    assert spared(["n0", "n1"], {"": 2}, idle) == ["n0"]
    assert spared(["n0", "n1"], {"": 3}, idle) == []


@given(
    st.sets(st.integers(0, 5)),
    st.integers(0, 6),
    st.lists(st.sampled_from(["idle", "alloc", "down", "", "drain"]), min_size=6, max_size=6),
)
def test_what_is_spared_never_makes_a_job_wait_for_ever(bad: set[int], wanted: int, each: list[str]) -> None:
    site = states(**{f"n{index}": state for index, state in enumerate(each)})
    left_out = spared([f"n{index}" for index in bad], {"": wanted}, site)
    usable = {name for name, state in site[""].items() if state in module.USABLE}
    assert not left_out or len(usable - set(left_out)) >= wanted


def test_sinfo_is_read_by_partition_and_a_silent_node_has_no_state() -> None:
    read = node_states("n0 idle debug*\nn0 idle long\nn1 idle* debug*\nn2 mix- debug*\nn3 drng long")
    assert read == {
        "debug": {"n0": "idle", "n1": "", "n2": "mix"},
        "": {"n0": "idle", "n1": "", "n2": "mix"},
        "long": {"n0": "idle", "n3": "drng"},
    }


def test_without_slurm_all_bad_nodes_are_excluded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    layout = RunLayout(tmp_path)
    assert excluded_nodes(layout) == [] and submitted_exclude("n[7-9]", layout) == "n[7-9]"
    nodes = BadNodes(layout, ClusterConfig())
    nodes.lost("n2", "down*")
    nodes.lost("n1", "down*")
    assert excluded_nodes(layout) == ["n1", "n2"]
    assert submitted_exclude("n[7-9]", layout) == "n[7-9],n1,n2" and submitted_exclude("", layout) == "n1,n2"
