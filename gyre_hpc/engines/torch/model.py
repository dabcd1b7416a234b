"""Qwen3-architecture dense model: float32 inference over paged KV, tuned for few tensor operations per layer.

At the sizes this engine serves, a step costs what its operations cost to dispatch, not what they compute. So q, k, v
and gate, up are one matrix each, of which the Hugging Face tensors are views: loading copies into the views, and the
digest is taken over the bytes being served. RMS norm is x / hypot(|x|, sqrt(n*eps)), with sqrt(n) folded into its
weight (the same law as x / sqrt(mean(x^2) + eps)).
KV layout: [layer, page * page_tokens, k or v, KV head, head_dim].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gyre_hpc.engines.weights import Array
from gyre_hpc.errors import ConfigError
from gyre_hpc.models.shape import ModelShape

Attend = Callable[[int, Tensor], Tensor]
"""(layer, queries [tokens, heads, head_dim]) -> [tokens, heads * head_dim], over KV already written."""


@dataclass
class _Layer:
    input_norm: Tensor
    qkv: Tensor
    qk_norm: Tensor
    out: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Qwen3:
    """Weights and the forward pass. Not loaded until `load` has run."""

    def __init__(self, shape: ModelShape, max_context: int) -> None:
        self.shape = shape
        self._qk_eps = torch.tensor(math.sqrt(shape.head_dim * shape.rms_norm_eps))
        self._hidden_eps = torch.tensor(math.sqrt(shape.hidden_size * shape.rms_norm_eps))
        self._cos, self._sin = _rope_tables(shape, max_context)
        self.allocate()

    def allocate(self) -> None:
        """Take memory for the weights; they are zero until `load`."""
        self._raw = {name: torch.zeros(size) for name, size in self.shape.tensor_shapes().items()}
        self._layers: list[_Layer] = []
        self._final_norm = torch.empty(0)
        for index in range(self.shape.num_hidden_layers):
            self._fuse(index, "self_attn", ("q_proj", "k_proj", "v_proj"))
            self._fuse(index, "mlp", ("gate_proj", "up_proj"))

    def free(self) -> None:
        """Drop the weights' memory."""
        self._raw.clear()
        self._layers.clear()

    def _fuse(self, index: int, block: str, parts: tuple[str, ...]) -> None:
        """Make the named matrices row ranges of one."""
        names = [f"model.layers.{index}.{block}.{part}.weight" for part in parts]
        fused = torch.cat([self._raw[name] for name in names])
        self._raw |= dict(
            zip(names, torch.split(fused, [len(self._raw[name]) for name in names]), strict=True)
        )
        self._raw[f"model.layers.{index}.{block}"] = fused

    def arrays(self) -> dict[str, Array]:
        """The served tensors under their Hugging Face names, sharing memory."""
        return {name: self._raw[name].numpy() for name in self.shape.tensor_shapes()}

    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(4 * math.prod(size) for size in self.shape.tensor_shapes().values())

    def load(self, arrays: Mapping[str, Array], source: str) -> None:
        """Copy weights in, all or none. Raises ConfigError naming `source` and the first tensor that does not fit."""
        for name, size in self.shape.tensor_shapes().items():
            if name not in arrays or tuple(arrays[name].shape) != size:
                got = f"has shape {tuple(arrays[name].shape)}" if name in arrays else "is missing"
                raise ConfigError(
                    f"{source}: tensor {name} {got}, expected {size}", fix="give weights of this model"
                )
        for name in self.shape.tensor_shapes():
            self._raw[name].copy_(torch.from_numpy(np.array(arrays[name], dtype=np.float32)))
        self._layers = [self._layer(index) for index in range(self.shape.num_hidden_layers)]
        self._final_norm = self._raw["model.norm.weight"] * math.sqrt(self.shape.hidden_size)

    def _layer(self, index: int) -> _Layer:
        shape, raw = self.shape, self._raw
        block = f"model.layers.{index}."
        hidden_scale, head_scale = math.sqrt(shape.hidden_size), math.sqrt(shape.head_dim)
        q_norm, k_norm = raw[block + "self_attn.q_norm.weight"], raw[block + "self_attn.k_norm.weight"]
        norms = [q_norm] * shape.num_attention_heads + [k_norm] * shape.num_key_value_heads
        return _Layer(
            input_norm=raw[block + "input_layernorm.weight"] * hidden_scale,
            qkv=raw[block + "self_attn"],
            qk_norm=torch.stack(norms) * head_scale,
            out=raw[block + "self_attn.o_proj.weight"].t(),
            post_norm=raw[block + "post_attention_layernorm.weight"] * hidden_scale,
            gate_up=raw[block + "mlp"],
            down=raw[block + "mlp.down_proj.weight"].t(),
        )

    def logits(
        self, ids: Tensor, positions: Tensor, slots: Tensor, kv: Tensor, attend: Attend, rows: Tensor | None
    ) -> Tensor:
        """Forward `ids` [tokens], write their KV into `kv` at `slots`, return logits of `rows` (None = all tokens)."""
        shape = self.shape
        tokens, heads, head = len(ids), shape.num_attention_heads + shape.num_key_value_heads, shape.head_dim
        cos, sin = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        half = head // 2
        hidden = self._raw["model.embed_tokens.weight"].index_select(0, ids)
        for index, layer in enumerate(self._layers):
            qkv = F.linear(self._norm(hidden, layer.input_norm), layer.qkv)
            qk = qkv[:, : heads * head].view(tokens, heads, head)
            scale = torch.linalg.vector_norm(qk, dim=-1, keepdim=True)
            normed = (qk / torch.hypot(scale, self._qk_eps)).mul_(layer.qk_norm)
            torch.addcmul(normed * cos, normed.roll(half, -1), sin, out=qk)
            kv[index].index_copy_(0, slots, qkv[:, shape.num_attention_heads * head :])
            hidden = torch.addmm(hidden, attend(index, qk[:, : shape.num_attention_heads]), layer.out)
            gate, up = F.linear(self._norm(hidden, layer.post_norm), layer.gate_up).chunk(2, -1)
            hidden = torch.addmm(hidden, F.silu(gate).mul_(up), layer.down)
        if rows is not None:
            hidden = hidden.index_select(0, rows)
        head_name = "model.embed_tokens.weight" if shape.tie_word_embeddings else "lm_head.weight"
        return F.linear(self._norm(hidden, self._final_norm), self._raw[head_name])

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
        return (hidden / torch.hypot(length, self._hidden_eps)).mul_(weight)


def _rope_tables(shape: ModelShape, max_context: int) -> tuple[Tensor, Tensor]:
    """cos and signed sin, [max_context, 1, head_dim]: rotated = x * cos + roll(x, head_dim / 2) * sin."""
    powers = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(max_context, dtype=torch.float32), 1.0 / shape.rope_theta**powers)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]
