"""`gyre warmstart`: make the starting policy in a folder of Hugging Face layout, from nothing but seeds.

Writes tokenizer.json, tokenizer_config.json, config.json, model.safetensors and demonstrations.safetensors (replayed by
the trainer when objective.replay_weight > 0). About two CPU minutes; the result is what gyre_hpc/models/patchkit holds.
"""

from __future__ import annotations

import logging
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

from gyre_hpc.gateway.rendering import Rendering
from gyre_hpc.training.shape import ModelShape
from gyre_hpc.warmstart.demonstrator import NOISY, Transcript
from gyre_hpc.warmstart.examples import Batches, Examples, make_examples, transcripts
from gyre_hpc.warmstart.policy import Policy, initial_weights, write_config
from gyre_hpc.warmstart.tokenizer import save_tokenizer, train_tokenizer

log = logging.getLogger(__name__)

RENDERER, THINKING = "qwen3", False
VOCABULARY = 768
"""Enough for every phrase of the harness to be a few tokens; more entries are never used."""
BOOTSTRAP_VOCABULARY = 300
TOKENIZER_EXECUTIONS = 400
EXECUTIONS = 2000
ITERATIONS, DRILL_ITERATIONS = 900, 500
ROWS = 16
LEARNING_RATE, WARMUP, DECAY_SHARE, FLOOR = 3e-3, 30, 0.5, 0.05
"""Linear warm-up over WARMUP iterations; over the last DECAY_SHARE linearly down to FLOOR of the peak."""
REPLAY_ROWS = 400

Progress = Callable[[int, int, float], None]
"""(iteration, iterations, loss of the transcripts)."""


def make(out: Path, seed: int = 0, iterations: int = ITERATIONS, progress: Progress | None = None) -> None:
    """Write the whole model folder."""
    out.mkdir(parents=True, exist_ok=True)
    make_tokenizer(out, seed)
    rendering = Rendering(out, RENDERER, THINKING)
    write_config(out, rendering.tokenizer.backend.get_vocab_size(), rendering.stop_ids)
    examples = make_examples(rendering, EXECUTIONS, seed)
    shape = ModelShape.read(out)
    policy = Policy(shape, initial_weights(shape, seed))
    train(policy, examples, seed, iterations, progress or _log_progress)
    policy.save(out)
    save_demonstrations(
        out / "demonstrations.safetensors", transcripts(rendering, NOISY, REPLAY_ROWS // 3, seed + 2)
    )


def make_tokenizer(out: Path, seed: int) -> None:
    """Train the tokenizer on demonstrations written with a bytes-only one."""
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(train_tokenizer([], BOOTSTRAP_VOCABULARY), Path(folder))
        rendering = Rendering(Path(folder), RENDERER, THINKING)
        windows = transcripts(rendering, NOISY, TOKENIZER_EXECUTIONS, seed)
        texts = [rendering.text(window.ids) for window in windows]
    save_tokenizer(train_tokenizer(texts, VOCABULARY), out)


def train(policy: Policy, examples: Examples, seed: int, iterations: int, progress: Progress) -> None:
    """Noisy transcripts in every iteration; in the first part also each drill, with a mean of its own."""
    draw = random.Random(seed)
    noisy = Batches(examples.noisy, ROWS, draw)
    drills = [Batches(rows, ROWS, draw) for rows in examples.drills]
    parameters = [tensor.requires_grad_() for tensor in policy.weights.values()]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    drilled = round(iterations * DRILL_ITERATIONS / ITERATIONS)
    for iteration in range(iterations):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * _rate(iteration, iterations)
        loss = policy.loss(*noisy.next())
        total = loss + sum(policy.loss(*drill.next()) for drill in drills) if iteration < drilled else loss
        optimizer.zero_grad()
        total.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        progress(iteration + 1, iterations, loss.item())


def _rate(iteration: int, iterations: int) -> float:
    rise = min(1.0, (iteration + 1) / WARMUP)
    return rise * max(FLOOR, min(1.0, (iterations - iteration) / (DECAY_SHARE * iterations)))


def _log_progress(iteration: int, iterations: int, loss: float) -> None:
    if iteration % 20 == 0 or iteration == iterations:
        log.info("warm start: iteration %d of %d, loss %.3f", iteration, iterations, loss)


def save_demonstrations(path: Path, windows: list[Transcript]) -> None:
    """Rows in CSR form: ids int32 [N], mask uint8 [N] (1 = produced by the policy), offsets int64 [rows + 1]."""
    offsets = np.cumsum([0, *(len(window.ids) for window in windows)], dtype=np.int64)
    ids = np.concatenate([np.asarray(window.ids, np.int32) for window in windows])
    mask = np.concatenate([np.asarray(window.mask, np.uint8) for window in windows])
    save_file({"ids": ids, "mask": mask, "offsets": offsets}, str(path))
