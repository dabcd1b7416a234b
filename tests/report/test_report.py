"""report.html: one file that needs no network, with all plots and tables; in a browser the plots are really drawn."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from gyre_hpc.config import RunConfig, save_run_config
from gyre_hpc.layout import RunLayout
from gyre_hpc.report import figures
from gyre_hpc.report import metrics as m
from gyre_hpc.report.finish import finish
from gyre_hpc.report.spans import ROLE_COLOURS
from tests.report import runs
from tests.report.browser import Page, assert_drawn

PLOTS = {"score": ["scatter"], "roles": ["scatter", "bars"], "staleness": ["bars"], "idle": ["bars"]}
"""Plot -> kinds of traces in it."""


def make(root: Path, lines: list[m.AnyMetric]) -> tuple[RunLayout, str]:
    """Finish a run of these lines; what the terminal showed."""
    layout = RunLayout(root)
    runs.write(layout.metrics, lines)
    shown = StringIO()
    finish(layout, Console(file=shown, width=200))
    return layout, shown.getvalue()


def test_the_page_loads_nothing_and_holds_all_plots(tmp_path: Path) -> None:
    layout, _ = make(tmp_path, runs.elastic(5))
    page = Page(layout.report.read_text())
    assert page.loads == []
    assert set(PLOTS) <= set(page.ids)
    for title in ("Score", "Roles under the waterlevel", "Staleness", "Idle time by cause"):
        assert f"|{title}|" in page.text


def test_tiles_and_tables_tell_the_numbers(tmp_path: Path) -> None:
    layout, _ = make(tmp_path, runs.counted())
    text = Page(layout.report.read_text()).text
    assert "|0.300 → 0.700 ± 0.040|held-out score, before → after|" in text
    assert "|22|role switches|" in text and "|8|joins into a batch under way|" in text
    assert "|harness timeout|1|0|" in text and "|completed|2|1|" in text
    assert "|122 seconds|wall time|" in text
    assert "|40% / 20%|idle share, rollout / training|" in text
    assert "|to training|5|2.00|2.00|drain 1.00, release 0.50|" in text


def test_words_of_a_fault_are_escaped(tmp_path: Path) -> None:
    layout, _ = make(tmp_path, [m.Fault(1.0, "cell-1", "<script>alert(1)</script>")])
    source = layout.report.read_text()
    assert "<script>alert" not in source and "&lt;script&gt;alert" in source


def test_a_run_without_a_single_step_has_a_report_too(tmp_path: Path) -> None:
    layout, shown = make(tmp_path, [m.Opened(0.0)])
    assert "no step and no evaluation yet" in layout.report.read_text()
    assert "held-out score before" in shown


def test_the_line_under_the_title_quotes_the_frozen_configuration(tmp_path: Path) -> None:
    config = RunConfig(seed=7)
    config.model.path = "package:patchkit"
    save_run_config(config, tmp_path)
    layout, _ = make(tmp_path, runs.counted())
    assert "4 groups of 8 executions per step" in Page(layout.report.read_text()).text


def test_a_configuration_of_another_version_costs_only_that_line(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("unheard_of: 1\n")
    layout, _ = make(tmp_path, runs.counted())
    assert "|22|role switches|" in Page(layout.report.read_text()).text


def test_finish_leaves_summary_and_shows_table_and_paths(tmp_path: Path) -> None:
    layout, shown = make(tmp_path, runs.counted())
    summary = json.loads(layout.summary.read_text())
    assert summary["score_after"] == 0.7 and summary["idle_share"]["all"]["total"] == 0.5
    assert "0.700 +- 0.040" in shown and "rollout 40%  training 20%  all 50%" in shown
    assert str(layout.report) in shown and str(layout.summary) in shown


def test_cells_stand_in_order_with_the_first_on_top() -> None:
    figure = figures.role_timeline(runs.elastic(2))
    assert list(figure.layout.yaxis2.categoryarray) == ["cell 0", "cell 1", "cell 2"]
    assert figure.layout.yaxis2.autorange == "reversed"


def test_a_role_has_one_colour_and_one_legend_entry_however_many_spans() -> None:
    figure = figures.role_timeline(runs.elastic(8))
    bars = {trace.name: trace.marker.color for trace in figure.data if trace.type == "bar"}
    assert bars == {word: ROLE_COLOURS[word] for word in bars}
    assert {"rollout", "training", "switching"} <= set(bars)
    assert len(figure.data) < 12


@pytest.mark.parametrize(("seconds", "word"), [(100, "seconds"), (900, "minutes"), (40_000, "hours")])
def test_time_has_the_unit_that_reads_best(seconds: float, word: str) -> None:
    assert figures.time_unit(seconds)[1] == word


@pytest.mark.browser
def test_chromium_draws_every_plot_without_a_network(tmp_path: Path) -> None:
    layout, _ = make(tmp_path, runs.elastic(30))
    assert_drawn(layout.report, PLOTS, tmp_path)
