"""Demonstrations at rest, supervised micro-steps, and replay inside an RL step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gyre_hpc.errors import CorruptRecord, MissingInput
from gyre_hpc.training.replay import (
    FILE_NAME,
    Demonstrations,
    Row,
    rows_to_micro_step,
    supervised_micro_steps,
)
from gyre_hpc.training.trainer import Trainer
from gyre_hpc.trajectories.micro_steps import MicroStep
from tests.training.training_cases import (
    WIDE_CLIP,
    gradient_of,
    make_trainer,
    random_tree,
    relative_error,
    same_bits,
)


def rows(count: int = 6) -> list[Row]:
    rng = np.random.default_rng(5)
    lengths = rng.integers(4, 12, count)
    return [
        Row(rng.integers(0, 48, length).astype(np.int32), (rng.random(length) < 0.6).astype(np.uint8))
        for length in lengths
    ]


@pytest.fixture
def demonstrations(tmp_path: Path) -> Path:
    Demonstrations.of(rows()).write(tmp_path / FILE_NAME)
    return tmp_path / FILE_NAME


def test_the_file_gives_back_its_rows(demonstrations: Path) -> None:
    found = Demonstrations.read(demonstrations)
    assert len(found) == 6
    for index, row in enumerate(rows()):
        assert np.array_equal(found.row(index).ids, row.ids) and np.array_equal(
            found.row(index).mask, row.mask
        )


def test_a_draw_depends_on_its_seed_alone_and_holds_enough_tokens(demonstrations: Path) -> None:
    found = Demonstrations.read(demonstrations)
    first, again, other = (found.draw(15, seed) for seed in ((1, 7), (1, 7), (1, 8)))
    assert [row.ids.tolist() for row in first] == [row.ids.tolist() for row in again]
    assert [row.ids.tolist() for row in first] != [row.ids.tolist() for row in other]
    sizes = [len(row.ids) for row in first]
    assert sum(sizes) >= 15 > sum(sizes[:-1])
    assert len(found.draw(10**6, (0,))) == 6


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(MissingInput, match=FILE_NAME):
        Demonstrations.read(tmp_path / FILE_NAME)
    (tmp_path / FILE_NAME).write_bytes(b"not safetensors")
    with pytest.raises(CorruptRecord, match=FILE_NAME):
        Demonstrations.read(tmp_path / FILE_NAME)
    broken = replace(Demonstrations.of(rows()), offsets=np.array([0, 3], np.int64))
    broken.write(tmp_path / FILE_NAME)
    with pytest.raises(CorruptRecord, match=FILE_NAME):
        Demonstrations.read(tmp_path / FILE_NAME)


def test_a_supervised_micro_step_targets_exactly_the_masked_tokens() -> None:
    row = Row(np.array([9, 8, 7, 6], np.int32), np.array([1, 0, 1, 1], np.uint8))
    step = rows_to_micro_step([row, row], 0.5)
    step.validate()
    assert step.row.tolist() == [1, 2, 5, 6] and step.target.tolist() == [7, 6, 7, 6]
    assert np.isnan(step.behaviour_logprob).all() and set(step.weight.tolist()) == {0.5}


def test_splitting_supervised_rows_keeps_the_mean(trainer: Trainer) -> None:
    whole = list(supervised_micro_steps(rows(), 2.0, limit=10**6))
    parts = list(supervised_micro_steps(rows(), 2.0, limit=16))
    assert len(whole) == 1 < len(parts)
    assert relative_error(gradient_of(trainer, parts), gradient_of(trainer, whole)) < 1e-5
    loss = sum(trainer.accumulate(part)["loss"] for part in parts)
    sums = trainer.accumulate(whole[0])
    assert loss == pytest.approx(2.0 * sums["supervised_loss"] / sums["supervised"], rel=1e-5)


def step(trainer: Trainer, parts: list[MicroStep]) -> float:
    """One optimizer step on these micro-steps; returns their summed loss."""
    loss = sum(trainer.accumulate(part)["loss"] for part in parts)
    trainer.step(executions=1)
    return loss


def test_supervised_steps_learn_the_demonstrations(model_dir: Path) -> None:
    trainer = make_trainer(model_dir)
    parts = list(supervised_micro_steps(rows(), 1.0, limit=32))
    trainer.set_learning_rate(0.02)
    losses = [step(trainer, parts) for _ in range(8)]
    assert losses[-1] < 0.5 * losses[0]


def test_an_rl_step_adds_the_replay_gradient_after_scaling(model_dir: Path, demonstrations: Path) -> None:
    objective = replace(WIDE_CLIP, replay_weight=0.3, replay_tokens=20)
    mixed = Trainer(model_dir, make_trainer(model_dir).config, objective, replay=demonstrations, seed=4)
    by_hand = make_trainer(model_dir)
    step = random_tree(1).as_forest()
    mixed.accumulate(step)
    metrics = mixed.step(executions=4, version=9)
    rl = gradient_of(by_hand, [step])
    drawn = Demonstrations.read(demonstrations).draw(20, (4, 9))
    by_hand.add({name: array * np.float32(0.25) for name, array in rl.items()})
    for part in supervised_micro_steps(drawn, 0.3, limit=4096):
        by_hand.accumulate(part)
    expected = by_hand.step(executions=1)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-6)
    assert metrics["replay_tokens"] == sum(len(row.ids) for row in drawn)
    assert same_bits(mixed.weights(), by_hand.weights())


def test_replay_without_a_file_is_refused_at_the_start(model_dir: Path) -> None:
    with pytest.raises(MissingInput, match=FILE_NAME):
        make_trainer(model_dir, replace(WIDE_CLIP, replay_weight=0.1, replay_tokens=10))
