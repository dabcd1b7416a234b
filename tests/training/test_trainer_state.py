"""Steps, checkpoints and memory: a resumed trainer continues exactly, and an open gradient is never lost silently."""

from __future__ import annotations

import errno
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from gyre_hpc.errors import (
    ConfigError,
    CorruptRecord,
    GyreError,
    IllegalTransition,
    MissingInput,
    StorageFull,
)
from gyre_hpc.training import checkpoints
from gyre_hpc.training.trainer import Trainer
from tests.training.training_cases import make_trainer, random_tree, same_bits


def advance(trainer: Trainer, number: int) -> dict[str, float]:
    trainer.accumulate(random_tree(number).as_forest())
    return trainer.step(executions=3)


def test_a_resumed_trainer_continues_bit_for_bit(model_dir: Path, tmp_path: Path) -> None:
    steady = make_trainer(model_dir, warmup_steps=4)
    for number in range(2):
        advance(steady, number)
    steady.save_checkpoint(tmp_path / "v000007", 7)
    resumed = make_trainer(model_dir, warmup_steps=4)
    assert resumed.load_checkpoint(tmp_path / "v000007") == 7
    assert same_bits(resumed.weights(), steady.weights())
    for number in range(2, 4):
        assert advance(resumed, number) == advance(steady, number)
        assert same_bits(resumed.weights(), steady.weights())


def test_a_stepped_trainer_can_go_back_to_a_checkpoint(model_dir: Path, tmp_path: Path) -> None:
    trainer = make_trainer(model_dir)
    trainer.save_checkpoint(tmp_path / "v0", 0)
    first = advance(trainer, 0)
    after = trainer.weights()
    trainer.load_checkpoint(tmp_path / "v0")
    assert advance(trainer, 0) == first
    assert same_bits(trainer.weights(), after)


def test_a_checkpoint_replaces_its_namesake_and_leaves_nothing_else(trainer: Trainer, tmp_path: Path) -> None:
    for version in (1, 2):
        trainer.save_checkpoint(tmp_path / "v", version)
    assert checkpoints.read_header(tmp_path / "v").version == 2
    assert [path.name for path in tmp_path.iterdir()] == ["v"]


