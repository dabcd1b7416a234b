"""Runs on paced devices: what `gyre bench schedule` starts, and what it reads off them.

Engines and trainers keep to a rate far below what the CPU could do (conf/experiment/paced.yaml), executions follow a script
(scripted_agent.py) whose lengths and scores depend on (task, seed) alone, and the policy is random and hardly moves. So
runs of different schedule policies meet the same work and the same device speeds; all else is the real job: `gyre train`
as a process of its own with controller, cells, gateway, runner and processor.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from gyre_hpc import models
from gyre_hpc.bench import scripted_agent
from gyre_hpc.config import TasksConfig
from gyre_hpc.errors import GyreError
from gyre_hpc.executions.sandbox import fast_python
from gyre_hpc.report import metrics as m
from gyre_hpc.simulate.presets import trace_path
from gyre_hpc.simulate.trace_files import trace_workload

log = logging.getLogger(__name__)
POLL_S = 1.0
OUTPUT = "output"
STOP_S = 60.0
"""Seconds a run gets to end after SIGTERM."""


# ---- the workload -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Script:
    """Lengths of scripted executions. Seconds at nominal speed; sigmas of the log-normal's two factors."""

    mean_s: float = 6.0
    task_sigma: float = 0.25
    execution_sigma: float = 0.45
    turn_s: float = 1.2
    answer_tokens: int = 8
    tokens_per_s: float = 12.5
    """Nominal speed of one call: engine.tokens_per_s / engine.capacity."""
    lengths: str = ""
    """File of recorded lengths (write_recorded_lengths), which stand for the mean and the sigmas."""

    def command(self) -> list[str]:
        """`harness.command`."""
        drawn = {
            "mean": self.mean_s,
            "task-sigma": self.task_sigma,
            "execution-sigma": self.execution_sigma,
            "turn-s": self.turn_s,
            "answer-tokens": self.answer_tokens,
            "tokens-per-s": self.tokens_per_s,
        }
        return command(drawn) + (["--lengths", self.lengths] if self.lengths else [])


def command(drawn: Mapping[str, float]) -> list[str]:
    """`harness.command`: the scripted agent with these numbers."""
    program = [fast_python(), "-I", "-S", str(Path(scripted_agent.__file__))]
    given = ["--base-url", "{base_url}", "--workspace", "{workspace}"]
    given += ["--instruction", "{instruction}", "--seed", "{seed}"]
    return program + given + [word for name, value in drawn.items() for word in (f"--{name}", f"{value:g}")]


@dataclass(frozen=True)
class PacedTask:
    """One query: an empty workspace; the evaluator reads the score that the program drew."""

    seed: int

    @property
    def id(self) -> str:
        return f"paced:{self.seed}"

    @property
    def instruction(self) -> str:
        """The program draws from the number at its end."""
        return f"Task {self.seed}"

    def prepare(self, workspace: Path) -> None:
        """Nothing to prepare."""

    def hidden(self, folder: Path) -> None:
        """Nothing to hide."""

    def evaluator(self, hidden: Path) -> list[str]:
        """Prints the score line."""
        return ["/bin/cat", f"{{workspace}}/{scripted_agent.SCORE_FILE}"]


class PacedFamily:
    """tasks.family=gyre_hpc.bench.paced/PacedFamily."""

    def __init__(self, config: TasksConfig) -> None:
        del config

    def task(self, seed: int) -> PacedTask:
        """The task of this seed."""
        return PacedTask(seed)


def write_recorded_lengths(path: Path, mean_s: float, limit_s: float) -> None:
    """Lengths of conf/traces/terminal_bench.csv, each recorded run scaled so that, cut at the limit, they have this mean.

    What is longer than the limit runs into it, together.
    """
    trace = trace_workload(trace_path("terminal_bench.csv"), limit_s, 1.0, mean_s)
    queries = [
        [2 * limit_s if second >= limit_s else second for second in members]
        for run in trace.runs
        for members in run.queries
    ]
    path.write_bytes(msgspec.json.encode(queries))


def write_random_policy(folder: Path, seed: int = 0, context: int = 2048) -> None:
    """A policy that samples almost uniformly: answers end by their length, whatever it learns in a short run."""
    from gyre_hpc.models.shape import read_shape
    from gyre_hpc.training.new_model import write_new_model

    shipped = models.resolve("package:patchkit")
    write_new_model(folder, read_shape(shipped), seed, context=context)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(shipped / name, folder / name)


