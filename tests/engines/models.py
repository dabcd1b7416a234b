"""Tiny random Qwen3 models on disk, and the log-probs transformers gives them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from gyre_hpc.engines.torch.batching import Batcher
from gyre_hpc.engines.torch.calls import Call
from gyre_hpc.engines.torch.model import Qwen3
from gyre_hpc.engines.weights import Array, read_weights, write_weights
from gyre_hpc.models.shape import read_shape

torch.set_num_threads(1)

PAGE = 8
VOCABULARY = 97


def write_model(
    folder: Path,
    *,
    seed: int,
    tied: bool = True,
    heads: int = 3,
    kv_heads: int = 1,
    layers: int = 2,
    eos: list[int] | None = None,
    vocabulary: int = VOCABULARY,
) -> Path:
    """A model folder in Hugging Face layout with random weights, far from uniform."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocabulary,
        "hidden_size": 24,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 16,
        "intermediate_size": 40,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "eos_token_id": eos,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    draw = np.random.default_rng(seed)
    weights: dict[str, Array] = {}
    for name, size in read_shape(folder).tensor_shapes().items():
        values = draw.standard_normal(size) * 0.3 + (1.0 if len(size) == 1 else 0.0)
        weights[name] = values.astype(np.float32)
    write_weights(weights, folder)
    return folder


def transformers_logprobs(folder: Path, ids: Sequence[int], prompt_tokens: int) -> Array:
    """Log-probabilities of ids[prompt_tokens:] under transformers' Qwen3ForCausalLM."""
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        table = model(torch.tensor([list(ids)])).logits[0].log_softmax(-1)
    rows = torch.arange(prompt_tokens - 1, len(ids) - 1)
    return table[rows, torch.tensor(list(ids[prompt_tokens:]))].numpy()


def batcher(
    folder: Path,
    *,
    pool_tokens: int = 2048,
    capacity: int = 8,
    max_context: int = 256,
    seed: int = 0,
    prefill_tokens: int = 1024,
    page_tokens: int = PAGE,
) -> Batcher:
    """An engine core over the model in `folder`, serving version "0"."""
    model = Qwen3(read_shape(folder), max_context)
    model.load(read_weights(folder), str(folder))
    return Batcher(
        model,
        page_tokens=page_tokens,
        pool_tokens=pool_tokens,
        capacity=capacity,
        max_context=max_context,
        version="0",
        seed=seed,
        prefill_tokens=prefill_tokens,
    )


def run(engine: Batcher, *calls: Call) -> None:
    """Submit the calls and step until every call has ended."""
    for call in calls:
        engine.submit(call)
    drain(engine)


def drain(engine: Batcher) -> None:
    """Step until every call has ended; more steps than tokens mean it is stuck."""
    limit = 50 * sum(call.max_new_tokens + len(call.ids) for call in engine.calls()) + 50
    while engine.calls():
        engine.step()
        limit -= 1
        assert limit, "the engine makes no progress"
