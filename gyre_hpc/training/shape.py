"""The architecture numbers of a policy, read from its Hugging Face config.json. Needs no torch.

Only Qwen3 dense is accepted; a config that asks for anything the model does not compute is refused by key.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from gyre_hpc.errors import ConfigError, MissingInput


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one dense transformer."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    query_groups: int
    head_dim: int
    vocab: int
    norm_eps: float
    rope_base: float
    tied: bool

    @staticmethod
    def read(folder: Path) -> ModelShape:
        """From FOLDER/config.json. Raises MissingInput or ConfigError naming the file and key."""
        path = folder / "config.json"
        if not path.is_file():
            raise MissingInput(
                f"{path}: no such file", fix="name a model folder in Hugging Face layout (model.path)"
            )
        return _parse(msgspec.json.decode(path.read_bytes(), type=dict[str, Any]), path)


_REQUIRED: dict[str, object] = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
}
"""Keys whose value, where present, must be exactly this."""


def _parse(config: dict[str, Any], path: Path) -> ModelShape:
    for key, wanted in _REQUIRED.items():
        if config.get(key, wanted) != wanted:
            raise ConfigError(
                f"{path}: {key}={config[key]!r}, the trainer computes {wanted!r} only",
                fix="use a dense Qwen3 model",
            )
    try:
        heads = int(config["num_attention_heads"])
        return ModelShape(
            layers=int(config["num_hidden_layers"]),
            hidden=int(config["hidden_size"]),
            ffn=int(config["intermediate_size"]),
            heads=heads,
            query_groups=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            vocab=int(config["vocab_size"]),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_base=_rope_base(config, path),
            tied=bool(config.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        raise ConfigError(f"{path}: key {error} is missing", fix="use the model's own config.json") from error


def _rope_base(config: dict[str, Any], path: Path) -> float:
    """`rope_parameters` (newer layout) or `rope_theta`; scaled variants are refused."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ConfigError(f"{path}: rope type {kind!r} is not supported", fix="use a model with plain RoPE")
    return float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
