"""Hugging Face names <-> megatron-core names for Qwen3-dense weights; the round trip is exact, bit for bit.

Megatron packs q, k and v of one query group as rows `[q heads of the group..., k, v]` and gate and up as `[gate; up]`.
The local layer spec keeps the two layer norms as modules; Transformer Engine fuses them into the next linear layer:
both name sets are understood. Everything here is a pure function on tensors of the whole (not sharded) model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from gyre_hpc.errors import MissingInput
from gyre_hpc.models.shape import ModelShape

Tensors = dict[str, torch.Tensor]

_PLAIN = {
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
    "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
    "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
    "mlp.down_proj.weight": "mlp.linear_fc2.weight",
}
"""Layer tensors that only change their name (HF -> Megatron, local spec)."""
_FUSED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""Local-spec name -> Transformer Engine name, inside a layer."""
_TOP = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
}


def read_hf_folder(folder: Path) -> Tensors:
    """All weights of a model folder as float32. Raises MissingInput naming the folder."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise MissingInput(
            f"{folder}: no model*.safetensors", fix="name a model folder in Hugging Face layout (model.path)"
        )
    tensors: Tensors = {}
    for file in files:
        with safe_open(file, framework="pt") as handle:
            tensors |= {name: handle.get_tensor(name).float() for name in handle.keys()}  # noqa: SIM118
    return tensors


def hf_to_megatron(weights: Mapping[str, torch.Tensor], shape: ModelShape, *, fused: bool = False) -> Tensors:
    """Megatron state of the whole model. `fused` selects the Transformer Engine names."""
    missing = [name for name in hf_names(shape) if name not in weights]
    if missing:
        raise MissingInput(
            f"weights lack {missing[0]} ({len(missing)} names in all)",
            fix="config.json and model.safetensors of the model folder must belong together",
        )
    state = {ours: weights[theirs] for theirs, ours in _TOP.items()}
    if not shape.tie_word_embeddings:
        state["output_layer.weight"] = weights["lm_head.weight"]
    for layer in range(shape.num_hidden_layers):
        state |= _layer_to_megatron(weights, shape, layer)
    return _rename(state, _FUSED) if fused else state


def megatron_to_hf(state: Mapping[str, torch.Tensor], shape: ModelShape) -> Tensors:
    """Hugging Face weights from a Megatron state with local-spec or Transformer Engine names."""
    state = _rename(state, {fused: local for local, fused in _FUSED.items()})
    weights = {theirs: state[ours] for theirs, ours in _TOP.items()}
    if not shape.tie_word_embeddings:
        weights["lm_head.weight"] = state["output_layer.weight"]
    for layer in range(shape.num_hidden_layers):
        weights |= _layer_to_hf(state, shape, layer)
    return weights


def hf_names(shape: ModelShape) -> list[str]:
    """Every tensor name of the model in Hugging Face layout."""
    inner = [
        *_PLAIN,
        *(f"self_attn.{x}_proj.weight" for x in "qkv"),
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
    ]
    names = [
        *_TOP,
        *(f"model.layers.{layer}.{name}" for layer in range(shape.num_hidden_layers) for name in inner),
    ]
    return names if shape.tie_word_embeddings else [*names, "lm_head.weight"]


def _layer_to_megatron(weights: Mapping[str, torch.Tensor], shape: ModelShape, layer: int) -> Tensors:
    theirs, ours = f"model.layers.{layer}.", f"decoder.layers.{layer}."
    state = {ours + new: weights[theirs + old] for old, new in _PLAIN.items()}
    groups, width = shape.num_key_value_heads, shape.hidden_size
    qkv = [
        weights[f"{theirs}self_attn.{x}_proj.weight"].reshape(groups, -1, shape.head_dim, width)
        for x in "qkv"
    ]
    state[ours + "self_attention.linear_qkv.weight"] = torch.cat(qkv, 1).reshape(-1, width)
    gate, up = weights[theirs + "mlp.gate_proj.weight"], weights[theirs + "mlp.up_proj.weight"]
    state[ours + "mlp.linear_fc1.weight"] = torch.cat([gate, up])
    return state


def _layer_to_hf(state: Mapping[str, torch.Tensor], shape: ModelShape, layer: int) -> Tensors:
    theirs, ours = f"model.layers.{layer}.", f"decoder.layers.{layer}."
    weights = {theirs + old: state[ours + new] for old, new in _PLAIN.items()}
    per_group, width = shape.num_attention_heads // shape.num_key_value_heads, shape.hidden_size
    qkv = state[ours + "self_attention.linear_qkv.weight"].reshape(
        shape.num_key_value_heads, per_group + 2, shape.head_dim, width
    )
    for name, part in zip("qkv", torch.split(qkv, [per_group, 1, 1], dim=1), strict=True):
        weights[f"{theirs}self_attn.{name}_proj.weight"] = part.reshape(-1, width)
    gate, up = state[ours + "mlp.linear_fc1.weight"].chunk(2, 0)
    weights[theirs + "mlp.gate_proj.weight"], weights[theirs + "mlp.up_proj.weight"] = gate, up
    return weights


def _rename(state: Mapping[str, torch.Tensor], names: Mapping[str, str]) -> Tensors:
    def renamed(key: str) -> str:
        match = re.fullmatch(r"(decoder\.layers\.\d+\.)(.+)", key)
        return match[1] + names.get(match[2], match[2]) if match else key

    return {renamed(key): tensor for key, tensor in state.items()}
