"""`gyre bench schedule [--rows NAMES] [--steps N]`: policies live on four paced cells; wall time of an optimizer step.

All meet the same recorded lengths of executions (long tails, time-outs that cluster), seeds and device speeds (paced.py),
at mean staleness 1, each at its best design point. A step costs 13 cell-seconds of training and 8.8 of rollout, a ratio in
the middle of the worlds fitted to the paper; docs/simulate.md shows what other ratios do to the ladder.

    gyre                 mu=3, phi=0, cells leave one by one (the paper's E2)
    colocate             mu=3, phi=0, all four switch as one (C0; with phi=0 streaming changes nothing)
    colocate_pool        mu=2, phi=0.5, three switch as one, the fourth always serves (C2; the paper's 28+4 nodes)
    colocate_pool_whole  the same, training waits for the whole burst (C1)
    async                mu=1, phi=1, fixed 2+2, streaming (A3); with 1+3 or 3+1 one pool alone needs 8.8 s
    async_whole          the same, training waits for the whole batch (A0)

Steady state: from the publication that ends the warm-up to the last one, the same steps in every row. A row that is not through
after TIMEOUT_S is ended and counts with the whole bursts it made, which its figure says. Bounds are the least that any schedule
could take for the same executions (schedule_bounds.py); of a ratio: what it would be if gyre took no longer. Steps differ, so a
row near its aim wants more of them (--steps). The bench refuses to compare runs whose measured staleness differs by more than
0.25, and a run that met more than 80 % CPU use is invalid: then nobody had paced devices.
"""

from __future__ import annotations

import logging
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gyre_hpc.bench import paced
from gyre_hpc.bench.figure import Figure
from gyre_hpc.bench.schedule_bounds import least_seconds_per_step
from gyre_hpc.errors import ConfigError, GyreError, MissingInput
from gyre_hpc.report import metrics as m

log = logging.getLogger(__name__)

MAX_CPU_SHARE = 0.8
MAX_STALENESS_GAP = 0.25
WARM_UP, STEPS = 6, 12
"""Steps before and in the steady state, at most; whole bursts of every row, so that all rows meet the same groups in it."""
TIMEOUT_S = 400.0
MEAN_S, LIMIT_S = 6.0, 13.2
"""Mean length of an execution, and harness.timeout_s of experiment=paced."""
TRAINING = "trainer.tokens_per_s=243"
"""Pace of a training cell: 13 cell-seconds a step."""


class InvalidRun(GyreError):
    """The measurement does not count; the message says what was measured."""


@dataclass(frozen=True)
class Entrant:
    """One policy at its design point. `warm_up`: steps before the steady state; `aim`: least ratio to the first row."""

    name: str
    overrides: tuple[str, ...]
    warm_up: int
    burst: int = 3
    aim: float | None = None

    def measured(self, steps: int) -> int:
        """Steps of the steady state: as many whole bursts as fit into `steps`."""
        return max(1, steps // self.burst) * self.burst


POOL = (
    "schedule=colocate",
    "schedule.steps_per_burst=2",
    "schedule.extra_dispatch=0.5",
    "cluster.standalone=1",
)
FIXED = (
    "schedule=async",
    "schedule.steps_per_burst=1",
    "schedule.extra_dispatch=1",
    "schedule.training_cells=2",
)
WHOLE = ("schedule.streaming=false",)
ENTRANTS = (
    Entrant("gyre", ("schedule=gyre",), WARM_UP),
    Entrant("colocate", ("schedule=colocate",), WARM_UP, aim=1.3),
    Entrant("colocate_pool", POOL, WARM_UP, 2),
    Entrant("colocate_pool_whole", POOL + WHOLE, WARM_UP, 2),
    Entrant("async", FIXED, WARM_UP, 1, aim=1.4),
    Entrant("async_whole", FIXED + WHOLE, WARM_UP, 1, aim=1.4),
)


@dataclass(frozen=True)
class Measured:
    """What one run showed in its steady state. `device_time`: share of each role and cause of idleness."""

    name: str
    seconds_per_step: float
    staleness: float
    cpu_share: float
    own_cpu_share: float
    device_time: dict[str, float]
    reasons: dict[str, int]
    span: str = ""
    """The steps measured, in words."""
    bound_s: float | None = None
    """The least that any schedule could take per step; None if it was not worked out."""

    @property
    def idle(self) -> Figure:
        """Device time without tokens or micro-steps, told by role and cause."""
        causes = {name: share for name, share in self.device_time.items() if not name.endswith(" busy")}
        by_size = sorted(causes.items(), key=lambda item: -item[1])
        told = ", ".join(f"{name} {share:.1%}" for name, share in by_size)
        return Figure(sum(causes.values()), "share of device time", "lower", bound=0.0, against=told)

    def __str__(self) -> str:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in sorted(self.device_time.items()))
        return (
            f"{self.name}: {self.seconds_per_step:.2f} s per step, mean staleness {self.staleness:.2f}, CPU"
            f" {self.cpu_share:.0%} (own {self.own_cpu_share:.0%}); device time: {shares}; executions {self.reasons}"
        )


