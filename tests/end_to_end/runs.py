"""A real `gyre train` with all its processes, watched from outside: its folder, journal, metrics and process table.

Waiting always means waiting for content (a journal entry, a metrics line, a process to end) with a generous limit; a run
that ends while something is awaited fails the test with the end of its output.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import psutil

from gyre_hpc.controller.journal.entries import AnyEntry, Happened, Outcome, StepTaken
from gyre_hpc.controller.journal.journal import read_journal
from gyre_hpc.launch.elsewhere.services import read_service
from gyre_hpc.launch.incarnations import OUTLIVE
from gyre_hpc.layout import RunLayout
from gyre_hpc.report import metrics as m

REPO = Path(__file__).parents[2]
HERE = Path(__file__).parent
LIMIT_S = 400.0
"""Limit of any wait: several times what a loaded machine needs."""
GONE_S = 60.0
"""Processes of a dead controller are killed by the kernel; so long they may take on a loaded machine."""
POLL_S = 0.05
T = TypeVar("T")
E = TypeVar("E")

SMALL = (
    "experiment=quickstart",
    "cluster.cells=2",
    "schedule.steps=2",
    "schedule.batch_groups=2",
    "schedule.executions_per_group=4",
    "engine.capacity=4",
    "tasks.family=tests.end_to_end.toy/Toy",
    "tasks.heldout=0",
    "tasks.sandbox=none",
    "tasks.evaluator_retries=1",
    "trust_tasks=true",
    "model.max_context=512",
    "trainer.tokens_per_micro_step=512",
    "transport.heartbeat_s=0.5",
)
"""Two steps of two groups of four executions, on a core and one satellite, with the agent of these tests."""


class Plan:
    """What the agents do; `release` lets the held ones go. `first`: most tokens of an execution's first call."""

    def __init__(
        self,
        folder: Path,
        *,
        calls: int = 2,
        max_tokens: int = 6,
        silent: Iterable[int] = (),
        hold: Iterable[int] = (),
        hang: Iterable[int] = (),
        broken: Iterable[int] = (),
        first: Mapping[int, int] | None = None,
    ) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        plan = {"calls": calls, "max_tokens": max_tokens, "silent": list(silent), "hold": list(hold)}
        plan |= {"hang": list(hang), "broken": list(broken), "first": dict(first or {})}
        (folder / "plan.json").write_text(json.dumps(plan))

    def release(self, *seeds: int) -> None:
        """Let these executions go, without any all of them."""
        for name in [f"release-{seed}" for seed in seeds] or ["release"]:
            (self.folder / name).touch()

    @property
    def overrides(self) -> list[str]:
        words = [sys.executable, "-I", "-S", str(HERE / "agent.py"), str(self.folder)]
        words += ["{base_url}", "{workspace}", "{seed}"]
        return ["harness.command=[" + ",".join(f"'{word}'" for word in words) + "]"]


