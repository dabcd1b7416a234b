"""The plots of a run, one function each, from metrics lines to a plotly figure.

Role colours are the same in every plot. Times are minutes since the run's first start.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from gyre_hpc.report import metrics as m
from gyre_hpc.report.summary import idle_shares

ROLE_COLOURS = {
    "rollout": "#2a78d6",
    "training": "#1baf7a",
    "leaving": "#eda100",
    "joining": "#eda100",
    "returning": "#eda100",
    "loading": "#eda100",
    "reloading": "#eda100",
    "starting": "#c3c2b7",
    "idle": "#c3c2b7",
    "down": "#e34948",
    "lost": "#e34948",
}
LEGEND = {
    "rollout": "rollout",
    "training": "training",
    "leaving": "switching",
    "starting": "starting",
    "lost": "down or lost",
}
"""Roles that appear in the legend, with their words; roles of the same colour share the entry."""
CAUSE_COLOURS = ("#eda100", "#4a3aa7", "#e87ba4", "#eb6834", "#008300", "#e34948", "#c3c2b7")


def _minutes(t: float) -> float:
    return t / 60.0


def score(lines: list[m.AnyMetric]) -> go.Figure:
    """Held-out score with its standard error, and the score of each training batch."""
    points = [line for line in lines if isinstance(line, m.Evaluated) and line.score is not None]
    steps = [line for line in lines if isinstance(line, m.Step) and line.score is not None]
    figure = go.Figure()
    figure.add_scatter(
        x=[line.version for line in steps],
        y=[line.score for line in steps],
        mode="lines+markers",
        name="training batch",
        line={"color": "#2a78d6", "width": 2},
        marker={"size": 5},
    )
    figure.add_scatter(
        x=[line.version for line in points],
        y=[line.score for line in points],
        error_y={
            "type": "data",
            "array": [line.score_se or 0.0 for line in points],
            "thickness": 2,
            "width": 6,
        },
        mode="markers+lines",
        name="held-out (with standard error)",
        line={"color": "#eb6834", "width": 2, "dash": "dot"},
        marker={"size": 11},
    )
    figure.update_layout(xaxis_title="policy version", yaxis_title="score", yaxis_range=[0, 1])
    return figure


def role_timeline(lines: list[m.AnyMetric]) -> go.Figure:
    """Waterlevel and capacity over the role of every cell."""
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.6, 0.4], vertical_spacing=0.06)
    water = [line for line in lines if isinstance(line, m.Water)]
    times = [_minutes(line.t) for line in water]
    traces = (
        ("waterlevel", [line.waterlevel for line in water], "#0b0b0b", "solid"),
        ("rollout capacity", [line.capacity for line in water], "#2a78d6", "dash"),
        ("running evaluations", [line.evaluating for line in water], "#eb6834", "dot"),
    )
    for name, values, colour, dash in traces:
        figure.add_scatter(
            x=times,
            y=values,
            name=name,
            line={"shape": "hv", "color": colour, "width": 2, "dash": dash},
            row=1,
            col=1,
        )
    end = lines[-1].t if lines else 0.0
    shown: set[str] = set()
    for cell, role, start, stop in role_spans(lines, end):
        entry = LEGEND.get(role, "")
        figure.add_bar(
            x=[_minutes(stop - start)],
            y=[f"cell {cell}"],
            base=_minutes(start),
            orientation="h",
            marker={"color": ROLE_COLOURS.get(role, "#c3c2b7"), "line": {"width": 0}},
            name=entry or role,
            legendgroup=entry or role,
            showlegend=bool(entry) and entry not in shown,
            hovertext=f"{role}, {stop - start:.1f} s",
            row=2,
            col=1,
        )
        shown.add(entry)
    figure.update_layout(barmode="overlay", height=520)
    figure.update_yaxes(title_text="executions", row=1, col=1)
    figure.update_xaxes(title_text="minutes", row=2, col=1)
    return figure


def role_spans(lines: list[m.AnyMetric], end: float) -> list[tuple[int, str, float, float]]:
    """(cell, role, start, stop) in seconds, in order of time."""
    current: dict[int, tuple[str, float]] = {}
    spans: list[tuple[int, str, float, float]] = []
    for line in lines:
        if isinstance(line, m.RoleChange):
            if line.cell in current:
                role, start = current[line.cell]
                spans.append((line.cell, role, start, line.t))
            current[line.cell] = (line.role, line.t)
    spans += [(cell, role, start, end) for cell, (role, start) in current.items()]
    return sorted(spans, key=lambda span: (span[2], span[0]))


def staleness(lines: list[m.AnyMetric]) -> go.Figure:
    """How many consumed groups were how many steps behind."""
    counts = Counter(stale for line in lines if isinstance(line, m.Step) for stale in line.staleness)
    figure = go.Figure()
    keys = sorted(counts)
    figure.add_bar(
        x=keys, y=[counts[key] for key in keys], marker={"color": "#2a78d6"}, width=0.6, name="groups"
    )
    figure.update_layout(xaxis_title="steps behind when consumed", yaxis_title="groups", xaxis={"dtick": 1})
    return figure


def idle(lines: list[m.AnyMetric]) -> go.Figure:
    """Idle share of each role, stacked by cause."""
    shares = idle_shares([line for line in lines if isinstance(line, m.Busy)])
    by_cause: dict[str, dict[str, float]] = defaultdict(dict)
    for role, causes in shares.items():
        for cause, share in causes.items():
            if cause != "total":
                by_cause[cause][role] = share
    figure = go.Figure()
    for colour, (cause, values) in zip(CAUSE_COLOURS, sorted(by_cause.items()), strict=False):
        figure.add_bar(
            x=list(values),
            y=list(values.values()),
            name=cause.replace("_", " "),
            marker={"color": colour},
            width=0.5,
        )
    figure.update_layout(barmode="stack", yaxis_title="share of the role's time", yaxis_tickformat=".0%")
    return figure
