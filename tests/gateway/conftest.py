"""A tiny byte-level BPE tokenizer with the Qwen3 special tokens, and the rendering over it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from gyre_hpc.gateway.rendering import Rendering

from .fakes import RunningGateway

SPECIALS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>",
    "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip


def write_tokenizer(folder: Path) -> Path:
    """tokenizer.json of a byte-level BPE with a few merges, so that text has more than one tokenisation."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    corpus = [
        "user\nassistant\nsystem\n the tool result is here",
        '{"name": "bash", "arguments": {"command": "ls"}}',
    ] * 4
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def rendering(model_dir: Path) -> Rendering:
    return Rendering(model_dir, "qwen3", thinking=False)


@pytest.fixture
async def gateway(rendering: Rendering, tmp_path: Path) -> AsyncIterator[RunningGateway]:
    running = await RunningGateway.start(rendering, tmp_path)
    yield running
    await running.stop()
