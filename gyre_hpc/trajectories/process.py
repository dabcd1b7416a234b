"""One rollout group: assessed executions and their trees in, advantages and micro-steps out. Pure and reproducible.

An execution counts as valid iff it has a score, its records are complete and it made a call; an invalid one is left out,
never scored 0. Fewer than two valid executions: the group is dead and `reason` says why. Equal rewards: the group is
consumed without micro-steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gyre_hpc.config import RunConfig
from gyre_hpc.records import ExecutionId, GroupId
from gyre_hpc.trajectories.advantages import advantages
from gyre_hpc.trajectories.micro_steps import MicroStep
from gyre_hpc.trajectories.packing import Member, Packing, pack
from gyre_hpc.trajectories.selection import select
from gyre_hpc.trajectories.tree import Tree


@dataclass(frozen=True)
class Settings:
    """What of the configuration shapes micro-steps."""

    seed: int
    j_max: int
    eps: float
    std: bool
    packing: Packing

    @classmethod
    def of(cls, run: RunConfig) -> Settings:
        trainer, objective = run.trainer, run.objective
        packing = Packing(
            trainer.tokens_per_micro_step, trainer.min_micro_steps_per_group, trainer.packing == "rows"
        )
        return cls(run.seed, objective.j_max, objective.eps, objective.std, packing)


@dataclass(frozen=True)
class Attempt:
    """One closed execution of the group. `score` is None for an excluded one, `why` then names the cause."""

    execution: ExecutionId
    score: float | None
    why: str
    tree: Tree | None


@dataclass(frozen=True)
class ProcessedGroup:
    """`rewards` of the valid executions in id order; `reason` is "" unless the group is dead."""

    group: GroupId
    valid: int
    rewards: tuple[float, ...]
    micro_steps: list[MicroStep]
    trained_tokens: int
    paths: int
    paths_cut: int
    reason: str


def process_group(group: GroupId, attempts: Sequence[Attempt], settings: Settings) -> ProcessedGroup:
    """Advantages over the valid rewards, then selection per execution, then packing."""
    valid: list[tuple[ExecutionId, float, Tree]] = []
    causes: Counter[str] = Counter()
    for attempt in sorted(attempts, key=lambda attempt: attempt.execution):
        if attempt.score is not None and attempt.tree is not None and attempt.tree.calls:
            valid.append((attempt.execution, attempt.score, attempt.tree))
        else:
            causes[attempt.why if attempt.score is None else "no model call"] += 1
    rewards = tuple(reward for _, reward, _ in valid)
    if len(valid) < 2:
        listed = ", ".join(f"{count} {cause}" for cause, count in sorted(causes.items()))
        return _without_work(group, rewards, f"{len(valid)} of {len(attempts)} executions valid: {listed}")
    relative = advantages(rewards, settings.eps, settings.std)
    if relative is None:
        return _without_work(group, rewards, "")
    members = [
        Member(execution, tree, select(tree, execution, settings.seed, settings.j_max), advantage)
        for (execution, _, tree), advantage in zip(valid, relative, strict=True)
    ]
    micro_steps, cut = pack(group, members, settings.packing)
    targets, paths = sum(step.targets for step in micro_steps), sum(step.paths for step in micro_steps)
    return ProcessedGroup(group, len(valid), rewards, micro_steps, targets, paths, cut, "")


def _without_work(group: GroupId, rewards: tuple[float, ...], reason: str) -> ProcessedGroup:
    return ProcessedGroup(group, len(rewards), rewards, [], 0, 0, 0, reason)
