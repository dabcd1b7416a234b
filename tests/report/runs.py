"""Two runs as metrics lines: `elastic` imitates a whole run of any length, `counted` is small enough to add up by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from gyre_hpc.report import metrics as m

CAPACITY, CELLS, GROUPS, SIZE = 11, 3, 4, 8


def write(path: Path, lines: Sequence[m.AnyMetric]) -> Path:
    writer = m.MetricsWriter(path)
    for line in lines:
        writer.write(line)
    writer.close()
    return path


def ended(
    t: float, id: int, group: int | None, reason: str = "completed", score: float | None = 0.5, **counts: int
) -> m.Ended:
    zero = dict.fromkeys(
        ("calls", "calls_rerouted", "calls_lost", "tokens_sampled", "tokens_recomputed", "prompt_tokens"), 0
    )
    return m.Ended(t, id, group, reason, score, wall_s=3.0, held_s=0.0, **(zero | counts))


def step(t: float, version: int, score: float | None, staleness: tuple[int, ...], tokens: int) -> m.Step:
    return m.Step(t, version, score, len(staleness), 32, 16, tokens, staleness, {"grad_norm": 0.4}, 20.0)


class _Run:
    """Clock, ledger and roles of an imitated run."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lines: list[m.AnyMetric] = [m.Opened(0.0)]
        self.t = 0.0
        self.role: dict[int, str] = {}
        self.water, self.evaluating, self.version, self.next_id = 0, 0, 0, 0

    def wait(self, seconds: float) -> None:
        """Time passes; every cell's share of it is busy or idle by its role."""
        self.t += seconds
        causes = {"training": "no_micro_steps", "rollout": "tools", "idle": "starting"}
        for cell, role in self.role.items():
            name = role if role in ("rollout", "training") else "switching"
            idle = {"rollout": 0.35, "training": 0.2}.get(role, 1.0) * seconds
            if idle < seconds:
                self.lines.append(m.Busy(self.t, cell, name, seconds - idle, seconds - idle, ""))
            self.lines.append(m.Busy(self.t, cell, name, idle, 0.0, causes.get(role, "switching")))

    def become(self, cell: int, *roles: str, seconds: float = 0.3) -> None:
        for role in roles:
            self.role[cell] = role
            self.lines.append(m.RoleChange(self.t, cell, role))
            if role != roles[-1]:
                self.wait(seconds)

    def ledger(self) -> None:
        capacity = CAPACITY * sum(role == "rollout" for role in self.role.values())
        running = min(self.water, capacity)
        self.lines.append(m.Water(self.t, self.water, running, capacity, self.evaluating, self.version))

    def end_one(self, group: int | None, score: float) -> None:
        reasons = ("completed",) * 24 + ("harness_timeout", "infrastructure")
        reason = self.random.choice(reasons)
        got = None if reason == "infrastructure" else score
        rerouted = self.random.random() < 0.1
        self.lines.append(
            ended(
                self.t,
                self.next_id,
                group,
                reason,
                got,
                calls=self.random.randint(4, 20),
                calls_rerouted=int(rerouted),
                tokens_sampled=self.random.randint(60, 240),
                tokens_recomputed=700 * rerouted,
            )
        )
        self.next_id += 1

    def evaluate(self, score: float, executions: int) -> None:
        for left in range(executions, -1, -1):
            self.evaluating = min(left, CAPACITY * CELLS)
            self.ledger()
            if left:
                self.wait(self.random.expovariate(1 / 0.5))
                self.end_one(None, score)
        self.lines.append(m.Evaluated(self.t, self.version, score, 0.04, executions - 2, 2))

    def to_training(self, cell: int, batch: int, mid: bool) -> None:
        began = self.t
        self.become(cell, "leaving", "joining", "training")
        parts = {"drain": 0.3, "release": 0.2, "restore": 0.1}
        self.lines.append(m.Switch(self.t, cell, "training", self.t - began, parts))
        self.lines.append(m.Join(self.t, cell, batch, mid))
        self.ledger()

    def burst(self, index: int, score: float) -> None:
        self.water = GROUPS * SIZE
        self.ledger()
        leavers = list(range(CELLS))
        while self.water:
            self.wait(self.random.expovariate(1 / 0.45))
            self.water -= 1
            self.end_one(index * GROUPS + self.water // SIZE, score)
            self.ledger()
            if len(leavers) > 1 and self.water <= CAPACITY * (len(leavers) - 1) and self.water < 20:
                self.to_training(leavers.pop(0), index, mid=len(leavers) < CELLS - 1)
        self.to_training(leavers.pop(0), index, mid=True)
        self.wait(2.0)
        self.version += 1
        late = tuple(self.random.choice((0, 0, 0, 1)) for _ in range(GROUPS))
        self.lines += [step(self.t, self.version, score, late, 4100), m.Burst(self.t, index, self.version)]

    def back(self) -> None:
        began = self.t
        for cell in range(CELLS):
            self.become(cell, "returning")
        self.wait(0.8)
        for cell in range(CELLS):
            self.become(cell, "rollout")
            self.lines.append(
                m.Switch(self.t, cell, "rollout", self.t - began, {"offload": 0.2, "load": 0.5})
            )


def elastic(steps: int, seed: int = 0) -> list[m.AnyMetric]:
    """A run of `steps` steps on 3 cells of 11 executions, 4 groups of 8 per step, evaluated before and after."""
    run = _Run(seed)
    run.wait(4.0)
    for cell in range(CELLS):
        run.become(cell, "idle", "loading", "rollout")
    run.evaluate(0.31, 40)
    for index in range(steps):
        noise = run.random.gauss(0, 0.05)
        run.burst(index, min(1.0, 0.31 + 0.33 * (index + 1) / steps + noise))
        if index == steps // 2:
            run.lines.append(m.Fault(run.t, "cell-1", "engine down: <killed>; its leader restarts it"))
        run.back()
    run.evaluate(0.64, 40)
    return run.lines


def _cell(t: float, cell: int, *phases: str) -> list[m.AnyMetric]:
    """The cell runs through these phases, one second each."""
    return [m.RoleChange(t + number, cell, phase) for number, phase in enumerate(phases)]


TO_TRAINING = ("leaving", "joining", "training")
TO_ROLLOUT = ("returning", "rollout")


def _counted_step(k: int) -> list[m.AnyMetric]:
    """Step k+1 in seconds 20(k+1) to 20(k+1)+20: cells 0, 1 and (even k) 2 train; cell 1 dies in step 4."""
    t = 20.0 * (k + 1)
    lines: list[m.AnyMetric] = [m.Water(t, 8, 8, 33, 0, k)]
    lines += [*_cell(t + 5, 0, *TO_TRAINING), m.Join(t + 7, 0, k, False)]
    lines += [m.Switch(t + 7, 0, "training", 2.0, {"drain": 1.0, "release": 0.5})]
    lines += [*_cell(t + 8, 1, *TO_TRAINING), m.Join(t + 10, 1, k, True)]
    if k % 2 == 0:
        lines += [*_cell(t + 9, 2, *TO_TRAINING), m.Join(t + 11, 2, k, True)]
    lines += [m.Water(t + 12, 0, 0, 11, 0, k)]
    score = None if k == 2 else 0.2 * k
    lines += [step(t + 14, k + 1, score, (0, k % 2), 1000 + k), m.Burst(t + 14, k, k + 1)]
    if k == 3:
        lines += [m.Fault(t + 14, "cell-1", "exited with -9"), m.RoleChange(t + 14, 1, "lost")]
        lines += [m.Restored(t + 14, k + 1)]
        lines += _cell(t + 15, 1, "starting", "idle", "loading", "rollout")
        lines += _cell(t + 15, 0, *TO_ROLLOUT)
    elif k < 4:
        lines += [line for cell in (0, 1) for line in _cell(t + 15, cell, *TO_ROLLOUT)]
        lines += _cell(t + 15, 2, *TO_ROLLOUT) if k % 2 == 0 else []
        lines += [m.Switch(t + 16, 0, "rollout", 1.0 + k, {"load": 1.0})]
    return lines


def _busy(t: float) -> list[m.AnyMetric]:
    """100 s of rollout (40 idle), 50 s of training (10 idle), 25 s switching, 25 s down."""
    return [
        m.Busy(t, 0, "rollout", 60.0, 60.0, ""),
        m.Busy(t, 0, "rollout", 30.0, 0.0, "tools"),
        m.Busy(t, 1, "rollout", 10.0, 0.0, "no_work"),
        m.Busy(t, 0, "training", 40.0, 40.0, ""),
        m.Busy(t, 1, "training", 10.0, 0.0, "no_micro_steps"),
        m.Busy(t, 1, "switching", 20.0, 0.0, "switching"),
        m.Busy(t, 2, "switching", 5.0, 0.0, "loading"),
        m.Busy(t, 2, "down", 25.0, 0.0, "starting"),
    ]


def counted() -> list[m.AnyMetric]:
    """Five steps on three cells with evaluations, a void burst, a dead cell and every closing reason's account."""
    lines: list[m.AnyMetric] = [m.Opened(0.0)]
    for cell in range(CELLS):
        lines += _cell(1.0, cell, "idle", "loading", "rollout")
    lines += [m.Evaluated(10.0, 0, 0.3, 0.05, 10, 1), m.Burst(11.0, 0, None)]
    for k in range(5):
        lines += _counted_step(k)
    lines += [
        ended(119.0, 1, 0, calls=5, tokens_sampled=100, tokens_recomputed=7, calls_rerouted=2),
        ended(
            119.0, 2, 0, calls=6, tokens_sampled=50, tokens_recomputed=3, calls_rerouted=1, calls_unknown=2
        ),
        ended(119.0, 3, 1, "harness_timeout", 0.0, calls=7, tokens_sampled=10),
        ended(119.0, 4, 1, "infrastructure", None, calls=1, calls_lost=1),
        ended(119.0, 5, None, calls=2),
    ]
    lines += [
        m.Published(118.5, 4, 1.5, 2),
        *_busy(120.0),
        m.Evaluated(121.0, 3, 0.5, 0.06, 11, 0),
        m.Evaluated(122.5, 5, 0.7, 0.04, 11, 0),
    ]
    return lines
