"""The task family of the end-to-end tests: the score is what the agent wrote; without a number the evaluator fails.

Scores alternate inside a group, so every group of at least two valid executions gives micro-steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gyre_hpc.config import TasksConfig

EVALUATE = """
read score < "$1/score" || exit 7
case "$score" in 0|1) printf '{"score": %s}\\n' "$score";; *) echo "no number: $score" >&2; exit 7;; esac
"""


@dataclass(frozen=True)
class ToyTask:
    """One query."""

    seed: int

    @property
    def id(self) -> str:
        return f"toy:{self.seed}"

    @property
    def instruction(self) -> str:
        return "Read the file task."

    def prepare(self, workspace: Path) -> None:
        (workspace / "task").write_text(f"Task {self.seed}: print the sum of {self.seed % 7} and 4.")

    def hidden(self, folder: Path) -> None:
        (folder / "evaluate.sh").write_text(EVALUATE)

    def evaluator(self, hidden: Path) -> list[str]:
        return ["/bin/sh", str(hidden / "evaluate.sh"), "{workspace}"]


class Toy:
    """Factory: tasks.family=tests.end_to_end.toy/Toy."""

    def __init__(self, config: TasksConfig) -> None:
        self.config = config

    def task(self, seed: int) -> ToyTask:
        return ToyTask(seed)
