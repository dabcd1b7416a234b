"""Plots over several designs, and the intervals in them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_hpc.report import comparisons, figures
from gyre_hpc.report.intervals import Interval

values = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=40)


@given(values)
def test_an_interval_lies_around_its_mean(sample: list[float]) -> None:
    found = Interval.of(sample)
    assert found.low <= found.mean <= found.high
    assert found.mean - found.low == pytest.approx(found.high - found.mean, abs=1e-6)


def test_the_interval_of_eight_values_is_students() -> None:
    found = Interval.of([1, 2, 3, 4, 5, 6, 7, 8])
    half = 2.365 * 2.449490 / 8**0.5
    assert (found.mean, found.high - found.mean) == (4.5, pytest.approx(half))


def test_a_single_value_and_equal_values_have_nothing_to_draw() -> None:
    assert not Interval.of([3.0]).known and not Interval.of([3.0, 3.0]).known
    assert Interval.of([3.0, 4.0]).known


def test_idle_bars_stack_to_the_total_in_the_order_of_causes() -> None:
    figure = comparisons.idle_by_design({"A": {"no_work": 0.25, "switching": 0.05}, "B": {"no_work": 0.1}})
    bars = [trace for trace in figure.data if trace.type == "bar"]
    assert [bar.name for bar in bars] == ["nothing to launch", "switching roles"]
    assert [bar.marker.color for bar in bars] == [
        figures.CAUSES[name][1] for name in ("no_work", "switching")
    ]
    assert [sum(parts) for parts in zip(*(bar.x for bar in bars), strict=True)] == [pytest.approx(0.3), 0.1]
    assert [text.strip() for text in figure.data[-1].text] == ["<b>30.0%</b>", "<b>10.0%</b>"]


def test_the_ladder_tells_both_numbers_of_a_row_and_nothing_where_the_paper_is_silent() -> None:
    figure = comparisons.ladder(
        {"A0": Interval(1.6, 1.5, 1.7), "mine": Interval(0.9, 0.9, 0.9)}, {"A0": 1.556}
    )
    bars, paper = figure.data
    assert list(bars.error_x.array) == [pytest.approx(0.1), 0.0]
    assert (list(paper.x), list(paper.y)) == ([1.556], ["A0"])
    words = [note.text for note in figure.layout.annotations]
    assert words == ["simulated", "<b>1.600</b>", "<b>0.900</b>", "paper", "1.556"]


def test_the_first_design_stands_on_top() -> None:
    figure = comparisons.ladder({name: Interval(1, 1, 1) for name in "CAB"}, {})
    assert list(figure.layout.yaxis.categoryarray) == ["C", "A", "B"]
    assert figure.layout.yaxis.autorange == "reversed"


def test_ideal_scaling_starts_at_the_fastest_design_and_keeps_node_hours() -> None:
    slow, fast = Interval(9.0, 9.0, 9.0), Interval(4.0, 4.0, 4.0)
    ideal = comparisons.ideal_scaling({"slow": {16: slow, 64: slow}, "fast": {16: fast, 64: fast}})
    assert (min(ideal), max(ideal)) == (16, pytest.approx(64))
    assert all(nodes * seconds == pytest.approx(64.0) for nodes, seconds in ideal.items())


@pytest.mark.parametrize(
    "figure",
    [comparisons.idle_by_design({}), comparisons.ladder({}, {}), comparisons.time_against_nodes({"A": {}})],
)
def test_a_plot_without_data_says_so(figure: comparisons.go.Figure) -> None:
    assert figure.layout.annotations[0].text.startswith("no d")