AIMS = {entrant.name: entrant.aim for entrant in ENTRANTS}


def observe(entrant: Entrant, run: paced.Run, steps: int) -> Measured:
    """The steady state of a run. Raises InvalidRun when it took fewer steps than asked for, or was cut before its first burst."""
    taken = [line for line in run.lines if isinstance(line, m.Step)]
    published = {line.version: line.t for line in run.lines if isinstance(line, m.Burst) and line.version}
    first, wanted = entrant.warm_up, entrant.warm_up + steps
    last = max((version for version in published if first < version <= wanted), default=first)
    if first not in published or last == first or (last < wanted and not run.cut):
        raise InvalidRun(
            f"{entrant.name}: {len(taken)} steps, published {sorted(published)}; needs {first}, {wanted}",
            fix="run on a quiet machine, or measure fewer steps (--steps)",
        )
    begin, end = published[first], published[last]
    stale = [value for line in taken[first:last] for value in line.staleness]
    cpu, own = run.cpu_shares(first, last)
    return Measured(
        name=entrant.name,
        seconds_per_step=(end - begin) / (last - first),
        staleness=sum(stale) / len(stale),
        cpu_share=cpu,
        own_cpu_share=own,
        device_time=_shares(
            [line for line in run.lines if isinstance(line, m.Busy) and begin < line.t <= end]
        ),
        reasons=dict(Counter(line.reason for line in run.lines if isinstance(line, m.Ended))),
        span=f"steps {first + 1} to {last}" + (f" of {wanted}: its time was over" if last < wanted else ""),
        bound_s=_bound(run, first, last),
    )


def _bound(run: paced.Run, first: int, last: int) -> float | None:
    if run.folder is None:
        return None
    try:
        return least_seconds_per_step(run.folder, first, last)
    except MissingInput as error:
        log.warning("no bound: %s", error)
        return None


def _shares(lines: Sequence[m.Busy]) -> dict[str, float]:
    """Device time by role and cause of idleness."""
    total = sum(line.seconds for line in lines)
    shares: defaultdict[str, float] = defaultdict(float)
    for line in lines:
        shares[f"{line.role} {line.cause or 'busy'}"] += line.seconds / total
    return dict(shares)


