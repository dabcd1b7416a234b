from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gyre_hpc.config_engine import SglangConfig
from gyre_hpc.engines.sglang.weights_checksum import (
    as_bytes,
    expected_checksum,
    gpu_hash,
    rank_parameters,
    require_confirmable,
)
from gyre_hpc.engines.weights import Array, read_weights
from gyre_hpc.errors import ConfigError, MissingInput

M32 = 0xFFFFFFFF
LAYER = "model.layers.0"


def reference_gpu_hash(data: bytes) -> int:
    """gpu_tensor_hash of SGLang 0.5.21, word by word in Python's integers."""

    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x85EBCA6B & M32
        x ^= x >> 13
        x = x * 0xC2B2AE35 & M32
        return x ^ x >> 16

    def turned(x: int, by: int) -> int:
        return (x << by | x >> 32 - by) & M32

    words = [int.from_bytes(data[i : i + 4].ljust(4, b"\0"), "little") for i in range(0, len(data), 4)]
    seeds = (0x243F6A88, (0x243F6A88 * 0x9E3779B1 ^ 0xDEADBEEF) & M32)
    total = 0
    for start in range(0, len(words), 8192):
        halves = []
        for factor, by, seed in ((0x27D4EB2D, 15, seeds[0]), (0x165667B1, 13, seeds[1])):
            h = 0
            for i, word in enumerate(words[start : start + 8192], start):
                h = h + mix(word ^ ((i * factor + seed) & M32) ^ turned(i, by)) & M32
            halves.append(mix(h ^ len(words) * 4 & M32))
        total = total + (halves[0] << 32 | halves[1]) & (1 << 64) - 1
    x = total
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & (1 << 64) - 1
    return x ^ x >> 31


def test_weights_that_need_no_padding_are_not_copied() -> None:
    """A large model's would take its memory once more."""
    whole = arrays()
    shards = dict(rank_parameters(whole, 0, 1, 2))
    name = f"{LAYER}.mlp.down_proj.weight"
    assert np.shares_memory(shards[name], whole[name])


@given(st.binary(min_size=1, max_size=300))
def test_the_hash_of_a_gpu_is_worked_out_without_one(data: bytes) -> None:
    assert gpu_hash(data) == reference_gpu_hash(data)


@pytest.mark.parametrize("words", [8192, 8192 + 100, 16 * 8192, 33 * 8192 + 1])
def test_a_tensor_of_several_tiles_is_hashed_tile_by_tile(words: int) -> None:
    """Several tiles at once, and several such blocks in threads."""
    data = np.random.default_rng(0).bytes(4 * words - 1)
    assert gpu_hash(data) == reference_gpu_hash(data)


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=50))
def test_half_precision_is_rounded_as_torch_rounds(values: list[float]) -> None:
    array = np.array(values, dtype=np.float32)
    ours = np.frombuffer(as_bytes(array, "bfloat16"), np.uint16)
    theirs = torch.from_numpy(array).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert (ours == theirs).all()


def arrays(heads: int = 4, kv_heads: int = 2) -> dict[str, Array]:
    draw = np.random.default_rng(1)
    sizes = {
        "model.embed_tokens.weight": (97, 8),
        f"{LAYER}.self_attn.q_proj.weight": (heads * 4, 8),
        f"{LAYER}.self_attn.k_proj.weight": (kv_heads * 4, 8),
        f"{LAYER}.self_attn.v_proj.weight": (kv_heads * 4, 8),
        f"{LAYER}.self_attn.o_proj.weight": (8, heads * 4),
        f"{LAYER}.mlp.gate_proj.weight": (12, 8),
        f"{LAYER}.mlp.up_proj.weight": (12, 8),
        f"{LAYER}.mlp.down_proj.weight": (8, 12),
        "model.norm.weight": (8,),
    }
    return {name: draw.standard_normal(size).astype(np.float32) for name, size in sizes.items()}


def test_projections_are_joined_and_embeddings_padded() -> None:
    whole = arrays()
    joined = dict(rank_parameters(whole, 0, 1, 2))
    assert set(joined) == {
        "model.embed_tokens.weight",
        f"{LAYER}.self_attn.qkv_proj.weight",
        f"{LAYER}.self_attn.o_proj.weight",
        f"{LAYER}.mlp.gate_up_proj.weight",
        f"{LAYER}.mlp.down_proj.weight",
        "model.norm.weight",
    }
    assert joined["model.embed_tokens.weight"].shape == (128, 8)
    assert not joined["model.embed_tokens.weight"][97:].any()
    parts = [whole[f"{LAYER}.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert (joined[f"{LAYER}.self_attn.qkv_proj.weight"] == np.concatenate(parts)).all()


def test_on_a_cpu_the_mlp_is_widened_with_zeros() -> None:
    widened = dict(rank_parameters(arrays(), 0, 1, 2, 32))
    both = widened[f"{LAYER}.mlp.gate_up_proj.weight"]
    assert both.shape == (64, 8)
    assert not both[12:32].any() and not both[44:].any()
    assert widened[f"{LAYER}.mlp.down_proj.weight"].shape == (8, 32)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_ranks_hold_everything_and_few_kv_heads_are_repeated(ranks: int) -> None:
    whole = arrays()
    shards = [dict(rank_parameters(whole, rank, ranks, 2)) for rank in range(ranks)]
    down = np.concatenate([shard[f"{LAYER}.mlp.down_proj.weight"] for shard in shards], axis=1)
    assert (down == whole[f"{LAYER}.mlp.down_proj.weight"]).all()
    name = f"{LAYER}.self_attn.qkv_proj.weight"
    queries = 16 // ranks
    assert (
        np.concatenate([shard[name][:queries] for shard in shards])
        == whole[f"{LAYER}.self_attn.q_proj.weight"]
    ).all()
    keys = [shard[name][queries : queries + 4] for shard in shards]
    for rank, key in enumerate(keys):
        head = rank * 2 // ranks
        assert (key == whole[f"{LAYER}.self_attn.k_proj.weight"][head * 4 : head * 4 + 4]).all()


def test_one_changed_bit_changes_the_checksum(model: Path) -> None:
    weights = read_weights(model)
    config = SglangConfig(device="cpu")
    before = expected_checksum(weights, config, model, "float32")
    name = next(name for name in weights if "k_proj" in name)
    changed = weights[name].copy()
    changed.reshape(-1).view(np.uint32)[0] ^= 1
    assert expected_checksum({**weights, name: changed}, config, model, "float32") != before
    assert expected_checksum(weights, SglangConfig(), model, "float32") != before


def test_a_model_that_cannot_be_confirmed_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3MoeForCausalLM"]}))
    with pytest.raises(ConfigError, match="cannot be confirmed"):
        require_confirmable(tmp_path)
    with pytest.raises(MissingInput, match=r"config\.json"):
        require_confirmable(tmp_path / "nowhere")
    require_confirmable(model)
