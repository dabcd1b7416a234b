"""A batch split over a core and a satellite is the batch trained by one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gyre_hpc.errors import CorruptRecord
from gyre_hpc.training.trainer import Trainer
from gyre_hpc.trajectories.micro_steps import MicroStep
from tests.training.training_cases import SHAPE, make_trainer, random_tree, relative_error, same_bits


def batch(number: int) -> list[MicroStep]:
    return [random_tree(100 * number + index).as_forest() for index in range(6)]


def split_step(core: Trainer, satellite: Trainer, steps: list[MicroStep], number: int) -> None:
    """The satellite pulls the weights, takes every third micro-step, and flushes once."""
    satellite.load_weights(core.weights())
    for index, step in enumerate(steps):
        (satellite if index % 3 == 2 else core).accumulate(step)
    sent = {name: array.copy() for name, array in satellite.gradient().items()}
    satellite.clear()
    core.add(sent)
    core.step(executions=5, version=number + 1)


def grouped_step(single: Trainer, steps: list[MicroStep], number: int) -> None:
    """The same grouping in one process: each group summed alone, groups added in cell order."""
    sums = []
    for members in (
        [s for i, s in enumerate(steps) if i % 3 != 2],
        [s for i, s in enumerate(steps) if i % 3 == 2],
    ):
        single.clear()
        for step in members:
            single.accumulate(step)
        sums.append({name: array.copy() for name, array in single.gradient().items()})
    single.clear()
    for part in sums:
        single.add(part)
    single.step(executions=5, version=number + 1)


def test_core_and_satellite_equal_one_process_bit_for_bit_with_the_same_grouping(model_dir: Path) -> None:
    core, satellite, single, sequential = (make_trainer(model_dir) for _ in range(4))
    assert core.layout_digest() == satellite.layout_digest()
    for number in range(3):
        steps = batch(number)
        split_step(core, satellite, steps, number)
        grouped_step(single, steps, number)
        for step in steps:
            sequential.accumulate(step)
        sequential.step(executions=5, version=number + 1)
    assert same_bits(core.weights(), single.weights())
    moved = relative_error(core.weights(), make_trainer(model_dir).weights())
    assert moved > 0.01
    assert relative_error(sequential.weights(), core.weights()) < 0.01 * moved


def test_a_contribution_of_another_layout_is_refused(trainer: Trainer) -> None:
    with pytest.raises(CorruptRecord, match=r"dense\.0"):
        trainer.add({"dense.0": np.zeros(3, np.float32)})
    assert not trainer.has_gradient


def test_layouts_differ_when_shapes_differ(trainer: Trainer, tmp_path: Path) -> None:
    from dataclasses import replace

    from tests.training.training_cases import make_model

    other = make_trainer(make_model(tmp_path / "m", replace(SHAPE, intermediate_size=128)))
    assert other.layout_digest() != trainer.layout_digest()


def test_the_gradient_is_a_view_that_clear_empties(trainer: Trainer) -> None:
    trainer.accumulate(random_tree(1).as_forest())
    view = trainer.gradient()["dense.0"]
    assert view.dtype == np.float32 and np.any(view)
    trainer.clear()
    assert not np.any(view)
