"""`gyre top RUN`: a run on the terminal while it goes on, from its `metrics.jsonl` alone; no process is asked anything.

So it works from a login node, for a run of somebody else, and after the end. One column of a cell's row is an equal part
of the window: the height of its bar is the share of training, and a mark says that it was neither rollout nor training
for most of it. `unfinished` is the waterlevel at its end.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from gyre_hpc.cli_output import clock
from gyre_hpc.config import load_run_config
from gyre_hpc.layout import RunLayout
from gyre_hpc.report import metrics as m
from gyre_hpc.report.spans import ROLE_COLOURS, WORDS, Roles, Span

BARS: Final = "▁▂▃▄▅▆▇█"
MARKS: Final = {"switching": "▒", "starting": "·", "down or lost": "x"}
"""Of roles that are no work."""
WORK: Final = f"{ROLE_COLOURS['training']} on {ROLE_COLOURS['rollout']}"
LEFT: Final = 12
"""Columns of a row's name."""
RIGHT: Final = 34
"""Columns for the words behind a row."""
SHORTEST_S: Final = 60.0
"""Of the window, when the run is younger than it."""
SILENT_S: Final = 60.0
"""A live run writes a line every few seconds; silent for so long it waits, hangs or is dead."""
FAULTS: Final = 3
PACE_STEPS: Final = 10
"""The time left is reckoned from so many last steps."""


@dataclass
class Board:
    """What a run has come to, line by line; of all that grows with time only `window` seconds are kept."""

    window: float
    now: float = 0.0
    roles: Roles = field(default_factory=Roles)
    water: deque[m.Water] = field(default_factory=deque)
    busy: deque[m.Busy] = field(default_factory=deque)
    steps: list[m.Step] = field(default_factory=list)
    points: list[m.Evaluated] = field(default_factory=list)
    faults: deque[m.Fault] = field(default_factory=lambda: deque(maxlen=FAULTS))
    counts: Counter[str] = field(default_factory=Counter)
    """Faults, switches, and calls by what became of them."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Executions that ended, by closing reason."""

    def add(self, lines: Sequence[m.AnyMetric]) -> None:
        """The next lines."""
        for line in lines:
            self.now = line.t
            self.roles.add(line)
            self._note(line)
        since = self.now - self.window
        self.roles.forget(since)
        while len(self.water) > 1 and self.water[1].t < since:
            self.water.popleft()
        while self.busy and self.busy[0].t < since:
            self.busy.popleft()

    def _note(self, line: m.AnyMetric) -> None:
        match line:
            case m.Water():
                self.water.append(line)
            case m.Busy():
                self.busy.append(line)
            case m.Step():
                self.steps.append(line)
            case m.Restored(version=version):
                self.steps = [step for step in self.steps if step.version <= version]
            case m.Evaluated():
                self.points.append(line)
            case m.Switch():
                self.counts["switches"] += 1
            case m.Fault():
                self.counts["faults"] += 1
                self.faults.append(line)
            case m.Ended():
                self.reasons[line.reason] += 1
                self.counts["calls"] += line.calls
                self.counts["re-routed"] += line.calls_rerouted
                self.counts["lost"] += line.calls_lost

    def seconds_per_step(self) -> float | None:
        """Of the last steps; None before there are two."""
        last = self.steps[-PACE_STEPS - 1 :]
        return (last[-1].t - last[0].t) / (len(last) - 1) if len(last) > 1 else None


def sparkline(values: Sequence[float | None], low: float, high: float) -> str:
    """One bar each, from `low` to `high`; a gap for None."""
    height = (high - low) or 1.0
    top = len(BARS) - 1
    return "".join(
        " " if value is None else BARS[max(0, min(top, round((value - low) / height * top)))]
        for value in values
    )


