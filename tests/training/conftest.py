"""Fixtures of the training tests: one torch thread, one tiny model folder, one trainer per module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gyre_hpc.training.trainer import Trainer
from tests.training.training_cases import make_model, make_trainer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Megatron-core warns about its own internals in every forward pass."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:Warning. tp_group is None:DeprecationWarning"))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "policy")


@pytest.fixture(scope="module")
def shared_trainer(model_dir: Path) -> Trainer:
    return make_trainer(model_dir)


@pytest.fixture
def trainer(shared_trainer: Trainer) -> Iterator[Trainer]:
    """A trainer nobody steps: clear before and after."""
    shared_trainer.clear()
    yield shared_trainer
    shared_trainer.clear()
