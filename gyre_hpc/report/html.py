"""`report.html`: one self-contained file (plots with their library inside), readable without a network."""

from __future__ import annotations

import html
from pathlib import Path

import plotly.graph_objects as go
import plotly.io
import plotly.offline

from gyre_hpc.layout import RunLayout
from gyre_hpc.report import figures
from gyre_hpc.report import metrics as m
from gyre_hpc.report.summary import Summary

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1080px;padding:0 1rem;color:#0b0b0b;background:#fcfcfb}
h1{font-size:1.5rem;margin:0 0 .2rem}h2{font-size:1.1rem;margin:2.2rem 0 .2rem}p{margin:.2rem 0;color:#52514e}
.tiles{display:flex;flex-wrap:wrap;gap:.8rem;margin:1.2rem 0}
.tile{border:1px solid #e1e0d9;border-radius:8px;padding:.6rem 1rem;min-width:8.5rem;background:#fff}
.tile b{display:block;font-size:1.35rem}.tile span{color:#52514e;font-size:.85rem}
table{border-collapse:collapse}td,th{padding:.25rem .8rem;border-bottom:1px solid #e1e0d9;text-align:left}
"""

PLOTS = (
    (
        "Score",
        "Held-out score with its standard error, over the score of every training batch.",
        figures.score,
    ),
    (
        "Roles under the waterlevel",
        "As unfinished executions fall, cells leave rollout one by one and join the batch under way.",
        figures.role_timeline,
    ),
    (
        "Staleness",
        "Optimizer steps between a group's dispatch and the step that consumed it.",
        figures.staleness,
    ),
    ("Idle time by cause", "Device time without tokens or micro-steps, by role.", figures.idle),
)


def _figure(figure: go.Figure) -> str:
    figure.update_layout(
        template="plotly_white",
        paper_bgcolor="#fcfcfb",
        plot_bgcolor="#fcfcfb",
        margin={"l": 60, "r": 20, "t": 20, "b": 50},
        legend={"orientation": "h", "y": 1.12},
    )
    return str(
        plotly.io.to_html(figure, include_plotlyjs=False, full_html=False, config={"displaylogo": False})
    )


def _tile(name: str, value: str) -> str:
    return f'<div class="tile"><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>'


def _score(value: float | None, error: float | None = None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" + (f" ± {error:.3f}" if error is not None else "")


def _tiles(summary: Summary) -> str:
    tiles = (
        ("held-out score before", _score(summary.score_before)),
        ("held-out score after", _score(summary.score_after, summary.score_se)),
        ("optimizer steps", str(summary.steps)),
        ("role switches", str(summary.role_switches)),
        ("joins into a running batch", str(summary.joins_mid_batch)),
        ("model calls", str(summary.calls)),
        ("calls re-routed / lost", f"{summary.calls_rerouted} / {summary.calls_lost}"),
        ("wall time", f"{summary.wall_s / 60:.1f} min"),
    )
    return f'<div class="tiles">{"".join(_tile(*tile) for tile in tiles)}</div>'


def _reasons(summary: Summary) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(k)}</td><td>{v}</td></tr>" for k, v in sorted(summary.executions.items())
    )
    return f"<table><tr><th>closing reason</th><th>executions</th></tr>{rows}</table>"


def _faults(lines: list[m.AnyMetric]) -> str:
    faults = [line for line in lines if isinstance(line, m.Fault)]
    if not faults:
        return "<p>None.</p>"
    rows = "".join(
        f"<tr><td>{line.t:.0f} s</td><td>{html.escape(line.who)}</td><td>{html.escape(line.what)}</td></tr>"
        for line in faults
    )
    return f"<table><tr><th>at</th><th>who</th><th>what</th></tr>{rows}</table>"


def render(name: str, lines: list[m.AnyMetric], summary: Summary) -> str:
    """The whole page."""
    sections = "".join(
        f"<h2>{title}</h2><p>{text}</p>{_figure(build(lines))}" for title, text, build in PLOTS
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(name)}</title><style>{STYLE}</style>"
        f"<script>{plotly.offline.get_plotlyjs()}</script></head><body>"
        f"<h1>{html.escape(name)}</h1><p>elastic online RL with gyre_hpc</p>{_tiles(summary)}{sections}"
        f"<h2>Executions</h2>{_reasons(summary)}<h2>Faults</h2>{_faults(lines)}</body></html>"
    )


def write_report(layout: RunLayout, summary: Summary) -> Path:
    """Write RUN/report.html and return its path."""
    lines = list(m.read_metrics(layout.metrics))
    layout.report.write_text(render(layout.root.name, lines, summary), encoding="utf-8")
    return layout.report
