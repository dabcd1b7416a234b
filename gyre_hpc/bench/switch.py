"""`gyre bench switch [--switches N]`: role switches under load on four real cells, 200 of them.

One real run (conf/experiment/switch.yaml): controller, cells with their engines, gateway, runner and processor. Scripted
clients keep calls on contexts of some 1,000 tokens under way, so every cell that leaves rollout has calls to move. Read off
the run: seconds of each part of a switch, both ways (metrics.jsonl); calls lost, clients that failed; how long a call ever
waited for us at once (call logs); pages that calls found where they went; memory of all processes, and files in memory that no
process maps, over the switches made.
Beside it, between two engines: the move of a prompt's pages against its prefill (page_move.py).
The run is ended once enough switches were made. Nothing is compared with an absolute time.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gyre_hpc.bench import paced, page_move
from gyre_hpc.bench.figure import Figure
from gyre_hpc.bench.memory import BLOCKS, files_mib, growth, growth_by_kind, memory_by_kind
from gyre_hpc.bench.moves import MoveReader, read_moves
from gyre_hpc.errors import GyreError
from gyre_hpc.gateway.call_log import call_logs
from gyre_hpc.layout import RunLayout
from gyre_hpc.report import metrics as m
from gyre_hpc.transport.region_files import run_folder
from gyre_hpc.transport.regions import run_key
from gyre_hpc.transport.rendezvous import read_secret

log = logging.getLogger(__name__)

SWITCHES = 200
CONTEXT_WORDS, CALLS, ANSWER_TOKENS = 220, 2, 32
"""A context of 220 words has 1,000 tokens."""
WARM_UP = 0.25
"""Share of the switches after which memory is looked at: allocators and caches have their size by then."""
TIMEOUT_S = 60.0
TIMEOUT_PER_SWITCH_S = 6.0
ENDED_BY_US = (0, 143)


class TooFewSwitches(GyreError):
    """The run ended, or its time was over, before enough switches were made."""


@dataclass(frozen=True)
class Run:
    """What a run left: its metrics lines, moves of calls, and memory (MiB by kind of process) at numbers of switches."""

    lines: list[m.AnyMetric]
    moves: MoveReader
    counts: list[int]
    memory: list[dict[str, float]]
    files: list[float]
    """MiB of the run's files in memory, at the same moments."""

    @property
    def switches(self) -> list[m.Switch]:
        """Finished switches, both ways."""
        return [line for line in self.lines if isinstance(line, m.Switch)]


def run(switches: int = SWITCHES) -> dict[str, Figure]:
    """Figures of so many switches."""
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as scratch:
        found = figures(make_switches(Path(scratch), switches))
        return found | page_move.figures(asyncio.run(page_move.measure(Path(scratch))))


def overrides(policy: Path, root: Path) -> list[str]:
    """What the run adds to experiment=switch."""
    drawn = {"calls": CALLS, "context-words": CONTEXT_WORDS, "answer-tokens": ANSWER_TOKENS}
    words = ",".join(msgspec.json.encode(word).decode() for word in paced.command(drawn))
    return ["experiment=switch", f"model.path={policy}", f"root={root}", f"harness.command=[{words}]"]


def make_switches(scratch: Path, switches: int, extra: Sequence[str] = ()) -> Run:
    """Run until so many role switches are over. Raises TooFewSwitches."""
    policy, root = scratch / "policy", scratch / "run"
    paced.write_random_policy(policy, context=4096)
    steps = f"schedule.steps={switches}"
    process = paced.start([*overrides(policy, root), steps, *extra], root)
    counts: list[int] = []
    memory: list[dict[str, float]] = []
    files: list[float] = []
    deadline = time.monotonic() + TIMEOUT_S + TIMEOUT_PER_SWITCH_S * switches
    try:
        while paced.runs_on(process) and time.monotonic() < deadline:
            made = paced.lines_of(root, "switch")
            counts.append(made)
            memory.append(memory_by_kind(process))
            files.append(sum(map(files_mib, _folders_in_memory(root))))
            if made >= switches:
                break
    finally:
        paced.end(process)
    if process.returncode not in ENDED_BY_US:
        raise paced.failure(process, root)
    return _left(root, counts, memory, files, switches)


def _folders_in_memory(root: Path) -> list[Path]:
    """Where the run keeps regions and weights; none before it has a secret."""
    return [run_folder(run_key(read_secret(RunLayout(path.parent)))) for path in root.glob("*/secret")]


