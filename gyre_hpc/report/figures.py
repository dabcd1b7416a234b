"""The plots of a run, one function each, from metrics lines to a plotly figure.

Colours mean the same in every plot: blue rollout, green training, amber switching, grey starting, red lost. Time is
seconds, minutes or hours since the run's first start, whichever reads best. A plot without data says so.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.colors import hex_to_rgb
from plotly.subplots import make_subplots

from gyre_hpc.report import metrics as m
from gyre_hpc.report.spans import AMBER, BLUE, GREY, RED, ROLE_COLOURS, WORDS, role_spans
from gyre_hpc.report.summary import idle_shares

INK, MUTED, GRID, PAPER, ORANGE = "#16181d", "#565a63", "#e6e6e1", "#ffffff", "#e0622a"
WATER, CAPACITY, STEP = "#12406f", "#8b8f99", "#b9bac0"
"""Waterlevel, rollout capacity, and the thin line at an optimizer step."""
FILL_OPACITY = 0.16
"""Of the blue area under the waterlevel."""
CAUSES = {
    "tools": ("waiting for tools", "#7fb2ea"),
    "no_work": ("nothing to launch", "#c7dbf3"),
    "no_micro_steps": ("no micro-steps", "#7fcdb0"),
    "switching": ("switching roles", AMBER),
    "loading": ("loading weights", "#b98612"),
    "starting": ("starting", GREY),
    "down": ("down or lost", RED),
}
"""Cause of idleness -> its word and colour, in order of stacking."""
DESIGN_COLOURS = (WATER, ORANGE, "#7a4fa3", "#0f7c86", "#a8323e", MUTED)
"""Of designs that are compared; none of them means a role."""
CELL_ROW, WATER_ROWS, FRAME = 34, 250, 140
"""Heights in pixels: one cell's bar, the waterlevel plot, and everything around both."""


def styled(figure: go.Figure, height: int, **layout: Any) -> go.Figure:
    """The common look: white ground, dark text, a legend above the plot."""
    figure.update_layout(
        template="plotly_white",
        height=height,
        paper_bgcolor=PAPER,
        plot_bgcolor=PAPER,
        font={"family": "system-ui, -apple-system, Segoe UI, sans-serif", "size": 13, "color": INK},
        margin={"l": 64, "r": 16, "t": 40, "b": 48},
        legend={"orientation": "h", "x": 0, "xanchor": "left", "y": 1.0, "yanchor": "bottom"},
        hoverlabel={"font": {"size": 13}},
    )
    figure.update_layout(**layout)
    figure.update_xaxes(gridcolor=GRID, linecolor=MUTED, zeroline=False, title_standoff=8)
    figure.update_yaxes(gridcolor=GRID, linecolor=MUTED, zeroline=False, title_standoff=8)
    return figure


def empty(text: str, height: int) -> go.Figure:
    figure = go.Figure()
    figure.add_annotation(text=text, showarrow=False, font={"size": 15, "color": MUTED})
    styled(figure, height)
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    return figure


def time_unit(seconds: float) -> tuple[float, str]:
    """(seconds of the unit, its word) that suit a run of this length."""
    if seconds < 180:
        return 1.0, "seconds"
    return (60.0, "minutes") if seconds < 3 * 3600 else (3600.0, "hours")


