"""The tiny Qwen3 policy in plain torch: rows in, hidden states out, weights under their Hugging Face names.

Only the supervised warm start trains through this forward; runs use the trainer's model and the engine's. A test holds its
logits against `transformers`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from gyre_hpc.training.shape import ModelShape

Weights = dict[str, torch.Tensor]
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN = 96, 3, 3, 1, 32, 288
MAX_POSITIONS = 2048
INIT_STD = 0.046
"""Standard deviation of linear weights at the start, divided by sqrt(2 layers) where they write to the residual."""
EMBEDDING_STD = 0.02


def write_config(folder: Path, vocabulary: int, stop_ids: tuple[int, ...]) -> None:
    """config.json as transformers' Qwen3ForCausalLM reads it."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": FFN,
        "vocab_size": vocabulary,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": MAX_POSITIONS,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "torch_dtype": "float32",
        "eos_token_id": list(stop_ids),
        "pad_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def initial_weights(shape: ModelShape, seed: int) -> Weights:
    """Random weights, a pure function of the seed."""
    draw = torch.Generator().manual_seed(seed)
    residual = INIT_STD / math.sqrt(2 * shape.layers)

    def normal(rows: int, columns: int, std: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=draw) * std

    weights = {"model.embed_tokens.weight": normal(shape.vocab, shape.hidden, EMBEDDING_STD)}
    query, key = shape.heads * shape.head_dim, shape.query_groups * shape.head_dim
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        weights[at + "input_layernorm.weight"] = torch.ones(shape.hidden)
        weights[at + "self_attn.q_proj.weight"] = normal(query, shape.hidden, INIT_STD)
        weights[at + "self_attn.k_proj.weight"] = normal(key, shape.hidden, INIT_STD)
        weights[at + "self_attn.v_proj.weight"] = normal(key, shape.hidden, INIT_STD)
        weights[at + "self_attn.o_proj.weight"] = normal(shape.hidden, query, residual)
        weights[at + "self_attn.q_norm.weight"] = torch.ones(shape.head_dim)
        weights[at + "self_attn.k_norm.weight"] = torch.ones(shape.head_dim)
        weights[at + "post_attention_layernorm.weight"] = torch.ones(shape.hidden)
        weights[at + "mlp.gate_proj.weight"] = normal(shape.ffn, shape.hidden, INIT_STD)
        weights[at + "mlp.up_proj.weight"] = normal(shape.ffn, shape.hidden, INIT_STD)
        weights[at + "mlp.down_proj.weight"] = normal(shape.hidden, shape.ffn, residual)
    weights["model.norm.weight"] = torch.ones(shape.hidden)
    return weights


class Policy:
    """Shape and weights with a differentiable forward over right-padded rows."""

    def __init__(self, shape: ModelShape, weights: Weights) -> None:
        self.shape, self.weights = shape, weights
        frequency = shape.rope_base ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        angle = torch.outer(torch.arange(MAX_POSITIONS).float(), frequency).repeat(1, 2)
        self.cos, self.sin = angle.cos(), angle.sin()

    def hidden(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Final normed states, [B, T, hidden]; position t sees ids 0..t of its row."""
        x = self.weights["model.embed_tokens.weight"][ids_BT]
        for layer in range(self.shape.layers):
            at = f"model.layers.{layer}."
            x = x + self._attention(at + "self_attn.", self._norm(x, at + "input_layernorm"))
            x = x + self._mlp(at + "mlp.", self._norm(x, at + "post_attention_layernorm"))
        return self._norm(x, "model.norm")

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Next-token logits, [..., vocab]."""
        return hidden @ self.weights["model.embed_tokens.weight"].T

    def loss(self, ids_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of the tokens where mask is set (never position 0)."""
        wanted = mask_BT[:, 1:].bool()
        return F.cross_entropy(self.logits(self.hidden(ids_BT[:, :-1])[wanted]), ids_BT[:, 1:][wanted])

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weights[name + ".weight"], self.shape.norm_eps)

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.weights[name + ".weight"])

    def _attention(self, at: str, x_BTH: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x_BTH.shape
        shape = self.shape

        def heads(name: str, count: int) -> torch.Tensor:
            return self._linear(x_BTH, at + name).view(batch, length, count, shape.head_dim)

        q = self._norm(heads("q_proj", shape.heads), at + "q_norm").transpose(1, 2)
        k = self._norm(heads("k_proj", shape.query_groups), at + "k_norm").transpose(1, 2)
        v = heads("v_proj", shape.query_groups).transpose(1, 2)
        y = F.scaled_dot_product_attention(
            self._rotate(q), self._rotate(k), v, is_causal=True, enable_gqa=True
        )
        return self._linear(y.transpose(1, 2).reshape(batch, length, -1), at + "o_proj")

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        length, half = x.shape[-2], x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), -1)
        return x * self.cos[:length] + turned * self.sin[:length]

    def _mlp(self, at: str, x: torch.Tensor) -> torch.Tensor:
        return self._linear(
            F.silu(self._linear(x, at + "gate_proj")) * self._linear(x, at + "up_proj"), at + "down_proj"
        )

    def save(self, folder: Path) -> None:
        """Write model.safetensors."""
        tensors = {name: tensor.detach().contiguous() for name, tensor in self.weights.items()}
        save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})

    @staticmethod
    def load(folder: Path) -> Policy:
        """From config.json and model.safetensors."""
        return Policy(ModelShape.read(folder), load_file(str(folder / "model.safetensors")))
