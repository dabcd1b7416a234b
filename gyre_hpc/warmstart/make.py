"""`gyre warmstart`: make the starting policy in a folder of Hugging Face layout, from nothing but a seed.

Writes tokenizer.json, tokenizer_config.json, config.json, model.safetensors and demonstrations.safetensors (replayed by
the trainer when objective.replay_weight > 0). About five CPU minutes; the result is what gyre_hpc/models/patchkit holds.
"""

from __future__ import annotations

import json
import logging
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

from safetensors.numpy import save_file

from gyre_hpc.config import ObjectiveConfig, TrainerConfig
from gyre_hpc.gateway.rendering import Rendering
from gyre_hpc.models.shape import ModelShape
from gyre_hpc.training.new_model import write_new_model
from gyre_hpc.training.replay import FILE_NAME, Demonstrations
from gyre_hpc.training.trainer import Trainer
from gyre_hpc.warmstart.demonstrator import NOISY
from gyre_hpc.warmstart.examples import Batches, Examples, as_row, make_examples, transcripts
from gyre_hpc.warmstart.tokenizer import CONTEXT, save_tokenizer, train_tokenizer

log = logging.getLogger(__name__)

RENDERER, THINKING = "qwen3", False
VOCABULARY = 768
"""Enough for every phrase of the harness to be a few tokens; more entries are never used."""
BOOTSTRAP_VOCABULARY = 300
TOKENIZER_EXECUTIONS = 400
EXECUTIONS = 2000
ITERATIONS, DRILLED_SHARE = 900, 0.55
"""Optimizer steps, and the share of them (from the first) that also see the drills."""
BATCH = 16
INITIAL_STD = 0.046
REPLAY_EXECUTIONS = 133
SETTINGS = TrainerConfig(learning_rate=3e-3, warmup_steps=30, beta2=0.95, weight_decay=0.01)
FLAT_SHARE, FLOOR = 0.5, 0.05
"""After FLAT_SHARE of the steps the learning rate falls linearly, down to FLOOR of its peak."""

Progress = Callable[[int, int, float], None]
"""(iteration, iterations, loss of the transcripts)."""


def make(
    out: Path,
    seed: int = 0,
    *,
    executions: int = EXECUTIONS,
    iterations: int = ITERATIONS,
    progress: Progress | None = None,
) -> None:
    """Write the whole model folder. `executions` demonstrated ones are trained on for `iterations` steps."""
    out.mkdir(parents=True, exist_ok=True)
    make_tokenizer(out, seed)
    rendering = Rendering(out, RENDERER, THINKING)
    write_new_model(out, _shape(rendering), seed, context=CONTEXT, std=INITIAL_STD)
    _name_stops(out / "config.json", rendering)
    train(out, make_examples(rendering, executions, seed), seed, iterations, progress or _log_progress)
    replayed = transcripts(rendering, NOISY, REPLAY_EXECUTIONS, seed + 3)
    Demonstrations.of([as_row(window) for window in replayed]).write(out / FILE_NAME)
    for path in out.iterdir():
        path.chmod(0o644)


def make_tokenizer(out: Path, seed: int) -> None:
    """Train the tokenizer on demonstrations written with a bytes-only one."""
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(train_tokenizer([], BOOTSTRAP_VOCABULARY), Path(folder))
        rendering = Rendering(Path(folder), RENDERER, THINKING)
        windows = transcripts(rendering, NOISY, TOKENIZER_EXECUTIONS, seed)
        texts = [rendering.text(window.ids) for window in windows]
    save_tokenizer(train_tokenizer(texts, VOCABULARY), out)


def train(out: Path, examples: Examples, seed: int, iterations: int, progress: Progress) -> None:
    """Noisy transcripts in every iteration; in the first part also each drill, with a mean of its own."""
    draw = random.Random(seed)
    noisy = Batches(examples.noisy, BATCH, draw)
    drills = [Batches(windows, BATCH, draw) for windows in examples.drills]
    trainer = Trainer(out, SETTINGS, ObjectiveConfig())
    for iteration in range(iterations):
        trainer.set_learning_rate(SETTINGS.learning_rate * _rate(iteration / iterations))
        loss = trainer.accumulate(noisy.next())["loss"]
        if iteration < DRILLED_SHARE * iterations:
            for drill in drills:
                trainer.accumulate(drill.next())
        trainer.step(executions=1)
        progress(iteration + 1, iterations, loss)
    save_file(trainer.weights(), str(out / "model.safetensors"), metadata={"format": "pt"})


def _rate(share: float) -> float:
    return max(FLOOR, min(1.0, (1.0 - share) / (1.0 - FLAT_SHARE)))


def _shape(rendering: Rendering) -> ModelShape:
    return ModelShape(
        num_hidden_layers=3,
        hidden_size=96,
        intermediate_size=288,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=rendering.tokenizer.backend.get_vocab_size(),
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        tie_word_embeddings=True,
    )


def _name_stops(config: Path, rendering: Rendering) -> None:
    """Other programs that load the folder learn from it where an answer ends."""
    stops = {"eos_token_id": list(rendering.stop_ids), "pad_token_id": 0}
    config.write_text(json.dumps({**json.loads(config.read_text()), **stops}, indent=2) + "\n")


def _log_progress(iteration: int, iterations: int, loss: float) -> None:
    if iteration % 50 == 0 or iteration == iterations:
        log.info("warm start: iteration %d of %d, loss %.3f", iteration, iterations, loss)
