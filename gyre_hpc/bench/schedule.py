"""`gyre bench schedule`: gyre, colocate and async live on four paced cells; wall time of an optimizer step.

All three meet the same tasks, seeds and device speeds (paced.py), at mean staleness 1, each at its best design point:
gyre and colocate with bursts of three steps (mu=3, phi=0), async with mu=1, phi=1 and the split 2+2 that fits the work: a
step costs as much training as rollout, 8.6 cell-seconds each, so with 1+3 or 3+1 one pool alone needs 8.6 s. Both baselines stream: groups train as they become ready, which for async is
stronger than the paper's baseline A0 (its A3) and for colocate with phi=0 changes nothing (its C0).
Steady state: from the publication that ends the warm-up to the last one. The bench refuses to compare runs whose measured
staleness differs by more than 0.25, and a run that met more than 80 % CPU use is invalid: then nobody had paced devices.
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
from gyre_hpc.errors import GyreError
from gyre_hpc.report import metrics as m

log = logging.getLogger(__name__)

MAX_CPU_SHARE = 0.8
MAX_STALENESS_GAP = 0.25
AIM = 1.2
STEPS = 9
"""Steps measured: three bursts of gyre and colocate."""
TIMEOUT_S = 300.0


class InvalidRun(GyreError):
    """The measurement does not count; the message says what was measured."""


@dataclass(frozen=True)
class Entrant:
    """One policy at its design point. `warm_up`: steps before the steady state."""

    name: str
    overrides: tuple[str, ...]
    warm_up: int


ENTRANTS = (
    Entrant("gyre", ("schedule=gyre",), 3),
    Entrant("colocate", ("schedule=colocate",), 3),
    Entrant(
        "async",
        (
            "schedule=async",
            "schedule.steps_per_burst=1",
            "schedule.extra_dispatch=1",
            "schedule.training_cells=2",
        ),
        6,
    ),
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

    def __str__(self) -> str:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in sorted(self.device_time.items()))
        return (
            f"{self.name}: {self.seconds_per_step:.2f} s per step, mean staleness {self.staleness:.2f}, CPU"
            f" {self.cpu_share:.0%} (own {self.own_cpu_share:.0%}); device time: {shares}; executions {self.reasons}"
        )


def observe(entrant: Entrant, run: paced.Run, steps: int) -> Measured:
    """The steady state of a finished run. Raises InvalidRun when it took fewer steps than asked for."""
    taken = [line for line in run.lines if isinstance(line, m.Step)]
    published = {line.version: line.t for line in run.lines if isinstance(line, m.Burst) and line.version}
    first, last = entrant.warm_up, entrant.warm_up + steps
    if len(taken) < last or first not in published or last not in published:
        raise InvalidRun(
            f"{entrant.name}: {len(taken)} steps, published {sorted(published)}; needs {first}, {last}"
        )
    begin, end = published[first], published[last]
    stale = [value for line in taken[first:last] for value in line.staleness]
    cpu, own = run.cpu_shares(first, last)
    return Measured(
        name=entrant.name,
        seconds_per_step=(end - begin) / steps,
        staleness=sum(stale) / len(stale),
        cpu_share=cpu,
        own_cpu_share=own,
        device_time=_shares(
            [line for line in run.lines if isinstance(line, m.Busy) and begin < line.t <= end]
        ),
        reasons=dict(Counter(line.reason for line in run.lines if isinstance(line, m.Ended))),
    )


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
            aim=AIM,
            against=f"{other.name}, seconds per optimizer step",
        )
        for other in baselines
    }
    found["cpu_share"] = Figure(
        busiest, "share", "lower", bound=MAX_CPU_SHARE, against="all CPUs of the machine"
    )
    for result in results:
        found[f"staleness_{result.name}"] = Figure(result.staleness, "steps", "lower")
        found[f"seconds_per_step_{result.name}"] = Figure(result.seconds_per_step, "s", "lower")
    return found


def measure(
    entrants: Sequence[Entrant], steps: int, script: paced.Script, extra: Sequence[str] = ()
) -> list[Measured]:
    """Run the entrants one after the other in a scratch folder."""
    results = []
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as scratch:
        policy = Path(scratch, "policy")
        paced.write_random_policy(policy)
        for entrant in entrants:
            root = Path(scratch, entrant.name)
            words = [*paced.overrides(script, policy, root), *entrant.overrides, *extra]
            words.append(f"schedule.steps={entrant.warm_up + steps}")
            results.append(observe(entrant, paced.run(words, root, TIMEOUT_S), steps))
            log.warning("%s", results[-1])
    return results


def run() -> dict[str, Figure]:
    """Figures of the three policies; about five minutes."""
    return figures(measure(ENTRANTS, STEPS, paced.Script()))
