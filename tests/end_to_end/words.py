"""A task family for harnesses whose policy writes nonsense: the score says whether its last words are of even length."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gyre_hpc.config import TasksConfig

EVALUATE = """
length=$(wc -c < "$1/answer" 2>/dev/null || echo 0)
printf '{"score": %s}\\n' $((length % 2))
"""


@dataclass(frozen=True)
class WordsTask:
    """One query."""

    seed: int

    @property
    def id(self) -> str:
        return f"words:{self.seed}"

    @property
    def instruction(self) -> str:
        return f"Say something about the number {self.seed % 97}."

    def prepare(self, workspace: Path) -> None:
        (workspace / "number").write_text(str(self.seed % 97))

    def hidden(self, folder: Path) -> None:
        (folder / "evaluate.sh").write_text(EVALUATE)

    def evaluator(self, hidden: Path) -> list[str]:
        return ["/bin/sh", str(hidden / "evaluate.sh"), "{workspace}"]


class Words:
    """Factory: tasks.family=tests.end_to_end.words/Words."""

    def __init__(self, config: TasksConfig) -> None:
        self.config = config

    def task(self, seed: int) -> WordsTask:
        return WordsTask(seed)
