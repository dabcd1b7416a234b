"""Finer cells, longest first and overlapping joins: never slower than E0, at the same staleness and data."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gyre_hpc.simulate.beyond import BUNDLE_A, E0, Comparison, compare
from gyre_hpc.simulate.presets import SimulateConfig, compose, compose_world

PRESET = ["preset=beyond"]
LESS_TRAINING = {"P1": 0.85, "P2": 0.85, "T1": 0.85, "T2": 0.95}


def compared(name: str, config: SimulateConfig) -> Comparison:
    return compare(name, compose_world(PRESET, name), config)


def check(each: Comparison) -> float:
    ratio = each.bundle.ratio_to(each.base).mean
    assert ratio <= (0.97 if each.world in ("RL", "RT") else 1.005)
    if each.world in LESS_TRAINING:
        assert each.less_training.ratio_to(each.base).mean <= LESS_TRAINING[each.world]
    for row in (each.base, each.bundle, each.less_training):
        assert row.equally_stale
        assert row.gap_bb is not None
        assert 0 <= row.gap_bb <= row.gap_wc
    return ratio


def test_bundle_and_base_differ_in_nothing_that_learning_sees() -> None:
    assert BUNDLE_A.staleness == E0.staleness == 1.5
    assert replace(BUNDLE_A, cells=8, launch_order=E0.launch_order, overlap_joins=False) == E0


@pytest.mark.parametrize("world", ["P1", "RL"])
def test_the_bundle_keeps_its_bounds(world: str) -> None:
    check(compared(world, replace(compose(PRESET), seeds=2, steps=24)))


@pytest.mark.full
def test_the_bundle_keeps_its_bounds_in_all_worlds() -> None:
    config = compose(PRESET)
    ratios = {name: check(compared(name, config)) for name in config.worlds}
    assert sum(ratios[name] for name in LESS_TRAINING) / len(LESS_TRAINING) <= 0.985