def score(lines: Sequence[m.AnyMetric]) -> go.Figure:
    """Held-out score with its standard error, over the score of each training batch."""
    points = [line for line in lines if isinstance(line, m.Evaluated) and line.score is not None]
    steps = [line for line in lines if isinstance(line, m.Step) and line.score is not None]
    if not points and not steps:
        return empty("no step and no evaluation yet", 360)
    figure = go.Figure()
    figure.add_scatter(
        x=[line.version for line in steps],
        y=[line.score for line in steps],
        mode="lines+markers",
        name="training batch",
        line={"color": "#9dc3ee", "width": 2},
        marker={"size": 5, "color": BLUE},
    )
    figure.add_scatter(
        x=[line.version for line in points],
        y=[line.score for line in points],
        error_y={"type": "data", "array": [line.score_se for line in points], "thickness": 2, "width": 7},
        mode="markers+lines+text",
        name="held-out tasks, ± standard error",
        line={"color": ORANGE, "width": 2, "dash": "dot"},
        marker={"size": 12},
        text=[f"<b>{line.score:.2f}</b>" for line in points],
        textposition=["top right", *["top center"] * (len(points) - 2), "top left"][: len(points)],
        textfont={"size": 15, "color": "#b4471a"},
        cliponaxis=False,
    )
    values = [value for value in (*(p.score for p in points), *(s.score for s in steps)) if value is not None]
    last = max([*(line.version for line in points), *(line.version for line in steps)])
    styled(figure, 360, xaxis_title="policy version (optimizer steps)", yaxis_title="score")
    figure.update_yaxes(range=[min(0.0, *values), max(1.0, *values) * 1.02], tickformat=".1f")
    figure.update_xaxes(range=[-0.02 * last - 0.2, 1.02 * last + 0.2], tickformat="d")
    if last <= 10:
        figure.update_xaxes(dtick=1)
    return figure


def role_timeline(lines: Sequence[m.AnyMetric]) -> go.Figure:
    """Waterlevel and capacity over the role of every cell; a thin line at each optimizer step."""
    cells = sorted({line.cell for line in lines if isinstance(line, m.RoleChange)})
    if not cells:
        return empty("no cell has started yet", 200)
    rows = CELL_ROW * len(cells)
    inner = WATER_ROWS + rows
    unit, word = time_unit(lines[-1].t)
    figure = make_subplots(
        rows=2,
        cols=1,
        shared_xaxes=True,
        row_heights=[WATER_ROWS / inner, rows / inner],
        vertical_spacing=16 / inner,
    )
    _water(figure, [line for line in lines if isinstance(line, m.Water)], lines[-1].t, unit)
    _roles(figure, lines, unit)
    _joins(figure, [line for line in lines if isinstance(line, m.Join) and line.mid_batch], unit)
    figure.update_layout(shapes=_step_lines([line.t / unit for line in lines if isinstance(line, m.Step)]))
    below = {"orientation": "h", "x": 0, "xanchor": "left", "y": -50 / inner, "yanchor": "top"}
    styled(figure, inner + FRAME, barmode="overlay", bargap=0.22, legend2=below)
    figure.update_layout(margin_b=90)
    figure.update_yaxes(title_text="executions", rangemode="tozero", row=1, col=1)
    names = [f"cell {cell}" for cell in cells]
    figure.update_yaxes(categoryorder="array", categoryarray=names, autorange="reversed", row=2, col=1)
    figure.update_yaxes(showgrid=False, row=2, col=1)
    figure.update_xaxes(range=[0, lines[-1].t / unit])
    figure.update_xaxes(title_text=f"{word} since the start", row=2, col=1)
    return figure


def _step_lines(times: Sequence[float]) -> list[dict[str, Any]]:
    """A vertical line at each time, set in one go: plotly adds single shapes in quadratic time."""
    line = {"type": "line", "xref": "x", "yref": "paper", "y0": 0, "y1": 1, "layer": "below"}
    return [line | {"x0": time, "x1": time, "line": {"color": STEP, "width": 1}} for time in times]


def _water(figure: go.Figure, changes: Sequence[m.Water], end: float, unit: float) -> None:
    water = [*changes, *changes[-1:]]
    times = [*(line.t / unit for line in changes), end / unit][: len(water)]
    traces: list[tuple[str, Sequence[int | None], dict[str, Any]]] = [
        (
            "waterlevel (unfinished executions)",
            [line.waterlevel for line in water],
            {
                "line": {"color": WATER, "width": 2},
                "fill": "tozeroy",
                "fillcolor": f"rgba{(*hex_to_rgb(BLUE), FILL_OPACITY)}",
            },
        ),
        (
            "rollout capacity",
            [line.capacity for line in water],
            {"line": {"color": CAPACITY, "width": 1.2}},
        ),
    ]
    if any(line.evaluating for line in water):
        style = {"line": {"color": ORANGE, "width": 1.5}}
        traces.append(("running evaluations", [line.evaluating or None for line in water], style))
    for name, values, style in traces:
        style["line"] |= {"shape": "hv"}
        figure.add_scatter(x=times, y=values, name=name, mode="lines", row=1, col=1, **style)


