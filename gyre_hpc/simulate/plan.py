"""`gyre plan burst --from RUN`: the burst length mu, the extra dispatch phi and the number of cells for a staleness bound.

Every candidate is simulated on the recorded durations and costs: the recorded machine split into so many equal cells, the
recorded groups drawn anew for each seed. A few seeds sort out the slow candidates, all seeds measure those that are left;
seconds per step and staleness are of steady state, from a publication to a publication. A candidate whose measured mean
staleness exceeds the bound does not count. JSON: `{"burst": [{steps_per_burst, extra_dispatch, cells, seconds_per_step: {mean,
low, high}, staleness, gap_wc, gap_bb}]}`, fastest first; gaps are time over the bound - 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from math import ceil, floor
from pathlib import Path
from statistics import fmean

import msgspec
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from gyre_hpc.errors import ConfigError
from gyre_hpc.report.intervals import Interval
from gyre_hpc.schedule.settings import PolicyName, Settings
from gyre_hpc.simulate.bounds import burst_barrier_s, work_conservation_s
from gyre_hpc.simulate.from_run import machine, overridden, settings_of
from gyre_hpc.simulate.outcome import Outcome
from gyre_hpc.simulate.recorded import Recording, read_recording
from gyre_hpc.simulate.simulator import simulate
from gyre_hpc.simulate.workload import GroupWork
from gyre_hpc.simulate.world import Place, World, even_cells

STEPS = 24
"""Optimizer steps measured, at least."""
FIRST_SEEDS, SEEDS = 2, 8
KEPT = 8
"""Candidates measured with all seeds."""
HAIR = 0.02
"""Staleness above the bound that is still no violation: a window of steps is never quite steady."""


@dataclass(frozen=True)
class Candidate:
    """A design point on the recorded machine."""

    steps_per_burst: int
    groups_ahead: int
    cells: int


@dataclass(frozen=True)
class Row:
    """A candidate as simulated. Gaps are time over the bound - 1; `gap_bb` is None where the bound does not hold."""

    steps_per_burst: int
    extra_dispatch: float
    cells: int
    seconds_per_step: Interval
    staleness: float
    gap_wc: float
    gap_bb: float | None


def _silent(words: str) -> None:
    """Nobody listens."""


class Planner:
    """Simulates candidates for one recording and policy."""

    def __init__(self, recording: Recording, settings: Settings, world: World) -> None:
        self._recording, self._settings, self._world = recording, settings, world

    def candidates(self, bound: float, cells: Sequence[int]) -> list[Candidate]:
        """mu from 1 on, for each phi = 0, the most that the bound allows, and half of it; in units of whole groups."""
        size, found = self._settings.batch_groups, dict[Candidate, None]()
        for burst in range(1, floor(2 * bound + 1) + 1):
            most = floor((bound - (burst - 1) / 2) * size + 1e-9)
            for ahead in (0, most // 2, most):
                found |= dict.fromkeys(Candidate(burst, ahead, count) for count in cells)
        return list(found)

    def plan(
        self, bound: float, cells: Sequence[int], seeds: int = SEEDS, told: Callable[[str], None] = _silent
    ) -> list[Row]:
        """The best candidates, fastest first. `told` hears how far it is. Raises ConfigError if none meets the bound."""
        rough = self._rough(self.candidates(bound, cells), told)
        fresh = [(row, each) for row, each in rough if row.staleness <= bound + HAIR]
        fresh.sort(key=lambda pair: pair[0].seconds_per_step.mean)
        told(f"measuring the best {len(fresh[:KEPT])} with {seeds} seeds")
        rows = [self.measure(each, seeds) for _, each in fresh[:KEPT]]
        rows = sorted(
            (row for row in rows if row.staleness <= bound + HAIR), key=lambda row: row.seconds_per_step.mean
        )
        if not rows:
            raise ConfigError(f"staleness={bound:g}: no candidate meets it", fix="allow more staleness")
        return rows

    def _rough(
        self, candidates: Sequence[Candidate], told: Callable[[str], None]
    ) -> Iterator[tuple[Row, Candidate]]:
        begin = time.monotonic()
        for done, each in enumerate(candidates):
            left_s = (time.monotonic() - begin) / done * (len(candidates) - done) if done else 0.0
            told(f"{done} of {len(candidates)} candidates, {left_s:.0f} s left" if done else "simulating")
            yield self.measure(each, FIRST_SEEDS), each

    def measure(self, candidate: Candidate, seeds: int) -> Row:
        """One row; seeds from 1 on, because 0 repeats the recorded order."""
        runs = [_Run(self, candidate, seed) for seed in range(1, seeds + 1)]
        size = self._settings.batch_groups
        barriers = [run.seconds / run.burst_barrier_s for run in runs if not candidate.groups_ahead]
        return Row(
            steps_per_burst=candidate.steps_per_burst,
            extra_dispatch=candidate.groups_ahead / size,
            cells=candidate.cells,
            seconds_per_step=Interval.of([run.seconds / run.steps for run in runs]),
            staleness=fmean(run.staleness for run in runs),
            gap_wc=fmean(run.seconds / run.work_conservation_s for run in runs) - 1,
            gap_bb=fmean(barriers) - 1 if barriers else None,
        )

    def settings(self, candidate: Candidate, steps: int) -> Settings:
        """Settings of a run of so many steps."""
        return replace(
            self._settings,
            capacities=self.world(candidate.cells).capacities,
            steps_per_burst=candidate.steps_per_burst,
            groups_ahead=candidate.groups_ahead,
            training_cells=self._training_cells(candidate.cells),
            max_staleness=-1,
            steps=steps,
            evaluate_first=False,
            evaluate_last=False,
        )

    def world(self, cells: int) -> World:
        """The recorded machine in so many equal cells, all of them up."""
        nodes = sum(place.nodes for place in self._world.cells)
        places, _ = even_cells(nodes, cells, sum(self._world.capacities))
        own = tuple(Place(place.nodes, place.capacity) for place in places)
        return replace(self._world, cells=own, heldout=0, evaluate_every=0)

    def groups(self, seed: int) -> Iterator[GroupWork]:
        """Groups of a seed in the order of dispatch."""
        return self._recording.workload.groups(seed, self._settings.executions_dispatched)

    def simulate(self, candidate: Candidate, seed: int, steps: int, until: int) -> Outcome:
        """One run up to a served version."""
        settings, world = self.settings(candidate, steps), self.world(candidate.cells)
        return simulate(settings, world, self._recording.workload, seed, until=until)

    def _training_cells(self, cells: int) -> int:
        """Of async: the same share of the machine."""
        if self._settings.policy is not PolicyName.ASYNC:
            return 0
        share = self._settings.training_cells / len(self._settings.capacities)
        return min(cells - 1, max(1, round(share * cells)))


class _Run:
    """One simulated run from the publication after its warm-up on."""

    def __init__(self, planner: Planner, candidate: Candidate, seed: int) -> None:
        burst = candidate.steps_per_burst
        size = planner.settings(candidate, 1).batch_groups
        span = ceil(candidate.groups_ahead / (size * burst)) + 1
        warm_up, measured = span * burst, ceil(STEPS / burst) * burst
        last = warm_up + measured
        outcome = planner.simulate(candidate, seed, last + 2 * span * burst, last)
        served = [(version, at) for version, at in outcome.published.items() if version >= warm_up]
        if len(served) < 2:
            raise ConfigError(
                f"mu={burst}, phi*B={candidate.groups_ahead}: the simulated run stopped: {outcome.reason}",
                fix="look at the recorded groups: too few of them have two valid executions and unequal rewards",
            )
        (first, begin_s), (end, end_s) = served[0], served[-1]
        taken = [step for step in outcome.steps if first < step.version <= end]
        groups = list(islice(planner.groups(seed), first * size, end * size))
        world = planner.world(candidate.cells)
        self.steps, self.seconds = end - first, end_s - begin_s
        self.staleness = fmean(value for step in taken for value in step.staleness)
        self.work_conservation_s = work_conservation_s(groups, world)
        self.burst_barrier_s = sum(
            burst_barrier_s(groups[at : at + burst * size], world)
            for at in range(0, len(groups), burst * size)
        )


def cell_counts(recording: Recording) -> list[int]:
    """Ways to split the recorded nodes into equal cells of whole nodes: from a quarter to four times as many cells."""
    cells = recording.config.cluster.cells
    nodes = cells * recording.config.cluster.cell.nodes
    most = min(4 * cells, sum(recording.world.capacities))
    counts = [count for count in range(max(1, ceil(cells / 4)), most + 1) if nodes % count == 0]
    return sorted({*counts, cells})


def main(arguments: list[str], console: Console) -> None:
    """The verb. Raises ConfigError and MissingInput."""
    given = _parser().parse_intermixed_args(arguments)
    words = dict(word.partition("=")[::2] for word in given.words)
    own = {name: words.pop(name) for name in ("staleness", "cells", "seeds") if name in words}
    recording = read_recording(given.run)
    config = overridden(recording.config, [f"{key}={value}" for key, value in words.items()])
    counts = [round(count) for count in _numbers("cells", own["cells"], 1)] if "cells" in own else []
    bound = _numbers("staleness", own.get("staleness", "1.5"), 0)[0]
    seeds = round(_numbers("seeds", own.get("seeds", str(SEEDS)), 1)[0])
    planner = Planner(recording, settings_of(config), machine(recording, config))
    quiet = Console(stderr=True, highlight=False, quiet=given.json)
    with quiet.status("simulating") as status:
        rows = planner.plan(bound, counts or cell_counts(recording), seeds, status.update)
    if given.json:
        shown = [asdict(row) | {"seconds_per_step": row.seconds_per_step._asdict()} for row in rows]
        sys.stdout.write(msgspec.json.encode({"burst": shown}).decode() + "\n")
        return
    as_recorded = Candidate(
        config.schedule.steps_per_burst,
        round(config.schedule.extra_dispatch * config.schedule.batch_groups),
        config.cluster.cells,
    )
    _show(recording, rows, planner.measure(as_recorded, seeds), bound, console)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gyre plan",
        description="choose mu, phi and the number of cells on recorded durations",
        epilog="example: gyre plan burst --from runs/quickstart-1 staleness=1.5",
    )
    parser.add_argument("what", choices=("burst",))
    parser.add_argument("--from", dest="run", type=Path, required=True, metavar="RUN", help="run folder")
    parser.add_argument("--json", action="store_true", help="one JSON line")
    parser.add_argument(
        "words",
        nargs="*",
        help="staleness=BOUND (1.5), cells=2,4,8, seeds=N (8), and keys of the run, for example schedule.policy=async",
    )
    return parser


def _numbers(name: str, text: str, least: float) -> list[float]:
    """Numbers between commas, none below `least`. Raises ConfigError."""
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < least:
        raise ConfigError(f"{name}={text}: not from {least:g} up", fix=f"for example {name}={least + 1:g}")
    return found


def _show(recording: Recording, rows: list[Row], recorded: Row, bound: float, console: Console) -> None:
    table = Table("", "mu", "phi", "cells", "s/step", "+- 95 %", r"E\[d]", "over BB", "over WC")
    for name, row in [*((str(place), row) for place, row in enumerate(rows, 1)), ("RUN", recorded)]:
        seconds = row.seconds_per_step
        table.add_row(
            name,
            str(row.steps_per_burst),
            f"{row.extra_dispatch:g}",
            str(row.cells),
            f"{seconds.mean:.4g}",
            f"{seconds.mean - seconds.low:.2g}",
            f"{row.staleness:.2f}",
            "-" if row.gap_bb is None else f"{row.gap_bb:+.1%}",
            f"{row.gap_wc:+.1%}",
        )
    console.print(table)
    console.print(
        f"mean staleness at most {bound:g}; RUN: its own design; BB, WC: lower bounds of any schedule"
    )
    console.print(f"use: {' '.join(_overrides(recording, rows[0]))}")


def _overrides(recording: Recording, best: Row) -> list[str]:
    """What makes a run of the best row."""
    words = [
        f"schedule.steps_per_burst={best.steps_per_burst}",
        f"schedule.extra_dispatch={best.extra_dispatch:g}",
    ]
    cells, nodes = recording.config.cluster.cells, recording.config.cluster.cell.nodes
    if best.cells != cells:
        capacity = sum(recording.world.capacities) // best.cells
        words += [f"cluster.cells={best.cells}", f"engine.capacity={capacity}"]
        words += [f"cluster.cell.nodes={cells * nodes // best.cells}"] if cells * nodes >= best.cells else []
    return words