def strip(spans: Sequence[Span], start: float, part: float, columns: int) -> list[dict[str, float]]:
    """Seconds of each role, by its word, in each column of `part` seconds."""
    shares: list[defaultdict[str, float]] = [defaultdict(float) for _ in range(columns)]
    for _, role, begin, end in spans:
        first, last = math.floor((begin - start) / part), math.floor((end - start) / part)
        for at in range(max(0, first), min(columns - 1, last) + 1):
            left = start + at * part
            inside = min(end, left + part) - max(begin, left)
            if inside > 0:
                shares[at][WORDS.get(role, "starting")] += inside
    return [dict(share) for share in shares]


def column(seconds: Mapping[str, float]) -> tuple[str, str]:
    """(character, style) of one column."""
    if not seconds:
        return " ", ""
    work = seconds.get("rollout", 0.0) + seconds.get("training", 0.0)
    most = max((word for word in seconds if word in MARKS), key=lambda word: seconds[word], default="")
    if most and seconds[most] > work:
        return MARKS[most], ROLE_COLOURS[most]
    training = seconds.get("training", 0.0)
    return sparkline(
        [training], 0.0, work
    ), WORK if training else f"{ROLE_COLOURS['rollout']} on {ROLE_COLOURS['rollout']}"


@dataclass(frozen=True)
class View:
    """How a board is shown: `name` of the run, its planned steps, and the size of the terminal in characters."""

    name: str
    steps: int
    width: int
    height: int

    def of(self, board: Board, silent_s: float, *, ended: bool) -> Group:
        """All lines; `silent_s`: since the last metric was written."""
        head = [self._headline(board, silent_s, ended=ended)]
        if not board.now:
            return Group(*head, Text("nothing is measured yet: the job waits, or its controller starts"))
        tail = [*self._legend(board), *self._counts(board)]
        head += [self._scores(board), self._water(board)]
        room = max(1, self.height - len(head) - len(tail) - 2)
        return Group(*head, *self._cells(board, room), *tail)

    def _columns(self) -> int:
        return max(10, self.width - LEFT - RIGHT)

    def _window(self, board: Board) -> tuple[float, float]:
        """(start, seconds of one column)."""
        window = min(board.window, max(SHORTEST_S, board.now))
        return board.now - window, window / self._columns()

    def _headline(self, board: Board, silent_s: float, *, ended: bool) -> Text:
        words = [self.name, f"step {len(board.steps)}/{self.steps}", clock(board.now)]
        pace = board.seconds_per_step()
        if pace is not None and not ended:
            left = max(0, self.steps - len(board.steps)) * pace
            words += [f"{pace:.1f} s a step, {clock(left)} left"]
        text = Text("   ".join(words), style="bold")
        if ended:
            text.append("   ended")
        elif silent_s > SILENT_S:
            text.append(f"   nothing new for {clock(silent_s)}", style="bold red")
        return text

    def _scores(self, board: Board) -> Text:
        scores = [step.score for step in board.steps[-self._columns() :]]
        known = [score for score in scores if score is not None]
        bars = sparkline(scores, min([0.0, *known]), max([1.0, *known]))
        return self._row("score", Text(bars), f"{known[-1]:.3f} of the last step" if known else "-")

    def _water(self, board: Board) -> Text:
        start, part = self._window(board)
        values: list[float | None] = []
        lines, at = list(board.water), 0
        for index in range(self._columns()):
            while at < len(lines) and lines[at].t <= start + (index + 1) * part:
                at += 1
            values.append(float(lines[at - 1].waterlevel) if at else None)
        top = max([1.0, *(value for value in values if value is not None)])
        words = (
            f"{lines[-1].waterlevel}, {lines[-1].running} running, capacity {lines[-1].capacity}"
            if lines
            else "-"
        )
        return self._row("unfinished", Text(sparkline(values, 0.0, top)), words)

    def _cells(self, board: Board, room: int) -> list[Text]:
        start, part = self._window(board)
        spans: defaultdict[int, list[Span]] = defaultdict(list)
        for span in board.roles.spans(board.now):
            spans[span[0]].append(span)
        busy = _busy_shares(board.busy)
        cells = sorted(spans)
        shown = cells if len(cells) <= room else cells[: max(1, room - 1)]
        rows = []
        for cell in shown:
            bar = Text()
            for seconds in strip(spans[cell], start, part, self._columns()):
                bar.append(*column(seconds))
            role, since = board.roles.current.get(cell, (m.GONE, board.now))
            share = f", busy {busy[cell]:.0%}" if cell in busy else ""
            rows.append(self._row(f"cell-{cell}", bar, f"{role} {clock(board.now - since)}{share}"))
        if len(shown) < len(cells):
            rows.append(Text(f"{'':<{LEFT}}and {len(cells) - len(shown)} more"))
        return rows

    def _legend(self, board: Board) -> list[Text]:
        _, part = self._window(board)
        text = Text(" " * LEFT)
        text.append(*column({"rollout": 1.0})).append(" rollout  ")
        text.append(*column({"training": 1.0})).append(" training  ")
        for word, mark in MARKS.items():
            text.append(mark, style=ROLE_COLOURS[word]).append(f" {word}  ")
        at = Counter(WORDS.get(role, "starting") for role, _ in board.roles.current.values())
        now = ", ".join(f"{count} {word}" for word, count in at.items())
        return [text, Text(f"{'':<{LEFT}}one column is {part:.1f} s; now {now or 'no cell'}")]

    def _counts(self, board: Board) -> list[Text]:
        reasons = "  ".join(f"{reason} {count}" for reason, count in sorted(board.reasons.items()))
        calls = f"{board.counts['calls']}, re-routed {board.counts['re-routed']}, lost {board.counts['lost']}"
        held = [point for point in board.points if point.score is not None]
        scores = "  ".join(
            f"{point.score:.3f} +- {point.score_se or 0.0:.3f} (version {point.version})"
            for point in (held if len(held) < 4 else [held[0], *held[-2:]])
        )
        return [
            Text(f"{'held-out':<{LEFT}}{scores or '-'}"),
            Text(f"{'executions':<{LEFT}}{reasons or '-'}"),
            Text(f"{'calls':<{LEFT}}{calls}"),
            Text(f"{'switches':<{LEFT}}{board.counts['switches']}   faults {board.counts['faults']}"),
            *(
                Text(f"{'':<{LEFT}}{clock(fault.t)} {fault.who}: {fault.what}", style="red")
                for fault in board.faults
            ),
        ]

    def _row(self, name: str, bar: Text, words: str) -> Text:
        text = Text(f"{name:<{LEFT}}", no_wrap=True, overflow="ellipsis")
        bar.pad_right(self._columns() - len(bar))
        return text.append_text(bar).append(f"  {words}")


