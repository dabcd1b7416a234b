"""The phase of every cell over time: its spans, and the words and colours under which people see them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from gyre_hpc.report import metrics as m

BLUE, GREEN, AMBER, GREY, RED = "#2a78d6", "#1a9e6e", "#f0ac1c", "#c9c9c2", "#d8403c"
WORDS = {
    "rollout": "rollout",
    "training": "training",
    "leaving": "switching",
    "joining": "switching",
    "recalled": "switching",
    "returning": "switching",
    "reloading": "switching",
    "loading": "switching",
    "starting": "starting",
    "idle": "starting",
    "down": "down or lost",
    "blocked": "down or lost",
    "quarantined": "down or lost",
    "lost": "down or lost",
}
"""Phase of a cell -> its word in the legend."""
ROLE_COLOURS = {
    "rollout": BLUE,
    "training": GREEN,
    "switching": AMBER,
    "starting": GREY,
    "down or lost": RED,
}
Span = tuple[int, str, float, float]
"""(cell, phase, start, stop) in seconds."""


@dataclass
class Roles:
    """Spans, line by line. Between two controllers of a run there is nothing, nor before a guest has come and after it has gone."""

    current: dict[int, tuple[str, float]] = field(default_factory=dict)
    """Cell -> its phase and since when."""
    ended: list[Span] = field(default_factory=list)
    _opened: float = 0.0
    _before: float = 0.0

    def add(self, line: m.AnyMetric) -> None:
        """The next line of the run."""
        if isinstance(line, m.Opened):
            self.ended += [(cell, role, start, self._before) for cell, (role, start) in self.current.items()]
            self.current.clear()
            self._opened = line.t
        elif isinstance(line, m.RoleChange):
            if line.cell in self.current or line.role != "starting":
                role, start = self.current.get(line.cell, ("starting", self._opened))
                self.ended.append((line.cell, role, start, line.t))
            self.current[line.cell] = (line.role, line.t)
            if line.role == m.GONE:
                del self.current[line.cell]
        self._before = line.t

    def spans(self, end: float) -> list[Span]:
        """All until `end`, in order of time."""
        going = [(cell, role, start, end) for cell, (role, start) in self.current.items()]
        return sorted([*self.ended, *going], key=lambda span: (span[2], span[0]))

    def forget(self, before: float) -> None:
        """Drop what ended before then."""
        self.ended = [span for span in self.ended if span[3] >= before]


def role_spans(lines: Iterable[m.AnyMetric], end: float) -> list[Span]:
    """The spans of a whole run."""
    roles = Roles()
    for line in lines:
        roles.add(line)
    return roles.spans(end)