class Run:
    """One run folder under `root` and the `gyre train` processes that work on it, one after another."""

    def __init__(self, root: Path, *overrides: str, env: Mapping[str, str] | None = None) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.root = root
        self.output = root.with_name(f"{root.name}.out")
        self._overrides, self._env = [*SMALL, f"root={root}", *overrides], env or {}
        self.process: subprocess.Popen[bytes] | None = None

    # ---- life ---------------------------------------------------------------------------------------------------

    def start(self) -> Run:
        return self._start(self._overrides)

    def resume(self) -> Run:
        return self._start([f"resume={self.folder}"])

    def _start(self, arguments: list[str]) -> Run:
        with self.output.open("ab") as out:
            self.process = gyre("train", *arguments, out=out, env=self._env)
        return self

    def wait(self) -> int:
        """The exit code."""
        assert self.process is not None
        return self.process.wait(LIMIT_S)

    def finish(self) -> None:
        """Wait for a clean end."""
        assert self.wait() == 0, self.tail()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the controller alone."""
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL the controller; nothing else."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Whatever happened: no process of this run stays."""
        if self.process is not None:
            family = self.family()
            if self.process.poll() is None:
                self.kill()
            for process in family:
                quietly(process.kill)

    # ---- waiting ------------------------------------------------------------------------------------------------

    def until(self, what: str, probe: Callable[[], T | None]) -> T:
        """The first true value of `probe`, while the run lives."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            ended = self.process is not None and self.process.poll() is not None
            found = probe()
            if found:
                return found
            assert not ended, f"the run ended while waiting for {what}:\n{self.tail()}"
            assert time.monotonic() < deadline, f"waited in vain for {what}:\n{self.tail()}"
            time.sleep(POLL_S)

    def until_metric(self, kind: type[E], such: Callable[[E], bool] = lambda line: True) -> E:
        """The first metrics line of this kind for which `such` holds."""
        return self.until(kind.__name__, lambda: next(filter(such, self.metrics(kind)), None))

    def until_entry(self, kind: type[E], such: Callable[[E], bool] = lambda entry: True) -> E:
        """The first journal entry of this kind for which `such` holds."""
        return self.until(kind.__name__, lambda: next(filter(such, self.entries(kind)), None))

    # ---- what it left ---------------------------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        """The one run folder."""
        found = self.until("a run folder", lambda: sorted(self.root.glob("*/config.yaml")))
        assert len(found) == 1
        return found[0].parent

    @property
    def layout(self) -> RunLayout:
        return RunLayout(self.folder)

    def journal(self) -> list[AnyEntry]:
        return list(read_journal(self.layout.journal))

    def entries(self, kind: type[E]) -> list[E]:
        return [entry for entry in self.journal() if isinstance(entry, kind)]

    def events(self, kind: type[E]) -> list[E]:
        return [entry.event for entry in self.entries(Happened) if isinstance(entry.event, kind)]

    def metrics(self, kind: type[E]) -> list[E]:
        return [line for line in m.read_metrics(self.layout.metrics) if isinstance(line, kind)]

    def outcomes(self) -> dict[int, Outcome]:
        """The outcome of each execution. Fails on a second one."""
        entries = self.entries(Outcome)
        counts = Counter(entry.outcome.execution for entry in entries)
        assert set(counts.values()) <= {1}, f"more than one outcome: {counts}"
        return {entry.outcome.execution: entry for entry in entries}

    def versions(self) -> list[int]:
        return [entry.version for entry in self.entries(StepTaken)]

    def summary(self) -> dict[str, object]:
        return dict(json.loads(self.layout.summary.read_text()))

    def tail(self) -> str:
        return self.output.read_text(errors="replace")[-3000:]

    # ---- processes ------------------------------------------------------------------------------------------------

    def family(self) -> list[psutil.Process]:
        """All living descendants of the controller, and the services that outlived an earlier one with theirs."""
        assert self.process is not None
        pid = self.process.pid
        own = quietly(lambda: psutil.Process(pid).children(recursive=True)) or []
        for survivor in self.survivors():
            own += [process for process in (survivor, *descendants(survivor)) if process not in own]
        return own

    def survivors(self) -> list[psutil.Process]:
        """Gateway and runner that live, whoever started them."""
        found = sorted(self.root.glob("*/config.yaml"))
        records = [read_service(RunLayout(path.parent), kind) for path in found for kind in OUTLIVE]
        pids = [record.process.pid for record in records if record and not record.process.gone()]
        return [found for pid in pids if (found := quietly(lambda pid=pid: psutil.Process(pid)))]  # type: ignore[misc]

    def processes(self, *words: str) -> list[psutil.Process]:
        """Living descendants with all these words on their command line, oldest first."""
        return [process for process in self.family() if set(words) <= set(command_line(process))]

    def cell(self, index: int) -> psutil.Process:
        """The leader of a cell."""
        return self.until(
            f"cell {index}",
            lambda: next(iter(self.processes("gyre_hpc.cells.leader", "--cell", str(index))), None),
        )

    def service(self, module: str) -> psutil.Process:
        """The oldest process of a service."""
        return self.until(module, lambda: next(iter(self.processes(f"gyre_hpc.{module}")), None))

    def engine(self, index: int) -> psutil.Process:
        """The engine process of a cell."""
        leader = self.cell(index)
        return self.until(
            f"engine of cell {index}",
            lambda: next(iter(children(leader, "gyre_hpc.engines.torch.server")), None),
        )


def gyre(
    verb: str, *arguments: str, out: object = subprocess.PIPE, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """The command line, in a session of its own, with `env` added to its environment."""
    return subprocess.Popen(
        [sys.executable, "-m", "gyre_hpc.cli", verb, *arguments],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(REPO), "COLUMNS": "200", **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=out,  # type: ignore[call-overload]
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def refused(verb: str, *arguments: str) -> tuple[int, str]:
    """Exit code and output of a command that is expected to fail: an error for a person, never a traceback."""
    process = gyre(verb, *arguments)
    output = process.communicate(timeout=LIMIT_S)[0].decode()
    assert process.returncode != 0, output
    assert "Traceback" not in output, output
    assert "fix:" in output, output
    return process.returncode, output


def command_line(process: psutil.Process) -> list[str]:
    return quietly(process.cmdline) or []


def descendants(process: psutil.Process) -> list[psutil.Process]:
    return quietly(lambda: process.children(recursive=True)) or []


def children(process: psutil.Process, word: str) -> list[psutil.Process]:
    found = quietly(process.children) or []
    return [child for child in found if word in command_line(child)]


def quietly(ask: Callable[[], T]) -> T | None:
    """What psutil says, None of a process that is gone."""
    try:
        return ask()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return None


def all_gone(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that do not end; empty when all do. A pid that another process has got since is not waited for."""
    deadline = time.monotonic() + GONE_S
    while (left := [process for process in processes if lives(process)]) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return left


def lives(process: psutil.Process) -> bool:
    return process.is_running() and quietly(process.status) not in (None, psutil.STATUS_ZOMBIE)
