"""Shared material of the training tests: a tiny policy on disk and random forests in several presentations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from gyre_hpc.config import ObjectiveConfig, TrainerConfig
from gyre_hpc.models.shape import ModelShape
from gyre_hpc.training.new_model import write_new_model
from gyre_hpc.training.trainer import Trainer
from gyre_hpc.trajectories import micro_steps
from gyre_hpc.trajectories.micro_steps import MicroStep

SHAPE = ModelShape(
    num_hidden_layers=2,
    hidden_size=32,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=48,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    tie_word_embeddings=True,
)
WIDE_CLIP = ObjectiveConfig(clip_low=0.6, clip_high=1.0)


def make_model(folder: Path, shape: ModelShape = SHAPE, seed: int = 0) -> Path:
    """A model folder with weights large enough that every gradient is far from zero."""
    write_new_model(folder, shape, seed, std=0.2)
    return folder


def make_trainer(folder: Path, objective: ObjectiveConfig = WIDE_CLIP, **settings: float) -> Trainer:
    config = TrainerConfig(threads=1, learning_rate=1e-2, beta2=0.99, weight_decay=0.01)
    for key, value in settings.items():
        setattr(config, key, value)
    return Trainer(folder, config, objective)


@dataclass(frozen=True)
class Tree:
    """A random forest with one path per leaf; node n's targets belong to the first path through it."""

    parents: tuple[int, ...]
    tokens: tuple[np.ndarray, ...]
    paths: tuple[tuple[int, ...], ...]
    behaviour: tuple[np.ndarray, ...]
    advantage: tuple[float, ...]

    def owner(self, node: int) -> int:
        return next(index for index, path in enumerate(self.paths) if node in path)

    def _places(self, path: int, node: int) -> list[int]:
        if self.owner(node) != path:
            return []
        return list(range(1 if self.parents[node] < 0 else 0, len(self.tokens[node])))

    def as_forest(self) -> MicroStep:
        """Every node once."""
        places = [
            (node, index, path)
            for path, nodes in enumerate(self.paths)
            for node in nodes
            for index in self._places(path, node)
        ]
        origin = [(node, index) for node, index, _ in places]
        return self._build("forest", self.parents, self.tokens, places, origin, len(self.paths))

    def as_rows(self) -> MicroStep:
        """One micro-step in which every path is a row of its own; ancestors trained elsewhere are plain context."""
        tokens, places, origin = [], [], []
        for path in range(len(self.paths)):
            row, row_places, row_origin = self._row(path, path)
            tokens.append(row)
            places += row_places
            origin += row_origin
        return self._build("rows", [-1] * len(tokens), tokens, places, origin, len(tokens))

    def as_cuts(self) -> list[MicroStep]:
        """One micro-step per path."""
        steps = []
        for path in range(len(self.paths)):
            row, places, origin = self._row(path, 0)
            places = [(0, index, 0) for _, index, _ in places]
            steps.append(self._build(f"cut.{path}", [-1], [row], places, origin, 1))
        return steps

    def _row(
        self, path: int, node: int
    ) -> tuple[np.ndarray, list[tuple[int, int, int]], list[tuple[int, int]]]:
        places, origin, begin = [], [], 0
        for member in self.paths[path]:
            for index in self._places(path, member):
                places.append((node, begin + index, path))
                origin.append((member, index))
            begin += len(self.tokens[member])
        return np.concatenate([self.tokens[member] for member in self.paths[path]]), places, origin

    def _build(
        self,
        name: str,
        parents: Sequence[int],
        tokens: Sequence[np.ndarray],
        places: list[tuple[int, int, int]],
        origin: list[tuple[int, int]],
        paths: int,
    ) -> MicroStep:
        node, index, path = np.array(places, np.int32).T
        total = sum(len(one) for one in self.tokens)
        targets = micro_steps.NodeTargets(
            node=node,
            index=index,
            path=path,
            weight=np.full(len(node), 1.0 / total, np.float32),
            advantage=np.array([self.advantage[self.owner(member)] for member, _ in origin], np.float32),
            behaviour_logprob=np.array([self.behaviour[member][at] for member, at in origin], np.float32),
            version=np.array([member % 3 for member, _ in origin], np.int32),
        )
        step = micro_steps.build(name, 0, list(parents), list(tokens), targets, np.zeros(paths, np.int32))
        step.validate()
        return step


def random_tree(seed: int, nodes: int = 7, longest: int = 9) -> Tree:
    """`nodes` nodes of 2..longest tokens; about one in five starts a tree of its own."""
    rng = np.random.default_rng(seed)
    parents = tuple(-1 if n == 0 or rng.random() < 0.2 else int(rng.integers(0, n)) for n in range(nodes))
    lengths = rng.integers(2, longest + 1, nodes)
    tokens = tuple(rng.integers(0, SHAPE.vocab_size, length).astype(np.int32) for length in lengths)
    leaves = [node for node in range(nodes) if node not in parents]
    behaviour = tuple(
        (-3.9 + rng.normal(0, 0.5, length)).clip(max=-0.01).astype(np.float32) for length in lengths
    )
    paths = tuple(_ancestry(parents, leaf) for leaf in leaves)
    return Tree(parents, tokens, paths, behaviour, tuple(rng.choice([-1.0, 0.7], len(leaves)).tolist()))


def _ancestry(parents: Sequence[int], node: int) -> tuple[int, ...]:
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return tuple(path[::-1])


def gradient_of(trainer: Trainer, steps: Sequence[MicroStep]) -> dict[str, np.ndarray]:
    """The gradient of a list of micro-steps, copied; the trainer is left clear."""
    trainer.clear()
    for step in steps:
        trainer.accumulate(step)
    found = {name: array.copy() for name, array in trainer.gradient().items()}
    trainer.clear()
    return found


def relative_error(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """Largest absolute difference over the largest expected entry, over all arrays."""
    return max(
        float(np.abs(found[name] - expected[name]).max() / np.abs(expected[name]).max()) for name in expected
    )


def same_bits(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> bool:
    return found.keys() == expected.keys() and all(
        np.array_equal(found[name], expected[name]) for name in expected
    )


def hf_gradient(trainer: Trainer) -> dict[str, np.ndarray]:
    """The open gradient under Hugging Face names."""
    from gyre_hpc.training.hf_weights import megatron_to_hf

    parameters = dict(trainer._policy.model.named_parameters())
    gradients = {name: parameter.main_grad.detach().clone() for name, parameter in parameters.items()}
    return {name: tensor.numpy() for name, tensor in megatron_to_hf(gradients, trainer.shape).items()}


def hf_logits(model: torch.nn.Module, ids: np.ndarray) -> torch.Tensor:
    return model(torch.from_numpy(ids[None]).long()).logits[0].float()
