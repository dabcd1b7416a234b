"""`gyre bench scores`: do gyre, colocate and async learn the same? Training scores at equal steps over three seeds.

Nine real runs of patchkit at mean staleness 1, each of nine steps of two groups of four executions. Under one seed, group i
is the same query for every policy, so scores are compared group by group: the standard error is that of the mean
difference, and what differs between queries is in none of it. Two standard errors are met by chance alone once in twenty
comparisons: a figure above its aim is a reason to run again, one far above it (FAULT_SE, by chance once in ten thousand) is a fault.
"""

from __future__ import annotations

import logging
import math
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from gyre_hpc.bench import paced
from gyre_hpc.bench.figure import Figure
from gyre_hpc.errors import GyreError
from gyre_hpc.report import metrics as m

log = logging.getLogger(__name__)

SEEDS: Final = (1, 2, 3)
BATCH_GROUPS, EXECUTIONS, STEPS = 2, 4, 9
AIM_SE: Final = 2.0
FAULT_SE: Final = 4.0
DISTANCE: Final = "_distance"
TIMEOUT_S: Final = 600.0
POLICIES: Final = {
    "gyre": ("schedule=gyre", "schedule.steps_per_burst=3"),
    "colocate": ("schedule=colocate", "schedule.steps_per_burst=3"),
    "async": ("schedule=async", "schedule.steps_per_burst=1", "schedule.extra_dispatch=1"),
}
"""All at mean staleness 1; the first is what the others are compared with."""
RUN: Final = (
    "experiment=quickstart",
    "cluster.cells=2",
    f"schedule.batch_groups={BATCH_GROUPS}",
    f"schedule.executions_per_group={EXECUTIONS}",
    "tasks.heldout=0",
    "tasks.sandbox=none",
    "trust_tasks=true",
    "trainer.checkpoint_every=1000",
)
Scores = dict[tuple[int, int], float]
"""(seed, group) -> mean valid score of its executions."""


class PoliciesDiffer(GyreError):
    """A policy does not learn what the first one learns (names it, with both means)."""


def run() -> dict[str, Figure]:
    """Figures of the nine runs; about five minutes on two cores of their own. Raises PoliciesDiffer."""
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as scratch:
        return agreeing(figures(measure(Path(scratch), SEEDS, STEPS)))


def agreeing(found: dict[str, Figure]) -> dict[str, Figure]:
    """The same figures. Raises PoliciesDiffer if a policy is farther from the first than chance takes it."""
    far = [name for name, figure in found.items() if name.endswith(DISTANCE) and figure.value > FAULT_SE]
    if far:
        told = "; ".join(f"{name} {found[name].value:.1f} ({found[name].against})" for name in far)
        raise PoliciesDiffer(told, fix="compare what the runs trained: metrics.jsonl, gyre report")
    return found


def measure(scratch: Path, seeds: Sequence[int], steps: int, extra: Sequence[str] = ()) -> dict[str, Scores]:
    """Policy -> scores of the groups that these steps are planned for. Raises GyreError if a run fails."""
    found: dict[str, Scores] = {policy: {} for policy in POLICIES}
    for seed in seeds:
        for policy, design in POLICIES.items():
            root = scratch / f"{policy}-{seed}"
            words = [*RUN, *design, f"seed={seed}", f"schedule.steps={steps}", f"root={root}", *extra]
            lines = paced.run(words, root, TIMEOUT_S).lines
            found[policy] |= {
                (seed, group): score
                for group, score in group_scores(lines).items()
                if group < BATCH_GROUPS * steps
            }
            log.warning("seed %d, %s: mean score %.3f", seed, policy, _mean_of(found[policy], seed))
    return found


def group_scores(lines: Sequence[m.AnyMetric]) -> dict[int, float]:
    """Mean score of each group's executions that have one."""
    scores: defaultdict[int, list[float]] = defaultdict(list)
    for line in lines:
        if isinstance(line, m.Ended) and line.group is not None and line.score is not None:
            scores[line.group].append(line.score)
    return {group: statistics.mean(values) for group, values in scores.items()}


def _mean_of(scores: Scores, seed: int) -> float:
    return statistics.mean(score for (of, _), score in scores.items() if of == seed)


def difference(one: Scores, other: Scores) -> tuple[float, float]:
    """(mean difference, its standard error) over the groups that both have. Needs two; raises ValueError."""
    gaps = [one[key] - other[key] for key in one.keys() & other.keys()]
    if len(gaps) < 2:
        raise ValueError(f"{len(gaps)} groups in common; a standard error needs two")
    return statistics.mean(gaps), statistics.stdev(gaps) / math.sqrt(len(gaps))


def figures(scores: Mapping[str, Scores]) -> dict[str, Figure]:
    """Mean score of each policy, and its distance from the first in standard errors."""
    ours, *others = scores
    found = {
        f"score_{policy}": Figure(statistics.mean(groups.values()), "score", "higher", against="all groups")
        for policy, groups in scores.items()
    }
    for policy in others:
        gap, error = difference(scores[policy], scores[ours])
        against = f"{policy} - {ours} = {gap:+.3f}, standard error {error:.3f}, group by group"
        distance = abs(gap) / error if error else math.inf if gap else 0.0
        found[f"{policy}{DISTANCE}"] = Figure(
            distance, "standard errors", "lower", aim=AIM_SE, against=against
        )
    return found
