"""Shape of a Qwen3-architecture dense model, read from a Hugging Face config.json. Needs no torch.

Trainer and engine read it here, so that what one trains the other serves. Only dense Qwen3 is accepted: a config that asks
for anything that they do not compute is refused by its key.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from gyre_hpc.errors import ConfigError, MissingInput


@dataclass(frozen=True)
class ModelShape:
    """Sizes under the names of transformers' Qwen3Config."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...] = ()

    @property
    def kv_width(self) -> int:
        """Floats of keys and values of one token in one layer."""
        return 2 * self.num_key_value_heads * self.head_dim

    @property
    def float32_bytes(self) -> int:
        """Bytes of all weights, or of their gradient, in float32."""
        return 4 * sum(math.prod(sizes) for sizes in self.tensor_shapes().values())

    def layout_digest(self, page_tokens: int) -> bytes:
        """Identity of a KV page's bytes: two engines may share pages only if theirs are equal."""
        sizes = (
            self.num_hidden_layers,
            self.num_key_value_heads,
            self.head_dim,
            self.rope_theta,
            page_tokens,
        )
        return hashlib.sha256(f"qwen3|float32|{sizes}".encode()).digest()

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of Qwen3ForCausalLM by name."""
        hidden, inner, head = self.hidden_size, self.intermediate_size, self.head_dim
        queries, keys = self.num_attention_heads * head, self.num_key_value_heads * head
        layer = {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "self_attn.q_norm": (head,),
            "self_attn.k_norm": (head,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for index in range(self.num_hidden_layers):
            shapes |= {f"model.layers.{index}.{name}.weight": size for name, size in layer.items()}
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes


def read_shape(folder: Path) -> ModelShape:
    """Shape of the model in `folder`. Raises MissingInput, or ConfigError naming the file and the key."""
    file = folder / "config.json"
    if not file.is_file():
        raise MissingInput(
            f"{file}: no such file", fix="name a model folder in Hugging Face layout (model.path)"
        )
    try:
        raw = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        _refuse_unsupported(file, raw)
        return _parse(raw)
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{file}: {type(error).__name__}: {error}", fix="see transformers' Qwen3Config"
        ) from error


def _refuse_unsupported(file: Path, raw: dict[str, Any]) -> None:
    wanted = {
        "model_type": (raw.get("model_type"), "qwen3"),
        "hidden_act": (raw.get("hidden_act", "silu"), "silu"),
        "attention_bias": (raw.get("attention_bias", False), False),
        "use_sliding_window": (raw.get("use_sliding_window", False), False),
        "rope_parameters.rope_type": (
            _rope(raw).get("rope_type", _rope(raw).get("type", "default")),
            "default",
        ),
    }
    for key, (value, supported) in wanted.items():
        if value != supported:
            raise ConfigError(
                f"{file}: {key}={value} is not computed",
                fix=f"use a dense Qwen3 model with {key}={supported}",
            )


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` in newer files, `rope_scaling` in older ones."""
    return raw.get("rope_parameters") or raw.get("rope_scaling") or {}


def _parse(raw: dict[str, Any]) -> ModelShape:
    heads = int(raw["num_attention_heads"])
    eos = raw.get("eos_token_id")
    return ModelShape(
        vocab_size=int(raw["vocab_size"]),
        hidden_size=int(raw["hidden_size"]),
        num_hidden_layers=int(raw["num_hidden_layers"]),
        num_attention_heads=heads,
        num_key_value_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or int(raw["hidden_size"]) // heads),
        intermediate_size=int(raw["intermediate_size"]),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=float(_rope(raw).get("rope_theta", raw.get("rope_theta", 10000.0))),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
    )
