"""`gyre bench train-tree`: a prefix tree trained once against one pass per path, forward and backward on the host.

1024 shared tokens and 8 branches of 128; 2 layers of width 256. Both ways train exactly the same targets, so their
gradients must agree. Times are CPU seconds of this process, the best of several alternating runs. The bound is the
ratio of tokens; fixed costs per pass, which the paths pay eight times, can lift a measured value slightly above it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from gyre_hpc.bench.figure import Figure
from gyre_hpc.config import ObjectiveConfig, TrainerConfig
from gyre_hpc.models.shape import ModelShape
from gyre_hpc.records import Int32
from gyre_hpc.training.buffers import Array
from gyre_hpc.training.new_model import write_new_model
from gyre_hpc.training.trainer import Trainer
from gyre_hpc.trajectories import micro_steps
from gyre_hpc.trajectories.micro_steps import MicroStep

SHARED, BRANCHES, SUFFIX = 1024, 8, 128
SHAPE = ModelShape(
    vocab_size=512,
    hidden_size=256,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=768,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    tie_word_embeddings=False,
)
_ROUNDS = 3


def run() -> dict[str, Figure]:
    """Measure both ways in one process."""
    with tempfile.TemporaryDirectory() as folder:
        write_new_model(Path(folder), SHAPE, seed=0)
        trainer = Trainer(
            Path(folder), TrainerConfig(threads=1), ObjectiveConfig(clip_low=0.9, clip_high=10.0)
        )
        tree, rows = as_tree(SHARED, BRANCHES, SUFFIX), as_rows(SHARED, BRANCHES, SUFFIX)
        error = gradient_error(trainer, tree, rows)
        seconds = [(_cpu_seconds(trainer, [tree]), _cpu_seconds(trainer, rows)) for _ in range(_ROUNDS)]
        tree_s, rows_s = (min(column) for column in zip(*seconds, strict=True))
    bound = BRANCHES * (SHARED + SUFFIX) / (SHARED + BRANCHES * SUFFIX)
    against = "one causal pass per path, same targets"
    return {
        "speedup": Figure(rows_s / tree_s, "x", "higher", aim=3.5, bound=bound, against=against),
        "max_gradient_error": Figure(error, "relative", "lower", aim=1e-5, bound=0.0, against=against),
    }


def as_tree(shared: int, branches: int, suffix: int) -> MicroStep:
    """The shared prefix once, every branch once; path 0 owns the shared targets."""
    lengths = [shared] + [suffix] * branches
    tokens = [_tokens(node, length) for node, length in enumerate(lengths)]
    parents = [-1] + [0] * branches
    places = [(0, index, 0) for index in range(1, shared)]
    places += [(1 + branch, index, branch) for branch in range(branches) for index in range(suffix)]
    return micro_steps.build("tree", 0, parents, tokens, _targets(places), np.zeros(branches, np.int32))


def as_rows(shared: int, branches: int, suffix: int) -> list[MicroStep]:
    """The same targets with one micro-step per path, the prefix repeated as context."""
    prefix = _tokens(0, shared)
    steps = []
    for branch in range(branches):
        ids = np.concatenate([prefix, _tokens(1 + branch, suffix)])
        first = 1 if branch == 0 else shared
        targets = _targets([(0, index, 0) for index in range(first, len(ids))])
        advantage = np.full(len(targets.path), _advantage(branch), np.float32)
        targets = replace(targets, advantage=advantage)
        steps.append(micro_steps.build(f"row.{branch}", 0, [-1], [ids], targets, np.zeros(1, np.int32)))
    return steps


def gradient_error(trainer: Trainer, tree: MicroStep, rows: Sequence[MicroStep]) -> float:
    """Largest difference of the two gradients over the largest gradient entry."""
    once, apart = _gradient(trainer, [tree]), _gradient(trainer, rows)
    return max(float(np.abs(once[name] - apart[name]).max() / np.abs(apart[name]).max()) for name in once)


def _gradient(trainer: Trainer, parts: Sequence[MicroStep]) -> dict[str, Array]:
    trainer.clear()
    for part in parts:
        trainer.accumulate(part)
    return {name: array.copy() for name, array in trainer.gradient().items()}


def _cpu_seconds(trainer: Trainer, parts: Sequence[MicroStep]) -> float:
    trainer.clear()
    start = time.process_time()
    for part in parts:
        trainer.accumulate(part)
    return time.process_time() - start


def _tokens(node: int, length: int) -> Int32:
    return np.random.default_rng(node).integers(0, SHAPE.vocab_size, length, dtype=np.int32)


def _advantage(path: int) -> float:
    return 1.0 if path % 2 else -1.0


def _targets(places: Sequence[tuple[int, int, int]]) -> micro_steps.NodeTargets:
    """Targets at (node, index, path), all with the recorded log-probability of a uniform policy."""
    node, index, path = np.array(places, np.int32).T
    count = len(places)
    return micro_steps.NodeTargets(
        node=node,
        index=index,
        path=path,
        weight=np.full(count, 1.0 / 1024, np.float32),
        advantage=np.array([_advantage(one) for one in path.tolist()], np.float32),
        behaviour_logprob=np.full(count, -np.log(SHAPE.vocab_size), np.float32),
        version=np.zeros(count, np.int32),
    )
