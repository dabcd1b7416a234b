"""Weights cross between Hugging Face and Megatron names without losing a bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gyre_hpc.errors import ConfigError, MissingInput
from gyre_hpc.models.shape import read_shape
from gyre_hpc.training.hf_weights import (
    hf_names,
    hf_to_megatron,
    megatron_to_hf,
    read_hf_folder,
)
from tests.training.training_cases import SHAPE, make_model


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_the_round_trip_is_exact(tmp_path: Path, tied: bool, fused: bool) -> None:
    shape = replace(SHAPE, tie_word_embeddings=tied)
    weights = read_hf_folder(make_model(tmp_path / "m", shape))
    state = hf_to_megatron(weights, shape, fused=fused)
    assert ("decoder.layers.1.mlp.linear_fc1.layer_norm_weight" in state) == fused
    back = megatron_to_hf(state, shape)
    assert back.keys() == weights.keys() == set(hf_names(shape))
    assert all(torch.equal(back[name], weights[name]) for name in weights)


def test_a_missing_tensor_is_named() -> None:
    with pytest.raises(MissingInput, match=r"model\.embed_tokens\.weight"):
        hf_to_megatron({}, SHAPE)


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingInput, match=str(tmp_path)):
        read_hf_folder(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        '"model_type": "llama"',
        '"hidden_act": "gelu"',
        '"rope_scaling": {"rope_type": "yarn"}',
        '"attention_bias": true',
    ],
)
def test_a_config_the_model_does_not_compute_is_refused(tmp_path: Path, change: str) -> None:
    text = (make_model(tmp_path) / "config.json").read_text().replace('"rope_parameters"', '"unused"')
    key = change.split(":")[0]
    kept = [line for line in text.splitlines() if not line.strip().startswith(key)]
    kept[0] += f"\n  {change},"
    (tmp_path / "config.json").write_text("\n".join(kept))
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_shape(tmp_path)


def test_an_absent_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingInput, match=r"config\.json"):
        read_shape(tmp_path)
