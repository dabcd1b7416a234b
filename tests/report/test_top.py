"""`gyre top`: what it shows is what the metrics say, however they come."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gyre_hpc.cli import main
from gyre_hpc.composition import compose
from gyre_hpc.config import save_run_config
from gyre_hpc.layout import RunLayout
from gyre_hpc.report import metrics as m
from gyre_hpc.report.spans import Span, role_spans
from gyre_hpc.report.top import BARS, LEFT, MARKS, RIGHT, SHORTEST_S, Board, View, column, sparkline, strip
from tests.report import runs

COLUMNS = 40
PATIENCE_S = 60.0


def shown(board: Board, *, height: int = 40, silent_s: float = 0.0, ended: bool = False) -> list[str]:
    console = Console(width=LEFT + COLUMNS + RIGHT, height=height, file=None, record=True, quiet=False)
    view = View("run", 3, console.width, height)
    with console.capture() as taken:
        console.print(view.of(board, silent_s, ended=ended))
    return taken.get().splitlines()


def board_of(lines: list[m.AnyMetric], window: float = 600.0) -> Board:
    board = Board(window)
    board.add(lines)
    return board


def row(lines: list[str], name: str) -> str:
    return next(line[LEFT:] for line in lines if line.startswith(name))


def a_run(folder: Path, lines: list[m.AnyMetric]) -> RunLayout:
    folder.mkdir()
    save_run_config(compose(["schedule.steps=3"]), folder)
    layout = RunLayout(folder)
    if lines:
        runs.write(layout.metrics, lines)
    return layout


@given(
    st.lists(
        st.tuples(
            st.just(0),
            st.sampled_from(["rollout", "training", "leaving", "lost"]),
            st.floats(0, 50),
            st.floats(0, 50),
        ),
        max_size=6,
    ),
    st.integers(1, 30),
)
def test_every_second_of_a_cell_is_in_the_column_of_its_time(
    rows: list[tuple[int, str, float, float]], columns: int
) -> None:
    spans: list[Span] = [(cell, role, min(ends), max(ends)) for cell, role, *ends in rows]
    start, part = 10.0, 30.0 / columns
    within = sum(max(0.0, min(end, 40.0) - max(begin, start)) for _, _, begin, end in spans)
    shares = strip(spans, start, part, columns)
    assert sum(sum(share.values()) for share in shares) == pytest.approx(within)
    for at, share in enumerate(shares):
        left = start + at * part
        inside = sum(max(0.0, min(end, left + part) - max(begin, left)) for _, _, begin, end in spans)
        assert sum(share.values()) == pytest.approx(inside, abs=1e-6)


def test_a_column_shows_how_much_of_the_work_was_training_and_marks_what_was_no_work() -> None:
    assert column({})[0] == " "
    assert [column({"rollout": 7 - n, "training": n})[0] for n in range(8)] == list(BARS)
    assert column({"rollout": 1.0, "switching": 2.0})[0] == MARKS["switching"]
    assert column({"rollout": 1.0, "training": 1.5, "down or lost": 2.0})[0] == BARS[4]
    assert column({"starting": 1.0, "down or lost": 2.0})[0] == MARKS["down or lost"]


def test_bars_leave_gaps_where_nothing_is_known() -> None:
    assert sparkline([0.0, None, 0.5, 1.0, 7.0], 0.0, 1.0) == "▁ ▅██"
    assert sparkline([3.0], 3.0, 3.0) == "▁"


def test_the_picture_of_a_run_says_what_its_metrics_say() -> None:
    lines = runs.elastic(2)
    picture = shown(board_of(lines))
    assert "step 2/3" in picture[0] and "left" in picture[0] and "nothing new" not in picture[0]
    steps = [line for line in lines if isinstance(line, m.Step)]
    assert f"{steps[-1].score:.3f} of the last step" in row(picture, "score")
    water = [line for line in lines if isinstance(line, m.Water)][-1]
    assert f"{water.waterlevel}, {water.running} running, capacity {water.capacity}" in row(
        picture, "unfinished"
    )
    ended = [line for line in lines if isinstance(line, m.Ended)]
    completed = sum(line.reason == "completed" for line in ended)
    assert f"completed {completed}" in row(picture, "executions")
    assert f"{sum(line.calls for line in ended)}, re-routed" in row(picture, "calls")
    for cell in range(3):
        *_, (_, role, *_) = (span for span in role_spans(lines, lines[-1].t) if span[0] == cell)
        assert f"  {role} " in row(picture, f"cell-{cell}")
    assert all(len(line) <= LEFT + COLUMNS + RIGHT for line in picture)


def test_steps_that_a_restored_core_has_undone_do_not_count() -> None:
    taken = [runs.step(float(n), n, 0.5, (0,), 9) for n in (1, 2, 3)]
    board = board_of([m.Opened(0.0), *taken, m.Restored(4.0, 1)])
    assert "step 1/3" in shown(board)[0]


def test_of_a_long_run_only_the_window_is_kept() -> None:
    lines: list[m.AnyMetric] = [m.Opened(0.0), m.RoleChange(1.0, 7, "rollout")]
    for second in range(2, 5000):
        role = "training" if second % 2 else "rollout"
        water = m.Water(float(second), 1, 1, 1, 0, 0)
        busy = m.Busy(float(second), 0, role, 1.0, 1.0, "")
        lines += [m.RoleChange(float(second), 0, role), water, busy]
    board = board_of(lines, window=100.0)
    assert max(len(board.roles.ended), len(board.water), len(board.busy)) <= 103
    picture = shown(board)
    assert row(picture, "cell-7").startswith(BARS[0] * COLUMNS), "it has not changed its role since"
    assert row(picture, "cell-0").startswith(BARS[4]) or row(picture, "cell-0").startswith(BARS[3])


@pytest.mark.parametrize("window", [30.0, 600.0])
def test_a_young_run_fills_its_bars_from_the_right(window: float) -> None:
    lines = [m.Opened(0.0), m.RoleChange(5.0, 0, "rollout"), m.Fault(20.0, "cell-0", "none")]
    start = 20.0 - min(window, SHORTEST_S)
    bar = row(shown(board_of(lines, window)), "cell-0")[:COLUMNS]
    blank = len(bar) - len(bar.lstrip(" "))
    assert blank == pytest.approx((0.0 - start) / (20.0 - start) * COLUMNS, abs=1.5)


def test_more_cells_than_lines_are_counted() -> None:
    lines: list[m.AnyMetric] = [m.Opened(0.0)]
    lines += [m.RoleChange(1.0, cell, "rollout" if cell % 4 else "training") for cell in range(100)]
    picture = shown(board_of(lines), height=24)
    assert len(picture) < 24
    rows = [line for line in picture if line.startswith("cell-")]
    assert any(f"and {100 - len(rows)} more" in line for line in picture)
    assert any("25 training, 75 rollout" in line for line in picture)


def test_the_last_faults_are_told_with_their_count() -> None:
    lines = [m.Opened(0.0), *(m.Fault(float(n), f"cell-{n}", "signal 9 [bold]") for n in range(1, 6))]
    picture = shown(board_of(lines))
    assert "faults 5" in row(picture, "switches")
    assert [line.strip() for line in picture[-3:]] == [f"0:0{n} cell-{n}: signal 9 [bold]" for n in (3, 4, 5)]


def test_a_run_that_says_nothing_for_long_is_told(tmp_path: Path) -> None:
    board = board_of([m.Opened(0.0), m.RoleChange(5.0, 0, "rollout")])
    assert "nothing new for 2:05" in shown(board, silent_s=125.0)[0]
    assert "nothing new" not in shown(board, silent_s=125.0, ended=True)[0]
    assert "nothing is measured yet" in shown(Board(600.0))[1]


@given(st.lists(st.integers(1, 400), max_size=60))
def test_lines_come_whole_and_once_whatever_pieces_are_written(cuts: list[int]) -> None:
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"tail-{os.getpid()}.jsonl"
    path.unlink(missing_ok=True)
    whole = runs.write(path, runs.counted()).read_bytes()
    tail, found = m.MetricsTail(path), list[m.AnyMetric]()
    path.unlink()
    assert tail.new() == []
    for cut in cuts:
        with path.open("ab") as file:
            file.write(whole[file.tell() : file.tell() + cut])
        found += tail.new()
    with path.open("ab") as file:
        file.write(whole[file.tell() :])
    assert found + tail.new() == runs.counted() and tail.new() == []
    path.unlink()


def test_a_corrupt_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = a_run(tmp_path / "run", [m.Opened(0.0)])
    layout.metrics.write_bytes(layout.metrics.read_bytes() + b"{not json}\n")
    assert main(["top", str(layout.root)]) != 0
    assert f"{layout.metrics}:2:" in capsys.readouterr().err.replace("\n", "")


def test_one_picture_where_the_output_is_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = a_run(tmp_path / "run", runs.elastic(1))
    assert main(["top", str(layout.root)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("run   step 1/3") and "cell-2" in out and out.endswith("\n")


def test_on_a_terminal_it_goes_on_until_the_run_ends(tmp_path: Path) -> None:
    lines = runs.elastic(2)
    layout = a_run(tmp_path / "run", lines[:100])
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "gyre_hpc.cli", "top", str(layout.root), "--every", "0.05"]
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    read = os.read(ours, 1 << 16)
    while b"step 0/3" not in read:
        read += os.read(ours, 1 << 16)
    runs.write(layout.metrics, lines[100:])
    while b"step 2/3" not in read:
        read += os.read(ours, 1 << 16)
    assert process.poll() is None
    layout.summary.write_text("{}")
    assert process.wait(PATIENCE_S) == 0
    while chunk := _read_to_the_end(ours):
        read += chunk
    last = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", read).decode()
    assert "ended" in last.rpartition("step 2/3")[2].partition("\n")[0]


def _read_to_the_end(handle: int) -> bytes:
    try:
        return os.read(handle, 1 << 16)
    except OSError:  # the other side is closed
        return b""
