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
    tensor_parallel_shard,
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


def test_tensor_parallel_shards_cut_whole_heads_and_both_halves_of_the_gate(model_dir: Path) -> None:
    state = hf_to_megatron(read_hf_folder(model_dir), SHAPE)
    halves = [tensor_parallel_shard(state, rank, 2) for rank in range(2)]
    whole = megatron_to_hf(state, SHAPE)
    half = replace(SHAPE, num_attention_heads=2, num_key_value_heads=1, intermediate_size=32, vocab_size=24)
    parts = [megatron_to_hf(shard, half) for shard in halves]
    for name, dim in (("q_proj", 0), ("k_proj", 0), ("o_proj", 1)):
        key = f"model.layers.0.self_attn.{name}.weight"
        assert torch.equal(torch.cat([part[key] for part in parts], dim), whole[key])
    for name, dim in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
        key = f"model.layers.1.mlp.{name}.weight"
        assert torch.equal(torch.cat([part[key] for part in parts], dim), whole[key])
    key = "model.embed_tokens.weight"
    assert torch.equal(torch.cat([part[key] for part in parts]), whole[key])


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