def _roles(figure: go.Figure, lines: Sequence[m.AnyMetric], unit: float) -> None:
    by_word: dict[str, list[tuple[int, str, float, float]]] = defaultdict(list)
    for span in role_spans(lines, lines[-1].t):
        if span[3] > span[2]:
            by_word[WORDS.get(span[1], "starting")].append(span)
    for word, colour in ROLE_COLOURS.items():
        spans = by_word[word]
        if not spans:
            continue
        figure.add_bar(
            x=[(stop - start) / unit for _, _, start, stop in spans],
            base=[start / unit for _, _, start, _ in spans],
            y=[f"cell {cell}" for cell, _, _, _ in spans],
            orientation="h",
            marker={"color": colour, "line": {"width": 0}},
            name=word,
            legend="legend2",
            customdata=[(role, stop - start) for _, role, start, stop in spans],
            hovertemplate="%{y}: %{customdata[0]}, %{customdata[1]:.1f} s<extra></extra>",
            row=2,
            col=1,
        )


def _joins(figure: go.Figure, joins: Sequence[m.Join], unit: float) -> None:
    if joins:
        figure.add_scatter(
            x=[line.t / unit for line in joins],
            y=[f"cell {line.cell}" for line in joins],
            mode="markers",
            marker={"symbol": "diamond", "size": 8, "color": INK, "line": {"color": "white", "width": 1}},
            name="joined a batch under way",
            legend="legend2",
            row=2,
            col=1,
        )


def staleness(lines: Sequence[m.AnyMetric]) -> go.Figure:
    """How many consumed groups were how many steps behind."""
    counts = Counter(stale for line in lines if isinstance(line, m.Step) for stale in line.staleness)
    if not counts:
        return empty("no group has been trained yet", 320)
    keys = range(max(counts) + 1)
    values = [counts[key] for key in keys]
    figure = go.Figure()
    figure.add_bar(
        x=list(keys),
        y=values,
        text=[str(value) if value else "" for value in values],
        textposition="outside",
        cliponaxis=False,
        marker={"color": BLUE},
        width=0.6,
        name="groups",
    )
    styled(figure, 320, xaxis_title="optimizer steps behind", yaxis_title="groups")
    figure.update_xaxes(dtick=max(1, len(keys) // 12), range=[-0.6, max(3, max(counts)) + 0.6])
    figure.update_yaxes(range=[0, 1.15 * max(values)])
    return figure


def idle(lines: Sequence[m.AnyMetric]) -> go.Figure:
    """Idle share of rollout cells, of training cells and of all device time, stacked by cause."""
    shares = idle_shares([line for line in lines if isinstance(line, m.Busy)])
    if not shares:
        return empty("no device time observed yet", 320)
    words = {"rollout": "as rollout cell", "training": "as training cell", "all": "all device time"}
    names = [words[name] for name in shares]
    figure = go.Figure()
    for cause, (word, colour) in CAUSES.items():
        values = [causes.get(cause, 0.0) for causes in shares.values()]
        if any(values):
            figure.add_bar(
                x=names,
                y=values,
                name=word,
                marker={"color": colour},
                width=0.55,
                hovertemplate=f"{word}: %{{y:.1%}}<extra></extra>",
            )
    totals = [causes["total"] for causes in shares.values()]
    figure.add_scatter(
        x=names,
        y=totals,
        mode="text",
        text=[f"<b>{total:.0%}</b>" for total in totals],
        textposition="top center",
        showlegend=False,
        hoverinfo="skip",
    )
    styled(figure, 320, barmode="stack", yaxis_title="idle share", yaxis_tickformat=".0%")
    figure.update_yaxes(range=[0, min(1.1, 1.2 * max(totals) + 0.02)])
    return figure
