"""A tiny Qwen3 that thinks, speaks and calls tools, from weights that are written down instead of learned.

The hidden size exceeds the vocabulary, so an embedding is one-hot and the head a table of what may follow a token:
`<think>` at least four letters `</think>`, at least four letters of another alphabet, then one tool call or more whose
argument has at least four digits, then the end. Random attention and MLP weights make every log-probability depend on
the whole context (by a factor of some e^0.5), so that a token lost or doubled in the past shows.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gyre_hpc.engines.weights import Array, write_weights
from gyre_hpc.models.shape import read_shape

from ..conftest import SPECIALS

OPENING, CLOSING = '{"name": "bash", "arguments": {"command": "', '"}}'
"""A call to the tool `bash` around its command; one token each."""
LIKELY, UNLIKELY = 3.0, -15.0
"""Logit of what may follow, and of everything else: e^-18 of the mass per token goes astray, while both stay small enough
for float32 to keep log-probabilities within a few 1e-6."""
GROUPS = 4
"""Letters of a part come from this many groups in turn: none has fewer letters than that."""
END_LOGIT = 0.5
"""How much more likely the end of a part is than each of its letters."""


def write_speaking_model(folder: Path, seed: int = 0) -> Path:
    """A model folder in Hugging Face layout: config, tokenizer, weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab_size()
    hidden = -(-vocabulary // 16) * 16
    end = tokenizer.token_to_id("<|im_end|>")
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 32,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "eos_token_id": [end],
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    draw = np.random.default_rng(seed)
    weights: dict[str, Array] = {}
    for name, size in read_shape(folder).tensor_shapes().items():
        values = draw.standard_normal(size) * 0.02 + (1.0 if len(size) == 1 else 0.0)
        weights[name] = values.astype(np.float32)
    (embedding,) = (name for name in weights if "embed_tokens" in name)
    (head,) = (name for name in weights if "lm_head" in name)
    weights[embedding] = np.eye(vocabulary, hidden, dtype=np.float32)
    table = _followers(tokenizer, draw)
    noise = draw.standard_normal(weights[head].shape) * 0.02
    noise[:, :vocabulary] += table.T / np.sqrt(hidden)
    weights[head] = noise.astype(np.float32)
    write_weights(weights, folder)
    return folder


def _tokenizer() -> Tokenizer:
    """Byte-level BPE without merges: one token per byte, and the words of the scaffold."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (OPENING, CLOSING)])
    return tokenizer


def _followers(tokenizer: Tokenizer, draw: np.random.Generator) -> Array:
    """[vocabulary, vocabulary]: logit of each token behind each token."""
    size = tokenizer.get_vocab_size()
    table = np.full((size, size), UNLIKELY, np.float32)

    def follow(before: str, after: str, logit: float = 0.0) -> None:
        table[tokenizer.token_to_id(before), tokenizer.token_to_id(after)] = LIKELY + logit

    table[tokenizer.token_to_id("Ċ"), tokenizer.token_to_id("<think>")] = LIKELY
    for first, letters, last in (
        ("<think>", "abcdefghijklmnop", "</think>"),
        ("</think>", "ABCDEFGHIJKLMNOP", "<tool_call>"),
        (OPENING, "0123456789+-*=<>", CLOSING),
    ):
        groups = [letters[index::GROUPS] for index in range(GROUPS)]
        for before, after in zip([first, *groups[:-1], groups[-1]], [*groups, groups[-1]], strict=True):
            for token in [first] if before == first else before:
                table[tokenizer.token_to_id(token)] = UNLIKELY
                for letter in after:
                    follow(token, letter, float(draw.standard_normal()) * 0.5)
        for letter in groups[-1]:
            follow(letter, last, END_LOGIT)
    for before, afters in {
        "<tool_call>": {OPENING: 0.0},
        CLOSING: {"</tool_call>": 0.0},
        "</tool_call>": {"<|im_end|>": 0.0, "<tool_call>": -2.0},
    }.items():
        table[tokenizer.token_to_id(before)] = UNLIKELY
        for after, logit in afters.items():
            follow(before, after, logit)
    return table