def _left(
    root: Path, counts: list[int], memory: list[dict[str, float]], files: list[float], switches: int
) -> Run:
    (folder,) = (path.parent for path in root.glob("*/config.yaml"))
    layout = RunLayout(folder)
    lines, moves = list(m.read_metrics(layout.metrics)), read_moves(call_logs(layout))
    found = Run(lines, moves, counts, memory, files)
    if len(found.switches) < switches:
        raise TooFewSwitches(
            f"{len(found.switches)} of {switches} switches were made in {folder}",
            fix="run the bench on a quiet machine",
        )
    return found


# ---- figures ------------------------------------------------------------------------------------------------------


def figures(run: Run) -> dict[str, Figure]:
    """All figures of a run."""
    return {**_calls(run), **_pages(run.lines), **_memory(run), **_seconds(run.switches)}


def _calls(run: Run) -> dict[str, Figure]:
    ended = [line for line in run.lines if isinstance(line, m.Ended)]
    lost = sum(line.calls_lost for line in ended)
    failed = sum(line.reason != "completed" for line in ended)
    moved, calls = sum(line.calls_rerouted for line in ended), sum(line.calls for line in ended)
    against = (
        f"{calls} calls of {len(ended)} executions, {moved} of them moved in {len(run.switches)} switches"
    )
    moves = [move.held_s for move in run.moves.moves if move.same_version]
    stall = "the longest time a call waited for us at once, queue and prefill at its destination included"
    return {
        "switches": Figure(len(run.switches), "switches", "higher", against=against),
        "calls_lost": Figure(lost, "calls", "lower", aim=0.0, bound=0.0, against=against),
        "executions_failed": Figure(failed, "executions", "lower", aim=0.0, bound=0.0, against=against),
        "harness_stall_s": Figure(run.moves.longest_held_s, "s", "lower", aim=60.0, against=stall),
        **({"moved_call_s": _median("from the cut to the next token", moves)} if moves else {}),
    }


def _median(what: str, values: Sequence[float]) -> Figure:
    against = f"{what}, median of {len(values)}, longest {max(values):.2f} s"
    return Figure(statistics.median(values), "s", "lower", against=against)


def _pages(lines: Sequence[m.AnyMetric]) -> dict[str, Figure]:
    ended = [line for line in lines if isinstance(line, m.Ended)]
    due, found = sum(line.pages_due for line in ended), sum(line.pages_found for line in ended)
    if not due:
        return {}
    against = (
        f"{due} full pages that calls had when their cell left; publications void pages and are left out"
    )
    return {"pages_moved_share": Figure(found / due, "share", "higher", aim=0.99, bound=1.0, against=against)}


def _memory(run: Run) -> dict[str, Figure]:
    first = WARM_UP * max(run.counts)
    kept = [(count, sample) for count, sample in zip(run.counts, run.memory, strict=True) if count >= first]
    if len(kept) < 2 * BLOCKS:
        return {}
    counts = [count for count, _ in kept]
    found = growth_by_kind(counts, [sample for _, sample in kept])
    slope, error = found.pop("all")
    left, wide = growth(counts, run.files[-len(counts) :])
    parts = ", ".join(f"{kind} {value:+.3f}" for kind, (value, _) in found.items())
    against = f"standard error {error:.3f}; by kind of process: {parts}"
    stay = f"standard error {wide:.3f}; files in memory, less KV pages, which are bounded"
    return {
        "memory_growth_mib_per_switch": Figure(slope, "MiB", "lower", aim=0.0, bound=0.0, against=against),
        "files_growth_mib_per_switch": Figure(left, "MiB", "lower", aim=0.0, bound=0.0, against=stay),
    }


def _seconds(switches: Sequence[m.Switch]) -> dict[str, Figure]:
    """Median seconds of each part, both ways; parts without a name are messages and waiting."""
    parts: defaultdict[str, list[float]] = defaultdict(list)
    for switch in switches:
        parts[f"to_{switch.role}_s"].append(switch.seconds)
        for name, seconds in switch.phases.items():
            parts[f"to_{switch.role}_{name}_s"].append(seconds)
    return {
        name: Figure(
            statistics.median(values),
            "s",
            "lower",
            against=f"median of {len(values)}, longest {max(values):.2f} s",
        )
        for name, values in sorted(parts.items())
    }