# ---- one run ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """CPU seconds at one moment: used by all programs, by the run's own, and there to be used; and the steps taken."""

    steps: int
    busy: float
    own: float
    total: float


@dataclass(frozen=True)
class Run:
    """A run that has ended: its metrics, the CPU samples taken meanwhile, its folder, and whether its time was over first."""

    lines: list[m.AnyMetric]
    loads: list[Load]
    folder: Path | None = None
    cut: bool = False

    def cpu_shares(self, first: int, last: int) -> tuple[float, float]:
        """(all programs, the run's own) share of the machine's CPUs from step `first` to step `last`."""
        begin = next(load for load in self.loads if load.steps >= first)
        end = next((load for load in self.loads if load.steps >= last), self.loads[-1])
        seconds = end.total - begin.total
        return (end.busy - begin.busy) / seconds, (end.own - begin.own) / seconds


def overrides(script: Script, policy: Path, root: Path) -> list[str]:
    """What every paced run adds to experiment=paced."""
    words = ",".join(msgspec.json.encode(word).decode() for word in script.command())
    return ["experiment=paced", f"model.path={policy}", f"root={root}", f"harness.command=[{words}]"]


Told = Callable[[int, float], None]
"""Hears (steps taken, seconds since the start)."""


def _silent(steps: int, seconds: float) -> None:
    """Nobody listens."""


def run(
    arguments: list[str], root: Path, timeout_s: float, *, told: Told = _silent, may_cut: bool = False
) -> Run:
    """`gyre train` with these overrides in the empty folder `root`; `told` hears of it about once a second.

    Raises GyreError with its last words if it fails, or takes too long: unless `may_cut`, then it is ended and counts as far as
    it came.
    """
    loads: list[Load] = []
    begin = time.monotonic()
    process = start(arguments, root)
    try:
        while (live := runs_on(process)) and time.monotonic() - begin < timeout_s:
            loads.append(_load(process, lines_of(root, "step")))
            told(loads[-1].steps, time.monotonic() - begin)
    finally:
        end(process)
    failed = not may_cut if live else process.returncode != 0
    if failed:
        raise failure(process, root)
    folders = [path.parent for path in root.glob("*/metrics.jsonl")]
    lines = [line for folder in folders for line in m.read_metrics(folder / "metrics.jsonl")]
    return Run(lines, loads, next(iter(folders), None), live)


def start(arguments: list[str], root: Path) -> psutil.Popen:
    """`gyre train` with these overrides; makes the folder `root`, which also takes its output."""
    root.mkdir(parents=True)
    with (root / OUTPUT).open("wb") as file:
        command = [sys.executable, "-m", "gyre_hpc.cli", "train", *arguments]
        return psutil.Popen(command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)


def failure(process: psutil.Popen, root: Path) -> GyreError:
    """The error of a run that did not end well, with its last words."""
    tail = (root / OUTPUT).read_text(errors="replace")[-2000:]
    return GyreError(f"gyre train ended with {process.returncode} in {root}:\n{tail}", fix=f"see {root}")


def runs_on(process: psutil.Popen) -> bool:
    """Whether the process lives after one more POLL_S."""
    try:
        process.wait(POLL_S)
    except psutil.TimeoutExpired:
        return True
    return False


def end(process: psutil.Popen) -> None:
    """SIGTERM, and SIGKILL to what does not heed it."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(STOP_S)
    except psutil.TimeoutExpired:
        process.kill()
        process.wait()


def lines_of(root: Path, kind: str) -> int:
    """Metrics lines of this kind so far."""
    line = f'"kind":"{kind}"'.encode()
    return sum(path.read_bytes().count(line) for path in root.glob("*/metrics.jsonl"))


def _load(process: psutil.Popen, steps: int) -> Load:
    times = psutil.cpu_times()
    guest = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # counted as user time already
    total = sum(times) - guest
    busy = total - times.idle - getattr(times, "iowait", 0.0)
    return Load(steps, busy, sum(_cpu_seconds(process)), total)


def _cpu_seconds(process: psutil.Popen) -> Iterator[float]:
    """CPU seconds of the live processes of the run; those that ended are counted in their parents."""
    for one in [process, *process.children(recursive=True)]:
        try:
            used = one.cpu_times()
        except psutil.NoSuchProcess:
            continue
        yield used.user + used.system + used.children_user + used.children_system
