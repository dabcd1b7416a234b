"""A finished run as a world and a workload: what its journal, shards and metrics say about times and costs.

An execution's duration is the time it held its place (attempt opened until terminated), less what the gateway held its
calls; a group's training cost is its share, by tokens, of the cell-seconds that its batch's claims took. Everything else is
a mean over the run: switches by phase, steps, publications. What went wrong in the run is not repeated: lost cells and
resumes are counted, and the attempts that counted are the workload.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from gyre_hpc.config import RunConfig, load_run_config
from gyre_hpc.errors import MissingInput
from gyre_hpc.layout import RunLayout
from gyre_hpc.records import CellId, ExecutionId, GroupId
from gyre_hpc.report import metrics as m
from gyre_hpc.schedule.protocol import Role
from gyre_hpc.simulate.journal_times import JournalTimes, read_times
from gyre_hpc.simulate.workload import GroupWork
from gyre_hpc.simulate.world import EngineModel, Place, SwitchCosts, TrainingModel, World


@dataclass(frozen=True)
class Recorded:
    """Groups as recorded. Seed 0: in the order of dispatch, then drawn again from all; other seeds: all drawn."""

    recorded: tuple[GroupWork, ...]
    heldout_s: tuple[float, ...] = ()

    def groups(self, seed: int, executions: int) -> Iterator[GroupWork]:
        draws = np.random.default_rng([seed, 3])
        if seed == 0:
            yield from (_of_size(group, executions, draws) for group in self.recorded)
        while True:
            yield _of_size(self.recorded[int(draws.integers(len(self.recorded)))], executions, draws)

    def heldout(self, seed: int) -> Iterator[float]:
        """Held-out executions as recorded, again and again; like training ones if there were none."""
        known = self.heldout_s or tuple(second for group in self.recorded for second in group.seconds)
        while True:
            yield from known


def _of_size(group: GroupWork, executions: int, draws: np.random.Generator) -> GroupWork:
    """The group with this many executions: the first ones, further ones drawn again."""
    count = len(group.seconds)
    if executions == count:
        return group
    more = draws.integers(count, size=max(0, executions - count)).tolist()
    chosen = [*range(min(executions, count)), *more]
    return group._replace(
        seconds=tuple(group.seconds[index] for index in chosen),
        training=tuple(group.training[index] for index in chosen),
        valid=tuple(group.is_valid(index) for index in chosen),
        micro_steps=max(1, round(group.micro_steps * executions / count)) if group.micro_steps else 0,
    )


@dataclass(frozen=True)
class Recording:
    """What `gyre simulate --from RUN` and `gyre plan` work with. `wall_s`: from the start of the schedule to its stop."""

    run: Path
    config: RunConfig
    world: World
    workload: Recorded
    wall_s: float
    steps: int
    publications: tuple[float, ...]
    """Seconds from the start of the schedule to each publication."""
    staleness: float
    losses: int
    """Cells lost, and resumes: the world has none of them."""


def read_recording(run: Path) -> Recording:
    """Everything the run folder tells. Raises MissingInput naming what it lacks."""
    config, layout = load_run_config(run), RunLayout(run)
    times = read_times(layout.journal)
    if not times.steps or not times.published:
        raise _missing(run, "no step and publication in journal/", "wait until a step is published")
    lines = list(m.read_metrics(layout.metrics))
    tokens, tool_share = _shard_facts(run, times)
    groups = _groups(times, tokens, float(config.cluster.cell.nodes))
    if not groups:
        raise _missing(run, "no group whose executions have all ended", "wait until a step is published")
    return Recording(
        run=run,
        config=config,
        world=_world(config, times, lines, groups, tool_share),
        workload=Recorded(tuple(groups), _heldout(times)),
        wall_s=times.stopped_at - times.started_at,
        steps=len(times.steps),
        publications=tuple(at - times.started_at for at in times.published_at),
        staleness=fmean(value for step in times.steps for value in step.staleness),
        losses=times.losses,
    )


def _missing(run: Path, what: str, fix: str) -> MissingInput:
    return MissingInput(f"{run}: {what}", fix=fix)


# ---- workload -----------------------------------------------------------------------------------------------------


def _groups(times: JournalTimes, tokens: Mapping[ExecutionId, int], nodes: float) -> list[GroupWork]:
    """Groups in the order of dispatch whose fate is known."""
    costs = _group_costs(times, tokens)
    found: list[GroupWork] = []
    history: dict[str, list[float]] = {}
    for group, members in times.groups.items():
        seconds = [times.seconds.get(id_) for id_ in members]
        durations = tuple(value for value in seconds if value is not None)
        if group not in times.scored_s or len(durations) < len(members):
            continue
        weights = [tokens.get(id_, 0) * (id_ in times.valid) for id_ in members]
        shares = [weight / (sum(weights) or 1) for weight in weights]
        earlier = history.setdefault(times.queries[members[0]], [])
        found.append(
            GroupWork(
                seconds=durations,
                training=tuple(costs.get(group, 0.0) * nodes * share for share in shares),
                forecast=fmean(earlier) if earlier else fmean(durations),
                valid=tuple(id_ in times.valid for id_ in members),
                micro_steps=times.micro_steps.get(group, 0),
                scored_s=times.scored_s[group],
            )
        )
        earlier.extend(durations)
    return found


def _group_costs(times: JournalTimes, tokens: Mapping[ExecutionId, int]) -> dict[GroupId, float]:
    """Cell-seconds of each group with micro-steps: of its batch by tokens, of an average batch if it was never trained."""

    def size(group: GroupId) -> int:
        return sum(tokens.get(id_, 0) for id_ in times.groups[group] if id_ in times.valid) or 1

    costs: dict[GroupId, float] = {}
    for step in times.steps:
        total = sum(size(group) for group in step.groups)
        costs |= {group: step.cell_seconds * size(group) / total for group in step.groups}
    rate = sum(costs.values()) / sum(size(group) for group in costs)
    untrained = (group for group, count in times.micro_steps.items() if count and group not in costs)
    return costs | {group: rate * size(group) for group in untrained}


def _heldout(times: JournalTimes) -> tuple[float, ...]:
    members = {id_ for group in times.groups.values() for id_ in group}
    return tuple(seconds for id_, seconds in sorted(times.seconds.items()) if id_ not in members)


def _shard_facts(run: Path, times: JournalTimes) -> tuple[dict[ExecutionId, int], float]:
    """(tokens of each execution's tree, share of the executions' time that passed outside of model calls)."""
    from gyre_hpc.shards.encode import flat
    from gyre_hpc.shards.reader import open_shards

    tokens: dict[ExecutionId, int] = {}
    in_calls = 0.0
    for shard in open_shards(run):
        tables = shard.whole()
        executions, calls = tables["raw/executions"], tables["raw/calls"]
        counts = flat(tables["derived/executions"], "unique_tokens").tolist()
        ids = flat(executions, "execution").tolist()
        kept = (flat(executions, "superseded") == 0).tolist()
        tokens |= {ExecutionId(id_): n for id_, n, keep in zip(ids, counts, kept, strict=True) if keep}
        in_calls += float(np.sum(flat(calls, "finished") - flat(calls, "started")))
    if not tokens:
        raise _missing(run, "no execution in shards/", "wait until the first shard is sealed")
    return tokens, max(0.0, 1.0 - in_calls / sum(times.seconds.values()))


# ---- world --------------------------------------------------------------------------------------------------------


def _world(
    config: RunConfig,
    times: JournalTimes,
    lines: Sequence[m.AnyMetric],
    groups: Sequence[GroupWork],
    tool_share: float,
) -> World:
    nodes = float(config.cluster.cell.nodes)
    claims = sum(group.micro_steps for group in groups if any(group.training))
    work = sum(sum(group.training) for group in groups)
    longest = max(second for group in groups for second in group.seconds)
    return World(
        cells=tuple(
            Place(nodes, config.engine.capacity, times.serves_s.get(CellId(index), 0.0))
            for index in range(config.cluster.cells)
        ),
        engine=EngineModel(tool_share=tool_share),
        training=TrainingModel(
            micro_step_s=work / nodes / claims if claims else 0.0,
            step_s=fmean(step.commit_s for step in times.steps),
            snapshot_s=_snapshot_s(lines),
        ),
        switch=SwitchCosts(_phases(lines, Role.TRAINING), _phases(lines, Role.ROLLOUT)),
        publish_s=fmean(times.published),
        checkpoint_every=config.trainer.checkpoint_every,
        heldout=config.tasks.heldout * config.tasks.evaluation_repeats,
        evaluate_every=config.tasks.evaluate_every if config.tasks.heldout else 0,
        limit_s=max(config.harness.timeout_s, longest),
    )


def _phases(lines: Sequence[m.AnyMetric], role: Role) -> dict[str, float]:
    """Mean seconds of each phase of the switches to `role`, empty without one; `other` is what no phase names."""
    switches = [line for line in lines if isinstance(line, m.Switch) and line.role == role]
    if not switches:
        return {}
    names = dict.fromkeys(name for line in switches for name in line.phases)
    phases = {name: fmean(line.phases.get(name, 0.0) for line in switches) for name in names}
    phases["other"] = max(0.0, fmean(line.seconds for line in switches) - sum(phases.values()))
    return phases


def _snapshot_s(lines: Iterable[m.AnyMetric]) -> float:
    """Mean seconds after a step until cells that were in training claim from the next batch, the core not counted."""
    stepped: float | None = None
    training: set[int] = set()
    waits: list[float] = []
    first = True
    for line in lines:
        match line:
            case m.Step():
                stepped, first = line.t, True
            case m.RoleChange() if line.role != "training":
                training.discard(line.cell)
            case m.Join():
                if line.cell in training and stepped is not None and not first:
                    waits.append(line.t - stepped)
                training.add(line.cell)
                first = False
    return fmean(waits) if waits else 0.0
