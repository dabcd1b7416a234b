"""The terminal while a run goes on: one line per step and evaluation, one every few seconds in between."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from rich.console import Console

from gyre_hpc.cli_output import clock
from gyre_hpc.controller.cells.cell_rows import Cell
from gyre_hpc.report import metrics as m
from gyre_hpc.schedule.state import State

STATUS_S = 10.0


class Progress:
    """Prints; knows only what it is told."""

    def __init__(
        self,
        steps: int,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._clock = clock
        self._steps = steps
        self._score: float | None = None
        self._first_step_at: float | None = None
        self._steps_seen = 0
        self._status_at = self._clock()
        self._started = self._clock()

    def step(self, line: m.Step, step: int) -> None:
        """`step` counts those that are not undone; where some were, the version is another number and told too."""
        now = self._clock()
        if self._first_step_at is None:
            self._first_step_at = now - line.seconds
        self._steps_seen += 1
        self._score = line.score
        score = "-" if line.score is None else f"{line.score:.3f}"
        norm = line.metrics.get("grad_norm")
        self.console.print(
            f"step {step:>3}/{self._steps}"
            + (f"  version {line.version}" if line.version != step else "")
            + f"  score {score}  executions {line.executions}"
            f"  tokens {line.tokens_trained}  micro-steps {line.micro_steps}"
            + (f"  grad norm {norm:.3f}" if norm is not None else "")
            + f"  {line.seconds:.1f} s"
        )

    def evaluated(self, line: m.Evaluated) -> None:
        score = "-" if line.score is None else f"{line.score:.3f}"
        error = "" if line.score_se is None else f" +- {line.score_se:.3f}"
        self.console.print(
            f"held-out score of version {line.version}: {score}{error} ({line.executions} executions)"
        )

    def fault(self, who: str, what: str) -> None:
        self.console.print(f"{who}: {what}", style="yellow", markup=False)

    def note(self, text: str) -> None:
        self.console.print(text, markup=False)

    def tick(self, state: State, cells: list[Cell]) -> None:
        """Every few seconds: step, score, waterlevel, cells by role, time left."""
        now = self._clock()
        if now - self._status_at < STATUS_S:
            return
        self._status_at = now
        roles = Counter(str(cell.phase) for cell in cells)
        by_role = " ".join(f"{role}:{count}" for role, count in sorted(roles.items()))
        score = "-" if self._score is None else f"{self._score:.3f}"
        self.console.print(
            f"{clock(now - self._started)}  step {state.steps_done}/{self._steps}  score {score}"
            f"  waterlevel {state.waterlevel}  evaluating {state.evaluating}  cells {by_role}"
            f"  left {self._left(state, now)}",
            style="dim",
        )

    def _left(self, state: State, now: float) -> str:
        if self._first_step_at is None or not self._steps_seen:
            return "?"
        per_step = (now - self._first_step_at) / self._steps_seen
        return "~" + clock(per_step * max(0, self._steps - state.steps_done))
