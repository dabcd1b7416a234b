"""Law: how the same calls are laid out as forest, rows or cuts changes neither gradient nor clip."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_hpc.config import ObjectiveConfig
from gyre_hpc.training.metrics import merge
from gyre_hpc.training.trainer import Trainer
from tests.training.training_cases import gradient_of, make_trainer, random_tree, relative_error


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000), nodes=st.integers(2, 10))
def test_a_forest_equals_its_paths_as_rows_and_as_cuts(
    shared_trainer: Trainer, seed: int, nodes: int
) -> None:
    tree = random_tree(seed, nodes)
    forest = gradient_of(shared_trainer, [tree.as_forest()])
    if not any(np.any(array) for array in forest.values()):
        return
    assert relative_error(gradient_of(shared_trainer, [tree.as_rows()]), forest) < 1e-5
    assert relative_error(gradient_of(shared_trainer, tree.as_cuts()), forest) < 1e-5


def test_metrics_do_not_depend_on_the_presentation(trainer: Trainer) -> None:
    tree = random_tree(4)
    forest = trainer.accumulate(tree.as_forest())
    cuts = merge(trainer.accumulate(step) for step in tree.as_cuts())
    assert forest.pop("tokens") < cuts.pop("tokens")
    assert cuts == pytest.approx(forest, rel=1e-4)


def test_the_token_clip_obeys_the_law_too(model_dir: Path) -> None:
    trainer = make_trainer(model_dir, ObjectiveConfig(kind="grpo", clip_low=0.3, clip_high=0.3))
    tree = random_tree(8)
    assert (
        relative_error(gradient_of(trainer, [tree.as_rows()]), gradient_of(trainer, [tree.as_forest()]))
        < 1e-5
    )