def _busy_shares(lines: Sequence[m.Busy]) -> dict[int, float]:
    """Of each cell, over the lines given."""
    seconds: defaultdict[int, float] = defaultdict(float)
    busy: defaultdict[int, float] = defaultdict(float)
    for line in lines:
        seconds[line.cell] += line.seconds
        busy[line.cell] += line.busy
    return {cell: busy[cell] / whole for cell, whole in seconds.items() if whole > 0}


def top(layout: RunLayout, console: Console, *, window: float, every: float, once: bool) -> None:
    """Show the run until it has ended, or is interrupted; `once`: one picture. Raises CorruptRecord."""
    planned = load_run_config(layout.root).schedule.steps
    tail, board = m.MetricsTail(layout.metrics), Board(window)

    def picture() -> tuple[Group, bool]:
        ended = _ended(layout)
        board.add(tail.new())
        view = View(layout.root.name, planned, console.width, console.height)
        return view.of(board, _silent_s(layout), ended=ended), ended

    if once:
        console.print(picture()[0])
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            shown, ended = picture()
            live.update(shown, refresh=True)
            if ended:
                return
            time.sleep(every)


def _ended(layout: RunLayout) -> bool:
    """A run writes its summary at its end; one that goes on measures anew."""
    try:
        return layout.summary.stat().st_mtime_ns >= layout.metrics.stat().st_mtime_ns
    except FileNotFoundError:
        return False


def _silent_s(layout: RunLayout) -> float:
    try:
        return max(0.0, time.time() - layout.metrics.stat().st_mtime)
    except FileNotFoundError:
        return 0.0
