"""A run folder as a live run would leave it, made from a simulated one: its times and costs are known exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from gyre_hpc.composition import compose
from gyre_hpc.config import RunConfig, save_run_config
from gyre_hpc.controller.journal.entries import AnyEntry, AttemptOpened, Happened, Outcome, Sealed, StepTaken
from gyre_hpc.controller.journal.journal import Journal
from gyre_hpc.controller.train import schedule_settings
from gyre_hpc.layout import RunLayout
from gyre_hpc.records import (
    Assessment,
    CallRecord,
    CellId,
    ClosingReason,
    Delivery,
    ExecutionId,
    FinishReason,
    GroupId,
    LeafRole,
    Version,
)
from gyre_hpc.report import metrics as m
from gyre_hpc.report.metrics import MetricsWriter
from gyre_hpc.schedule import protocol as p
from gyre_hpc.schedule.machine import decide
from gyre_hpc.schedule.state import State
from gyre_hpc.shards.encode import Derivation, ExecutionRecord
from gyre_hpc.shards.writer import ShardWriter
from gyre_hpc.simulate import simulator
from gyre_hpc.simulate.outcome import Outcome as Simulated
from gyre_hpc.simulate.workload import GroupWork
from gyre_hpc.simulate.world import Place, SwitchCosts, TrainingModel, World
from gyre_hpc.trajectories.strands import Strands
from gyre_hpc.transport.messages import ExecutionOutcome, ExecutionSealed

EPOCH_S = 1.7e9
TOKEN_S = 0.125
"""Node-seconds of training per token."""
SNAPSHOT_S = 0.25


def config(*overrides: str) -> RunConfig:
    """Two cells with room for three executions each; bursts of two steps of two groups of three."""
    words = ["experiment=paced", "model.path=package:patchkit", "cluster.cells=2", "engine.capacity=3"]
    words += ["schedule.batch_groups=2", "schedule.executions_per_group=3", "schedule.steps_per_burst=2"]
    return compose(
        [*words, "schedule.steps=6", "harness.timeout_s=500", "harness.overall_timeout_s=600", *overrides]
    )


def world(run: RunConfig) -> World:
    """The machine of that run."""
    return World(
        cells=tuple(Place(1.0, run.engine.capacity, 5.0 + cell) for cell in range(run.cluster.cells)),
        training=TrainingModel(micro_step_s=2.0, step_s=1.5, snapshot_s=SNAPSHOT_S),
        switch=SwitchCosts({"drain": 1.0, "load": 2.0, "other": 0.0}, {"load": 1.0, "other": 0.0}),
        publish_s=0.75,
        heldout=run.tasks.heldout * run.tasks.evaluation_repeats,
        limit_s=500.0,
    )


@dataclass(frozen=True)
class Drawn:
    """Groups of every kind: costs in whole tokens, an invalid member here, equal rewards there."""

    seed: int = 0

    def groups(self, seed: int, executions: int) -> Iterator[GroupWork]:
        draws = np.random.default_rng(self.seed)
        for group in range(10**6):
            flat = group % 5 == 3
            tokens = draws.integers(20, 60, executions)
            valid = tuple(bool(group % 4 != 1 or member) for member in range(executions))
            seconds = draws.uniform(10.0, 60.0, executions).tolist()
            costs = [0.0 if flat else TOKEN_S * float(n) for n in tokens]
            yield GroupWork(
                seconds=tuple(seconds),
                training=tuple(costs),
                forecast=float(np.mean(seconds)),
                valid=valid,
                micro_steps=0 if flat else int(draws.integers(2, 5)),
                scored_s=float(draws.uniform(0.1, 3.0)),
            )

    def heldout(self, seed: int) -> Iterator[float]:
        return chain.from_iterable(repeat((8.0, 12.0)))


@dataclass
class Written:
    """The folder, what was simulated, and the groups that it was simulated with."""

    folder: Path
    outcome: Simulated
    groups: list[GroupWork] = field(default_factory=list)


def write_run(folder: Path, run: RunConfig, seed: int = 0) -> Written:
    """Simulate, and leave config.yaml, journal, metrics and shards of it in `folder`."""
    layout = RunLayout(folder)
    layout.root.mkdir(parents=True)
    layout.create()
    save_run_config(run, folder)
    turns, outcome = _simulated(run, seed)
    dispatched = [g for _, _, says in turns for d in says if isinstance(d, p.Dispatch) for g in d.groups]
    source = Drawn(seed).groups(0, run.schedule.executions_per_group)
    works = {group.group: (group.executions, next(source)) for group in dispatched}
    journal = Journal(layout.journal, 1)
    for entry in _entries(turns, works):
        journal.append(entry)
    journal.close()
    _write_metrics(layout, world(run), outcome)
    _write_shards(layout, works)
    return Written(folder, outcome, [work for _, work in works.values()])


Turn = tuple[float, p.AnyEvent, tuple[p.AnyDecision, ...]]
Works = dict[GroupId, tuple[tuple[ExecutionId, ...], GroupWork]]


def _simulated(run: RunConfig, seed: int) -> tuple[list[Turn], Simulated]:
    """The run, and every event with its time and decisions."""
    turns: list[Turn] = []
    settings = schedule_settings(run)
    drawn = Drawn(seed)
    simulation = simulator._Simulation(
        settings, world(run), drawn.groups(0, settings.executions_dispatched), drawn.heldout(0), False
    )

    def noted(state: State, event: p.AnyEvent) -> Any:
        after, decisions = decide(state, event)
        turns.append((simulation._agenda.now, event, decisions))
        return after, decisions

    with mock.patch.object(simulator, "decide", noted):
        outcome = simulation.run()
    return turns, outcome


def _entries(turns: Sequence[Turn], works: Works) -> Iterator[AnyEntry]:
    members = {id_: (group, index) for group, (ids, _) in works.items() for index, id_ in enumerate(ids)}
    steps = batch = 0
    taken: list[GroupId] = []
    for now, event, decisions in turns:
        at = EPOCH_S + now
        match event:
            case p.MicroSteps():
                continue
            case p.Terminated(id=id_, reason=reason):
                yield Sealed(at, ExecutionSealed(id_, 1, 1, 0, 0, 5, 0, 5, 0.0, False, False))
                group, index = members.get(id_, (None, 0))
                score = (
                    Assessment(0.5, True, "") if group is None or works[group][1].is_valid(index) else None
                )
                yield Outcome(at, ExecutionOutcome(id_, 1, group, f"q{group}", reason, 1.0, False, score))
            case p.BatchDone(stepped=True):
                steps += 1
                yield from _step(at, batch, steps, taken, works)
        yield Happened(at, event, decisions)
        for decision in decisions:
            if isinstance(decision, p.Launch | p.LaunchEvaluation):
                for id_ in decision.ids:
                    group = members[id_][0] if id_ in members else None
                    yield AttemptOpened(at, id_, 1, group, f"q{group}")
        taken, batch = _taken(taken, batch, event, works)


def _taken(taken: list[GroupId], batch: int, event: p.AnyEvent, works: Works) -> tuple[list[GroupId], int]:
    """Groups are taken in the order in which they become ready: all are stamped alike within a burst."""
    match event:
        case p.GroupReady(group=group):
            return [*taken, group], batch
        case p.BatchDone():
            return taken[2:], batch + 1
    return taken, batch


def _step(at: float, batch: int, version: int, taken: Sequence[GroupId], works: Works) -> Iterator[AnyEntry]:
    """Two groups: all their work in one claim, committed 1.5 s later."""
    groups = [group for group in taken[:2] if works[group][1].micro_steps]
    seconds = sum(
        cost for g in groups for i, cost in enumerate(works[g][1].training) if works[g][1].is_valid(i)
    )
    begin = at - 1.5 - seconds
    yield Happened(begin, p.MicroSteps(0, 1, batch, 2), ())
    yield Happened(at - 1.5, p.MicroSteps(0, 0, batch, 2), (p.CloseBatch(),))
    names = tuple(f"{group}.{index}" for group in groups for index in range(works[group][1].micro_steps))
    yield StepTaken(at, batch, Version(version), 6, ((CellId(0), names),), {}, (0, 1), 7)


def _write_metrics(layout: RunLayout, machine: World, outcome: Simulated) -> None:
    writer = MetricsWriter(layout.metrics)
    to_training, to_rollout = machine.switch.to_training, machine.switch.to_rollout
    writer.write(
        m.Switch(1.0, 0, "training", machine.switch.join_s, {"drain": to_training["drain"], "load": 2.0})
    )
    writer.write(m.Switch(2.0, 0, "rollout", machine.switch.return_s, dict(to_rollout)))
    for cell in (0, 1):
        writer.write(m.RoleChange(3.0, cell, "training"))
        writer.write(m.Join(3.0, cell, 0, bool(cell)))
    writer.write(m.Step(4.0, 1, None, 2, 6, 4, 7, (0, 0), {}, 1.0))
    writer.write(m.Join(4.0, 0, 1, False))
    writer.write(m.Join(4.0 + SNAPSHOT_S, 1, 1, True))
    writer.close()


def _write_shards(layout: RunLayout, works: Works) -> None:
    writer = ShardWriter(layout, "run", Derivation(0, 5))
    for group, (ids, work) in works.items():
        for index, id_ in enumerate(ids):
            cost = work.training[index] or 5.0
            writer.add(_record(id_, group, round(cost / TOKEN_S)), 0.0)
    writer.seal()


def _record(id_: ExecutionId, group: GroupId, tokens: int) -> ExecutionRecord:
    strands = Strands()
    answer = 5
    strands.add(
        CallRecord(
            call=f"c{id_}",
            execution=id_,
            attempt=1,
            ordinal=0,
            prompt_ids=np.arange(tokens - answer, dtype=np.int32),
            output_ids=np.arange(answer, dtype=np.int32),
            logprobs=np.zeros(answer, np.float32),
            versions=np.zeros(answer, np.int32),
            finish=FinishReason.STOP,
            delivery=Delivery.COMPLETE,
            accepted=True,
            constrained=False,
            role_hint=LeafRole.MAIN,
            started=EPOCH_S,
            finished=EPOCH_S + 1.0,
            held_s=0.0,
            recomputed_tokens=0,
            dialect="openai-chat",
        )
    )
    score = Assessment(0.5, True, "")
    return ExecutionRecord(
        id_, 1, group, f"q{group}", ClosingReason.COMPLETED, 1.0, False, False, score, strands
    )