def test_tokenizer_files_travel_and_demonstrations_do_not(model_dir: Path, tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(model_dir, folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "demonstrations.json").write_text("{}")
    make_trainer(folder).save_checkpoint(tmp_path / "v", 1)
    names = {path.name for path in (tmp_path / "v").iterdir()}
    assert names == {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        "optimizer.safetensors",
        "trainer.json",
    }


def test_a_full_disk_is_named_and_leaves_no_half_checkpoint(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints, "save_file", full)
    with pytest.raises(StorageFull, match="v000001"):
        trainer.save_checkpoint(tmp_path / "v000001", 1)
    assert list(tmp_path.iterdir()) == []


def test_damaged_or_foreign_checkpoints_are_refused(trainer: Trainer, tmp_path: Path) -> None:
    with pytest.raises(MissingInput, match=r"trainer\.json"):
        trainer.load_checkpoint(tmp_path)
    trainer.save_checkpoint(tmp_path / "v", 1)
    whole = (tmp_path / "v" / "optimizer.safetensors").read_bytes()
    (tmp_path / "v" / "optimizer.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CorruptRecord, match=r"optimizer\.safetensors"):
        trainer.load_checkpoint(tmp_path / "v")
    (tmp_path / "v" / "trainer.json").write_text('{"version":1,"step":0,"layout":"other"}')
    with pytest.raises(CorruptRecord, match="layout"):
        trainer.load_checkpoint(tmp_path / "v")


def test_an_open_gradient_blocks_everything_that_would_lose_it(trainer: Trainer, tmp_path: Path) -> None:
    trainer.accumulate(random_tree(0).as_forest())
    assert trainer.has_gradient
    for action in (
        trainer.offload,
        lambda: trainer.load_weights(trainer.weights()),
        lambda: trainer.save_checkpoint(tmp_path / "v", 1),
        lambda: trainer.load_checkpoint(tmp_path / "v"),
    ):
        with pytest.raises(IllegalTransition, match="open gradient"):
            action()
    trainer.clear()
    trainer.offload()
    trainer.restore()


def test_an_offloaded_trainer_refuses_work_until_restored(trainer: Trainer) -> None:
    trainer.offload()
    with pytest.raises(IllegalTransition, match="restore"):
        trainer.accumulate(random_tree(0).as_forest())
    with pytest.raises(IllegalTransition, match="restore"):
        trainer.weights()
    trainer.restore()
    trainer.accumulate(random_tree(0).as_forest())


def test_a_step_without_gradient_is_refused(trainer: Trainer) -> None:
    with pytest.raises(IllegalTransition, match="no gradient"):
        trainer.step(executions=1)


def test_a_non_finite_gradient_leaves_the_weights_alone(model_dir: Path) -> None:
    trainer = make_trainer(model_dir)
    before = trainer.weights()
    trainer.add({name: np.full_like(array, np.nan) for name, array in trainer.gradient().items()})
    with pytest.raises(GyreError, match="optimizer step 1"):
        trainer.step(executions=1)
    assert same_bits(trainer.weights(), before)


def test_the_gradient_is_scaled_once_and_clipped_by_its_global_norm(model_dir: Path) -> None:
    one, many, loose = (
        make_trainer(model_dir),
        make_trainer(model_dir),
        make_trainer(model_dir, clip_grad=0.0),
    )
    step = random_tree(2).as_forest()
    norms = []
    for trainer, executions in ((one, 1), (many, 8), (loose, 1)):
        trainer.accumulate(step)
        flat = trainer.gradient()["dense.0"]
        expected = math.sqrt(float(np.square(flat.astype(np.float64)).sum())) / executions
        norms.append(trainer.step(executions)["grad_norm"])
        assert norms[-1] == pytest.approx(expected, rel=1e-6)
        assert not trainer.has_gradient
    assert norms[0] == pytest.approx(8 * norms[1], rel=1e-5)


def test_the_learning_rate_warms_up_and_can_be_set(model_dir: Path) -> None:
    trainer = make_trainer(model_dir, warmup_steps=2)
    rates = [advance(trainer, number)["learning_rate"] for number in range(3)]
    assert rates == pytest.approx([0.005, 0.01, 0.01])
    trainer.set_learning_rate(0.002)
    assert advance(trainer, 3)["learning_rate"] == pytest.approx(0.002)


def test_the_update_is_adam_with_decoupled_decay_off_the_norms(model_dir: Path) -> None:
    trainer = make_trainer(model_dir, weight_decay=0.1, clip_grad=0.0)
    before = trainer.weights()
    trainer.accumulate(random_tree(0).as_forest())
    trainer.step(executions=1)
    after, norm = trainer.weights(), "model.norm.weight"
    assert np.abs(np.abs(after[norm] - before[norm]) - 1e-2).max() < 1e-4
    gate = "model.layers.0.mlp.gate_proj.weight"
    moved = after[gate] - before[gate] * (1 - 1e-2 * 0.1)
    assert np.median(np.abs(np.abs(moved) - 1e-2)) < 1e-4


def test_tensor_parallel_above_one_is_refused_by_key(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.tensor_parallel=2"):
        make_trainer(model_dir, tensor_parallel=2)


class OnDevice:
    """A buffer or optimizer of Megatron on a device; tells what is done with it."""

    def __init__(self, told: list[str]) -> None:
        self._told = told

    def offload_to_cpu(self) -> None:
        self._told.append("buffer")

    def offload(self) -> None:
        self._told.append("moments")


def test_off_loaded_memory_goes_back_to_the_device_for_the_engine_beside(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch keeps what is freed for itself: another process would not get it."""
    told: list[str] = []
    monkeypatch.setattr(trainer, "_buffers", {"dense.0": OnDevice(told)})
    monkeypatch.setattr(trainer, "_optimizer", OnDevice(told))
    monkeypatch.setattr(trainer, "_offloaded", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: told.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: told.append("give back"))
    trainer.offload()
    trainer.offload()
    assert told == ["buffer", "moments", "synchronize", "give back"]
