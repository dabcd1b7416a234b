"""Task family `patchkit`: real folders, real commands, hidden tests with partial credit.

A workspace holds 2..`max_modules` modules (heavy-tailed). Each starts with a spec comment (`# minus 8`) and has a
function `f`; one or more of them have no body yet. `sh check [MODULE...]` runs the visible cases, one line a module, and
takes a log-normal time, as real test suites do. The agent is judged by other inputs, kept outside the workspace:

    score = max(0, (fail-to-pass cases gained - pass-to-pass cases broken) / fail-to-pass cases)

A task is a pure function of its seed. No constant edit scores well: operator and constant differ by module.
Called by the runner; knows nothing of tokens, models or harnesses.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

FILES = Path(__file__).parent / "files"

MODULE_NAMES = ("ash", "bay", "elm", "fir", "oak", "yew")
"""Words, not numbers: digits would collide with the constants a model has to copy."""
PHRASES = {
    "+": ("plus", "add"),
    "-": ("minus", "subtract"),
    "*": ("times", "scale by"),
    "%": ("modulo", "wrap at"),
}
CONSTANTS = range(2, 10)
VISIBLE_INPUTS = (13, 22)
HIDDEN_INPUTS = (11, 19, 28, 41)

SIZE_TAIL = 1.1
"""Pareto exponent of the module count."""
SLEEP_MEDIAN_LOG, SLEEP_SIGMA, SLEEP_CAP_S = -4.2, 1.2, 0.6
"""Log-normal seconds one module's check sleeps: median 15 ms, one in a thousand at the cap."""


def apply(operator: str, x: int, constant: int) -> int:
    """What a right body returns."""
    return {"+": x + constant, "-": x - constant, "*": x * constant, "%": x % constant}[operator]


@dataclass(frozen=True)
class Module:
    """One module of a task: what its comment asks for and whether its body is written."""

    name: str
    operator: str
    phrase: str
    constant: int
    written: bool
    sleep_s: float

    def source(self) -> str:
        """File content at the start of an execution."""
        body = f"return x {self.operator} {self.constant}" if self.written else "return None"
        return f"# {self.phrase} {self.constant}\ndef f(x):\n    {body}\n"

    def expected(self, x: int) -> int:
        """What f(x) returns when the module matches its comment."""
        return apply(self.operator, x, self.constant)


@dataclass(frozen=True)
class PatchkitTask:
    """One query: its workspace, its hidden cases, its evaluator."""

    seed: int
    modules: tuple[Module, ...]

    @property
    def id(self) -> str:
        return f"patchkit:{self.seed}"

    @property
    def instruction(self) -> str:
        """The user's message to the agent."""
        return "Make every module match its comment. Modules: " + " ".join(m.name for m in self.modules)

    @property
    def unwritten(self) -> tuple[Module, ...]:
        """The modules that the agent has to complete (at least one)."""
        return tuple(m for m in self.modules if not m.written)

    def prepare(self, workspace: Path) -> None:
        """Write the workspace as the agent finds it. The folder must exist."""
        for module in self.modules:
            (workspace / f"{module.name}.py").write_text(module.source())
        visible = {
            m.name: (m.sleep_s, tuple((x, m.expected(x)) for x in VISIBLE_INPUTS)) for m in self.modules
        }
        (workspace / "cases.py").write_text(f"tests = {visible!r}\n")
        shutil.copyfile(FILES / "check.py", workspace / "check.py")
        (workspace / "check").write_text(f'exec {interpreter()} -I -S check.py "$@"\n')

    def hidden(self, folder: Path) -> None:
        """Write hidden cases and evaluator; the folder must lie outside the workspace."""
        cases = {
            m.name: {"written": m.written, "cases": [[x, m.expected(x)] for x in HIDDEN_INPUTS]}
            for m in self.modules
        }
        (folder / "cases.json").write_text(json.dumps(cases))
        shutil.copyfile(FILES / "evaluate.py", folder / "evaluate.py")

    def evaluator(self, hidden: Path) -> list[str]:
        """Command that prints `{"score": float, "evidence": str}`; the caller fills in {workspace}."""
        return [
            interpreter(),
            "-I",
            "-S",
            str(hidden / "evaluate.py"),
            "{workspace}",
            str(hidden / "cases.json"),
        ]


@dataclass(frozen=True)
class PatchkitFamily:
    """All tasks of at most `max_modules` modules, one per seed."""

    max_modules: int = len(MODULE_NAMES)

    def __post_init__(self) -> None:
        if not 2 <= self.max_modules <= len(MODULE_NAMES):
            raise ValueError(f"patchkit: max_modules={self.max_modules} is outside 2..{len(MODULE_NAMES)}")

    def task(self, seed: int) -> PatchkitTask:
        """The task of this seed, the same on every machine."""
        draw = random.Random(seed)
        count = min(self.max_modules, 1 + int(draw.paretovariate(SIZE_TAIL)))
        names = sorted(draw.sample(MODULE_NAMES, count))
        unwritten = set(draw.sample(names, draw.randint(1, count)))
        return PatchkitTask(seed, tuple(_module(draw, name, name not in unwritten) for name in names))


def _module(draw: random.Random, name: str, written: bool) -> Module:
    operator = draw.choice(list(PHRASES))
    phrase, constant = draw.choice(PHRASES[operator]), draw.choice(CONSTANTS)
    sleep_s = min(SLEEP_CAP_S, draw.lognormvariate(SLEEP_MEDIAN_LOG, SLEEP_SIGMA))
    return Module(name, operator, phrase, constant, written, round(sleep_s, 3))


def interpreter() -> str:
    """A Python that starts fast (no version-manager shim) and is visible inside a sandbox."""
    system = Path("/usr/bin/python3")
    return str(system if system.exists() else Path(sys.executable).resolve())
