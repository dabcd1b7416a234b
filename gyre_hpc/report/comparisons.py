"""Plots that compare designs (policies, cells, burst lengths), one function each, in the look of `figures.py`.

Each takes plain numbers by design name, in the order they are to stand in; `simulate/png.py` prints the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from gyre_hpc.report.figures import (
    CAPACITY,
    CAUSES,
    DESIGN_COLOURS,
    INK,
    MUTED,
    PAPER,
    empty,
    styled,
    time_unit,
)
from gyre_hpc.report.intervals import Interval
from gyre_hpc.report.spans import BLUE

ROW, FRAME = 34, 130
"""Heights in pixels: one design's bar, and everything around the bars."""


def idle_by_design(shares: Mapping[str, Mapping[str, float]]) -> go.Figure:
    """Idle share of all device time by design -> cause -> share, one stacked bar per design."""
    if not shares:
        return empty("no device time observed", 200)
    names, figure = list(shares), go.Figure()
    for cause, (word, colour) in CAUSES.items():
        values = [causes.get(cause, 0.0) for causes in shares.values()]
        if any(values):
            figure.add_bar(
                x=values,
                y=names,
                orientation="h",
                name=word,
                marker={"color": colour},
                hovertemplate=f"%{{y}}, {word}: %{{x:.1%}}<extra></extra>",
            )
    totals = [sum(causes.values()) for causes in shares.values()]
    _labels(figure, totals, names, [f"<b>{total:.1%}</b>" for total in totals])
    _rows(figure, names, "idle share of all device time", barmode="stack")
    figure.update_xaxes(range=[0, 1.12 * max([*totals, 0.01])], tickformat=".0%")
    return figure


def ladder(rows: Mapping[str, Interval], paper: Mapping[str, float]) -> go.Figure:
    """Time per step of each design relative to the reference design, the paper's value beside it."""
    if not rows:
        return empty("no design was run", 200)
    names, figure = list(rows), go.Figure()
    figure.add_bar(
        x=[row.mean for row in rows.values()],
        y=names,
        orientation="h",
        name="simulated, 95 % interval",
        marker={"color": BLUE},
        error_x=_error(list(rows.values())),
        hovertemplate="%{y}: %{x:.3f}<extra></extra>",
    )
    told = [name for name in names if name in paper]
    if told:
        figure.add_scatter(
            x=[paper[name] for name in told],
            y=told,
            mode="markers",
            name="paper",
            marker={"symbol": "diamond", "size": 10, "color": PAPER, "line": {"color": INK, "width": 1.5}},
            hovertemplate="%{y}, paper: %{x:.3f}<extra></extra>",
        )
    figure.add_vline(x=1.0, line={"color": INK, "width": 1}, layer="below")
    _rows(figure, names, "time per step, reference = 1")
    figure.update_xaxes(
        range=[0, 1.04 * max(max(row.high, paper.get(name, 0)) for name, row in rows.items())]
    )
    _column(figure, 80, "simulated", {name: f"<b>{row.mean:.3f}</b>" for name, row in rows.items()}, INK)
    if told:
        _column(figure, 150, "paper", {name: f"{paper[name]:.3f}" for name in told}, MUTED)
    figure.update_layout(margin_r=165)
    return figure


def _column(figure: go.Figure, right: float, head: str, words: Mapping[str, str], colour: str) -> None:
    """Numbers in a column that ends `right` pixels right of the axes."""
    style = {"showarrow": False, "xref": "paper", "x": 1, "xshift": right, "xanchor": "right"}
    figure.add_annotation(text=head, yref="paper", y=1, yanchor="bottom", font={"color": MUTED}, **style)
    for name, word in words.items():
        figure.add_annotation(text=word, y=name, font={"color": colour}, **style)


def time_against_nodes(curves: Mapping[str, Mapping[float, Interval]]) -> go.Figure:
    """Seconds per step of each design by the number of nodes; dotted: the fastest design with ideal scaling."""
    curves = {name: curve for name, curve in curves.items() if curve}
    if not curves:
        return empty("no design was run on several sizes", 200)
    figure = go.Figure()
    unit, word = time_unit(max(point.mean for curve in curves.values() for point in curve.values()))
    ideal = ideal_scaling(curves)
    figure.add_scatter(
        x=list(ideal),
        y=[seconds / unit for seconds in ideal.values()],
        mode="lines",
        name="ideal scaling",
        line={"color": CAPACITY, "width": 1.5, "dash": "dot"},
    )
    for (name, curve), colour in zip(curves.items(), _cycled(len(curves)), strict=True):
        points = [Interval(*(value / unit for value in point)) for point in curve.values()]
        figure.add_scatter(
            x=list(curve),
            y=[point.mean for point in points],
            error_y=_error(points),
            mode="lines+markers",
            name=name,
            line={"color": colour, "width": 2},
            marker={"size": 7},
            hovertemplate=f"{name}, %{{x}} nodes: %{{y:.3g}} {word}<extra></extra>",
        )
    sizes = sorted({nodes for curve in curves.values() for nodes in curve})
    styled(figure, 420, xaxis_title="nodes", yaxis_title=f"{word} per step")
    figure.update_xaxes(type="log", tickvals=sizes, ticktext=[f"{nodes:g}" for nodes in sizes])
    figure.update_yaxes(rangemode="tozero")
    return figure


def ideal_scaling(curves: Mapping[str, Mapping[float, Interval]]) -> dict[float, float]:
    """Nodes -> seconds per step if the fastest design's time on the fewest nodes shrank as nodes grow; a smooth curve."""
    seconds, fewest = min((curve[min(curve)].mean * min(curve), min(curve)) for curve in curves.values())
    most = max(nodes for curve in curves.values() for nodes in curve)
    steps = [fewest * (most / fewest) ** (index / 64) for index in range(65)]
    return {nodes: seconds / nodes for nodes in steps}


def _cycled(count: int) -> list[str]:
    return [DESIGN_COLOURS[index % len(DESIGN_COLOURS)] for index in range(count)]


def _error(points: Sequence[Interval]) -> dict[str, object]:
    return {
        "type": "data",
        "symmetric": False,
        "array": [point.high - point.mean for point in points],
        "arrayminus": [point.mean - point.low for point in points],
        "color": INK,
        "thickness": 1.5,
        "width": 4,
    }


def _labels(figure: go.Figure, x: Sequence[float], names: Sequence[str], words: Sequence[str]) -> None:
    """Text at the right end of each bar."""
    figure.add_scatter(
        x=list(x),
        y=list(names),
        mode="text",
        text=[f" {text}" for text in words],
        textposition="middle right",
        cliponaxis=False,
        showlegend=False,
        hoverinfo="skip",
    )


def _rows(figure: go.Figure, names: Sequence[str], title: str, **layout: object) -> None:
    """One row per design, the first on top; the legend in order of stacking."""
    styled(
        figure, ROW * len(names) + FRAME, xaxis_title=title, bargap=0.3, legend_traceorder="normal", **layout
    )
    figure.update_yaxes(
        categoryorder="array",
        categoryarray=list(names),
        autorange="reversed",
        showgrid=False,
        type="category",
        automargin=True,
        ticksuffix=" ",
    )
