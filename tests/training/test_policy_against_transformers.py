"""The Megatron policy computes what transformers' Qwen3ForCausalLM computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gyre_hpc.training.replay import Row, rows_to_micro_step
from gyre_hpc.training.trainer import Trainer
from tests.training.training_cases import (
    SHAPE,
    hf_gradient,
    hf_logits,
    make_model,
    make_trainer,
    random_tree,
    relative_error,
)

transformers = pytest.importorskip("transformers")


def load(folder: Path) -> torch.nn.Module:
    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager"
    )
    return model


def row_logits(trainer: Trainer, ids: np.ndarray) -> torch.Tensor:
    step = rows_to_micro_step([Row(ids, np.ones(len(ids), np.uint8))], 1.0)
    trainer._policy.context.set(
        step.tin, step.tout, step.pos, np.arange(len(ids), dtype=np.int32), torch.device("cpu")
    )
    return trainer._policy.logits(torch.from_numpy(ids).long())


@pytest.mark.parametrize("tied", [True, False])
def test_logits_and_gradients_equal_those_of_transformers(tmp_path: Path, tied: bool) -> None:
    folder = make_model(tmp_path / "m", replace(SHAPE, tie_word_embeddings=tied))
    trainer, model = make_trainer(folder), load(folder)
    ids = np.random.default_rng(1).integers(0, SHAPE.vocab_size, 70).astype(np.int32)
    expected = hf_logits(model, ids)
    with torch.no_grad():
        assert (row_logits(trainer, ids) - expected).abs().max() < 1e-5
    torch.nn.functional.cross_entropy(
        expected[:-1], torch.from_numpy(ids[1:]).long(), reduction="sum"
    ).backward()
    trainer.accumulate(rows_to_micro_step([Row(ids, np.ones(70, np.uint8))], 1.0))
    theirs = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    assert relative_error(hf_gradient(trainer), theirs) < 1e-5


@pytest.mark.parametrize("seed", range(3))
def test_a_forest_gives_the_policy_gradient_transformers_gives_path_by_path(
    model_dir: Path, seed: int
) -> None:
    tree, model, trainer = random_tree(seed), load(model_dir), make_trainer(model_dir)
    for step in tree.as_cuts():
        logits = hf_logits(model, step.ids)[step.row]
        logprob = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(step.target).long()[:, None])[:, 0]
        difference = logprob.detach() - torch.from_numpy(step.behaviour_logprob)
        advantage, ratio = float(step.advantage[0]), float(difference.mean().exp())
        clipped = (advantage > 0 and ratio > 2.0) or (advantage < 0 and ratio < 0.4)
        if not clipped:
            rho = difference.exp().clamp(max=5.0)
            (-(torch.from_numpy(step.weight) * rho * advantage * logprob).sum()).backward()
    trainer.accumulate(tree.as_forest())
    theirs = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    assert relative_error(hf_gradient(trainer), theirs) < 1e-5


def test_several_steps_follow_torch_adam_on_the_transformers_model(model_dir: Path) -> None:
    trainer, model = make_trainer(model_dir, weight_decay=0.0, clip_grad=0.5), load(model_dir)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
    losses = []
    for number in range(4):
        ids = np.random.default_rng(number).integers(0, SHAPE.vocab_size, 40).astype(np.int32)
        ours = trainer.accumulate(rows_to_micro_step([Row(ids, np.ones(40, np.uint8))], 1 / 39))["loss"]
        norm = trainer.step(executions=1)["grad_norm"]
        adam.zero_grad()
        target = torch.from_numpy(ids[1:]).long()
        theirs = torch.nn.functional.cross_entropy(hf_logits(model, ids)[:-1], target)
        theirs.backward()
        assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)), rel=1e-4)
        adam.step()
        losses.append((ours, theirs.item()))
    for ours, expected in losses:
        assert ours == pytest.approx(expected, rel=1e-5)


def test_a_checkpoint_folder_opens_in_transformers(model_dir: Path, tmp_path: Path) -> None:
    trainer = make_trainer(model_dir)
    trainer.accumulate(random_tree(0).as_forest())
    trainer.step(executions=2)
    trainer.save_checkpoint(tmp_path / "v000001", 1)
    model = load(tmp_path / "v000001")
    ids = np.arange(20, dtype=np.int32)
    with torch.no_grad():
        assert (row_logits(trainer, ids) - hf_logits(model, ids)).abs().max() < 1e-5
    names = {name: tensor.numpy() for name, tensor in model.state_dict().items() if name in trainer.weights()}
    assert all(np.array_equal(names[name], array) for name, array in trainer.weights().items())