def figures(results: Sequence[Measured]) -> dict[str, Figure]:
    """Ratios to the first result. Raises InvalidRun when the runs cannot be compared."""
    told = "\n".join(str(result) for result in results)
    busiest = max(result.cpu_share for result in results)
    if busiest > MAX_CPU_SHARE:
        raise InvalidRun(
            f"the machine was {busiest:.0%} busy; above {MAX_CPU_SHARE:.0%} the cells do not keep their pace\n{told}",
            fix="run the bench on a quiet machine",
        )
    values = [result.staleness for result in results]
    if max(values) - min(values) > MAX_STALENESS_GAP:
        raise InvalidRun(
            f"mean staleness differs by more than {MAX_STALENESS_GAP}: staleness must never be sold as speed\n{told}",
            fix="choose design points with the same phi + (mu-1)/2",
        )
    ours, *baselines = results
    found = {
        f"{other.name}_over_{ours.name}": Figure(
            other.seconds_per_step / ours.seconds_per_step,
            "ratio",
            "higher",
            aim=AIMS.get(other.name),
            bound=other.seconds_per_step / ours.bound_s if ours.bound_s else None,
            against=f"{other.name}, seconds per optimizer step",
        )
        for other in baselines
    }
    found["cpu_share"] = Figure(
        busiest, "share", "lower", bound=MAX_CPU_SHARE, against="all CPUs of the machine"
    )
    for result in results:
        found[f"staleness_{result.name}"] = Figure(result.staleness, "steps", "lower")
        found[f"seconds_per_step_{result.name}"] = Figure(
            result.seconds_per_step, "s", "lower", bound=result.bound_s, against=result.span
        )
        found[f"idle_share_{result.name}"] = result.idle
    return found


def measure(
    entrants: Sequence[Entrant], steps: int, script: paced.Script, extra: Sequence[str] = ()
) -> list[Measured]:
    """Run the entrants one after the other in a scratch folder, and tell how far they are."""
    results = []
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as scratch:
        policy = Path(scratch, "policy")
        paced.write_random_policy(policy)
        for place, entrant in enumerate(entrants, 1):
            root, count = Path(scratch, entrant.name), entrant.measured(steps)
            words = [*paced.overrides(script, policy, root), *entrant.overrides, *extra]
            words.append(f"schedule.steps={entrant.warm_up + count}")
            told = Progress(f"row {place} of {len(entrants)}, {entrant.name}", entrant.warm_up + count)
            finished = paced.run(words, root, TIMEOUT_S, told=told, may_cut=True)
            results.append(observe(entrant, finished, count))
            log.warning("%s", results[-1])
    return results


class Progress:
    """Tells each step that a run has taken, and how long the rest of it will be."""

    def __init__(self, name: str, steps: int) -> None:
        self._name, self._steps = name, steps
        self._first: tuple[int, float] | None = None
        self._told = 0

    def __call__(self, steps: int, seconds: float) -> None:
        if steps == self._told:
            return
        self._told = steps
        self._first = self._first or (steps, seconds)
        made, since = steps - self._first[0], seconds - self._first[1]
        left = f", {since / made * (self._steps - steps):.0f} s left" if made else ""
        log.warning("%s: step %d of %d after %.0f s%s", self._name, steps, self._steps, seconds, left)


def run(rows: str = "", steps: int = STEPS) -> dict[str, Figure]:
    """Figures of the rows named, comma-separated, or of the whole ladder; 150 to 200 seconds a row with 12 steps.

    Raises ConfigError for a row that does not exist, and for less than a step.
    """
    entrants = chosen(rows)
    if steps < 1:
        raise ConfigError(f"{steps} steps", fix=f"measure 1 or more, for example --steps {STEPS}")
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as folder:
        lengths = Path(folder, "lengths.json")
        paced.write_recorded_lengths(lengths, MEAN_S, LIMIT_S)
        return figures(measure(entrants, steps, paced.Script(lengths=str(lengths)), (TRAINING,)))


def chosen(rows: str) -> tuple[Entrant, ...]:
    """Those of the ladder that are named, in its order; the first is what the others are compared with."""
    known = [entrant.name for entrant in ENTRANTS]
    names = rows.split(",") if rows else known
    if unknown := set(names) - set(known):
        raise ConfigError(f"no row {min(unknown)}", fix=f"rows are {', '.join(known)}")
    return tuple(entrant for entrant in ENTRANTS if entrant.name in names)
