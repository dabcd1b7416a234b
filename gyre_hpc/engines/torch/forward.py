"""The same model as a plain differentiable function of its Hugging Face tensors: no cache, no batching tricks.

For tests and tools that need logits or gradients of a small Qwen3 without transformers; the engine does not use it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from gyre_hpc.models.shape import ModelShape


def forward_logits(weights: Mapping[str, Tensor], shape: ModelShape, ids: Tensor) -> Tensor:
    """Causal logits [batch, tokens, vocabulary] of `ids` [batch, tokens], padded on the right."""
    head, tokens = shape.head_dim, ids.shape[1]
    powers = torch.arange(0, head, 2, dtype=torch.float32) / head
    angles = torch.outer(torch.arange(tokens, dtype=torch.float32), 1.0 / shape.rope_theta**powers)
    cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()

    def norm(values: Tensor, name: str) -> Tensor:
        return F.rms_norm(values, (values.shape[-1],), weights[f"{name}.weight"], shape.rms_norm_eps)

    def project(values: Tensor, name: str) -> Tensor:
        return F.linear(values, weights[f"{name}.weight"])

    def heads(values: Tensor) -> Tensor:
        return values.view(*values.shape[:2], -1, head).transpose(1, 2)

    def rotate(values: Tensor) -> Tensor:
        low, high = values.chunk(2, -1)
        return values * cos + torch.cat((-high, low), -1) * sin

    hidden = F.embedding(ids, weights["model.embed_tokens.weight"])
    for index in range(shape.num_hidden_layers):
        block = f"model.layers.{index}"
        attention = f"{block}.self_attn"
        seen = norm(hidden, f"{block}.input_layernorm")
        queries = rotate(norm(heads(project(seen, f"{attention}.q_proj")), f"{attention}.q_norm"))
        keys = rotate(norm(heads(project(seen, f"{attention}.k_proj")), f"{attention}.k_norm"))
        values = heads(project(seen, f"{attention}.v_proj"))
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        hidden = hidden + project(mixed.transpose(1, 2).flatten(2), f"{attention}.o_proj")
        seen = norm(hidden, f"{block}.post_attention_layernorm")
        inner = F.silu(project(seen, f"{block}.mlp.gate_proj")) * project(seen, f"{block}.mlp.up_proj")
        hidden = hidden + project(inner, f"{block}.mlp.down_proj")
    return project(
        norm(hidden, "model.norm"), "model.embed_tokens" if shape.tie_word_embeddings else "lm_head"
    )
