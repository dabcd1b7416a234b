"""A task family for tests: the score is what the agent wrote into the file `answer`; seeds choose the evaluator."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from gyre_hpc.config import TasksConfig

HONEST = 'printf \'{"score": %s, "evidence": "read"}\\n\' "$(cat answer)"'
CRASHING = "echo broken >&2; exit 7"


@dataclass
class ToyTask:
    """`scripts`: shell text of the evaluator, one per try, the last one for all further tries."""

    seed: int = 0
    scripts: tuple[str, ...] = (HONEST,)
    tries: list[Path] = field(default_factory=list)

    @property
    def id(self) -> str:
        return f"toy:{self.seed}"

    @property
    def instruction(self) -> str:
        return "Write a number {between} 0 and 1 into the file answer."

    def prepare(self, workspace: Path) -> None:
        (workspace / "README").write_text("nothing here yet\n")

    def hidden(self, folder: Path) -> None:
        script = self.scripts[min(len(self.tries), len(self.scripts) - 1)]
        self.tries.append(folder)
        (folder / "evaluate.sh").write_text(script)

    def evaluator(self, hidden: Path) -> list[str]:
        return ["/bin/sh", str(hidden / "evaluate.sh"), "{workspace}"]


class ToyFamily:
    """Odd seeds have an evaluator that crashes."""

    def __init__(self, config: TasksConfig) -> None:
        self.config = config

    def task(self, seed: int) -> ToyTask:
        return ToyTask(seed, (CRASHING,) if seed % 2 else (HONEST,))
