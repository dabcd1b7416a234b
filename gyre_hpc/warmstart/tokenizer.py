"""A small byte-level BPE for the tiny policy, trained on its own demonstrations.

Any text can be encoded (bytes are the base). Merges may span spaces, so a fixed phrase such as the tool block becomes a few
tokens; what a model has to decide or copy (a module's name, a digit, an operator, a test's word) is split off first and
never glued to its surroundings. The special tokens are those that the Qwen3 renderer needs as single tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from gyre_hpc.executions.patchkit.family import MODULE_NAMES

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
CONTEXT = 2048
"""Longest position the policy declares."""
ATOMS = r"\A\n\n|(?<!')\d|(?<=return x )[-+*%]|\b(?:" + "|".join(MODULE_NAMES) + r")\b"
"""The two newlines that end an empty thinking block stay apart too: the answer starts behind them."""
_SPLIT = re.compile("|".join(re.escape(token) for token in SPECIALS))


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Byte-level BPE with `vocabulary` entries. Specials stand at ids 0..8."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(ATOMS), "isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_segments(texts), trainer)
    return tokenizer


def _segments(texts: Iterable[str]) -> Iterator[str]:
    """What stands between special tokens: the renderer encodes these pieces one by one."""
    for text in texts:
        yield from filter(None, _SPLIT.split(text))


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
