"""A freshly initialised Qwen3-dense policy in Hugging Face layout: where a warm start, a test or a benchmark begins."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from gyre_hpc.models.shape import ModelShape
from gyre_hpc.training.hf_weights import Tensors, hf_names


def write_new_model(
    folder: Path, shape: ModelShape, seed: int, *, context: int = 32768, std: float = 0.02
) -> None:
    """Write config.json and model.safetensors (float32). `context` is the longest position the config declares."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(_config(shape, context))))
    save_file(_weights(shape, seed, std), folder / "model.safetensors", metadata={"format": "pt"})


def _weights(shape: ModelShape, seed: int, std: float) -> Tensors:
    """Normal with `std`; projections into the residual stream scaled by 1/sqrt(2 layers); norms 1."""
    generator = torch.Generator().manual_seed(seed)
    residual = std / math.sqrt(2 * shape.num_hidden_layers)
    weights: Tensors = {}
    sizes = shape.tensor_shapes()
    for name in hf_names(shape):
        size = sizes[name]
        if len(size) == 1:
            weights[name] = torch.ones(size)
        else:
            scale = residual if name.endswith(("o_proj.weight", "down_proj.weight")) else std
            weights[name] = torch.randn(size, generator=generator) * scale
    return weights


def _config(shape: ModelShape, context: int) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "float32",
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "max_position_embeddings": context,
        "tie_word_embeddings": shape.tie_word_embeddings,
    }
