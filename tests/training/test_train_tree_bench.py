"""The benchmark's two ways train the same targets."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre_hpc.bench import train_tree
from gyre_hpc.training.new_model import write_new_model
from tests.training.training_cases import make_trainer


def test_the_tree_and_the_paths_have_one_gradient(tmp_path: Path) -> None:
    write_new_model(tmp_path, train_tree.SHAPE, seed=0)
    trainer = make_trainer(tmp_path)
    tree, rows = train_tree.as_tree(40, 3, 8), train_tree.as_rows(40, 3, 8)
    assert tree.targets == sum(row.targets for row in rows)
    assert train_tree.gradient_error(trainer, tree, rows) < 1e-5


@pytest.mark.full
def test_the_figures_reach_their_aims() -> None:
    figures = train_tree.run()
    assert figures["max_gradient_error"].value < 1e-5
    assert figures["speedup"].value > 2.5
