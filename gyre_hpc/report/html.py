"""`report.html`: one self-contained file (plots with their library inside), readable without a network.

Everything in it comes from `metrics.jsonl`, but for the line under the title, which quotes the run's configuration.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go
import plotly.io
import plotly.offline

from gyre_hpc.config import load_run_config
from gyre_hpc.errors import ConfigError, MissingInput
from gyre_hpc.layout import RunLayout
from gyre_hpc.report import figures, tables
from gyre_hpc.report import metrics as m
from gyre_hpc.report.summary import Summary

STYLE = """
*{box-sizing:border-box}
body{font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif;margin:0;color:#16181d;background:#f5f5f2}
main{max-width:1160px;margin:0 auto;padding:2rem 1.25rem 3rem}
h1{font-size:1.6rem;line-height:1.25;margin:0}h2{font-size:1.1rem;margin:0}
p{margin:.15rem 0 0;color:#565a63}
.tiles{display:grid;grid-template-columns:repeat(4,1fr);gap:.75rem;margin:1.25rem 0}
.tile,section{background:#fff;border:1px solid #e3e3dd;border-radius:10px}
.tile{padding:.7rem 1rem}.tile b{display:block;font-size:1.4rem;line-height:1.3;white-space:nowrap}
.tile span{color:#565a63;font-size:.85rem}
section{padding:1rem 1.2rem;margin:.9rem 0;min-width:0}
.pair{display:grid;grid-template-columns:1fr 1fr;gap:.9rem}.pair section{margin:0}
.pair+.pair{margin-top:.9rem}
table{border-collapse:collapse;margin-top:.6rem;font-variant-numeric:tabular-nums;width:100%}
td,th{padding:.25rem .7rem .25rem 0;border-bottom:1px solid #ececE7;text-align:right;vertical-align:top}
th{color:#565a63;font-weight:600}td:first-child,th:first-child{text-align:left}
.words td,.words th{text-align:left}summary{cursor:pointer;font-weight:600}
@media(max-width:800px){.tiles{grid-template-columns:1fr 1fr}.pair{grid-template-columns:1fr}}
"""


def section(title: str, text: str, body: str) -> str:
    """A white box with a heading; `text` and `body` are HTML."""
    return f"<section><h2>{title}</h2><p>{text}</p>{body}</section>"


def plot(figure: go.Figure, name: str) -> str:
    """A figure as HTML whose id is `name`; the page carries plotly's library."""
    config = {
        "displaylogo": False,
        "responsive": True,
        "displayModeBar": "hover",
        "modeBarButtons": [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
        "toImageButtonOptions": {"format": "svg", "filename": name},
        "plotlyServerURL": "",
    }
    return str(plotly.io.to_html(figure, include_plotlyjs=False, full_html=False, config=config, div_id=name))


def _duration(seconds: float) -> str:
    unit, word = figures.time_unit(seconds)
    return f"{seconds / unit:.{int(unit > 1)}f} {word}"


def _tiles(summary: Summary) -> str:
    error = "" if summary.score_se is None else f" ± {summary.score_se:.3f}"
    idle = [summary.idle_share.get(role, {}).get("total") for role in ("rollout", "training")]
    tiles = (
        (
            "held-out score, before → after",
            f"{tables.number(summary.score_before)} → {tables.number(summary.score_after)}{error}",
        ),
        (f"optimizer steps in {summary.bursts} bursts", str(summary.steps)),
        ("role switches", str(summary.role_switches)),
        ("joins into a batch under way", str(summary.joins_mid_batch)),
        ("wall time", _duration(summary.wall_s)),
        (
            "idle share, rollout / training",
            " / ".join("-" if share is None else f"{share:.0%}" for share in idle),
        ),
        ("mean staleness, optimizer steps", tables.number(summary.staleness_mean, 2)),
        (
            f"model calls; {summary.calls_rerouted} re-routed, {summary.calls_lost} lost,"
            f" {summary.calls_unknown} of unknown role",
            f"{summary.calls:,}",
        ),
    )
    return "".join(
        f'<div class="tile"><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>'
        for name, value in tiles
    )


def _pair(left: str, right: str) -> str:
    return f'<div class="pair">{left}{right}</div>'


def _plots(lines: Sequence[m.AnyMetric]) -> str:
    score = section(
        "Score",
        "Held-out score with its standard error, over the score of every training batch.",
        plot(figures.score(lines), "score"),
    )
    roles = section(
        "Roles under the waterlevel",
        "As unfinished executions fall, cells leave rollout one by one and join the batch under way."
        " Thin vertical lines: optimizer steps.",
        plot(figures.role_timeline(lines), "roles"),
    )
    staleness = section(
        "Staleness",
        "Steps between a group's dispatch and the step that consumed it.",
        plot(figures.staleness(lines), "staleness"),
    )
    idle = section(
        "Idle time by cause",
        "Device time without tokens or micro-steps.",
        plot(figures.idle(lines), "idle"),
    )
    return score + roles + _pair(staleness, idle)


def _tables(lines: Sequence[m.AnyMetric], summary: Summary) -> str:
    ended = section("Executions", "How they ended.", tables.reasons(lines))
    points = section("Held-out evaluations", "Means over valid executions.", tables.evaluations(summary))
    words = "From the decision until the cell serves its new role."
    switches = section("Role switches", words, tables.switches(lines))
    steps = f"<details><summary>Every optimizer step</summary>{tables.steps(lines)}</details>"
    faults = section("Faults", "What died or failed, and what was done.", tables.faults(lines))
    kv = section(
        "KV cache", "What publications and moves of calls between cells cost.", tables.kv_cache(summary)
    )
    return f"{_pair(ended, points)}{switches}{kv}<section>{steps}</section>{faults}"


def page(title: str, about: str, body: str) -> str:
    """A whole page with plotly's library inside; `title` and `about` are plain text, `body` is HTML."""
    title, about = html.escape(title), html.escape(about)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{STYLE}</style>"
        f"<script>{plotly.offline.get_plotlyjs()}</script></head><body><main>"
        f"<h1>{title}</h1><p>{about}</p>{body}</main></body></html>"
    )


def render(name: str, lines: Sequence[m.AnyMetric], summary: Summary, about: str = "") -> str:
    """The page of a run. `about`: one line on what was run."""
    tiles = f'<div class="tiles">{_tiles(summary)}</div>'
    return page(name, about, f"{tiles}{_plots(lines)}{_tables(lines, summary)}")


def _about(layout: RunLayout) -> str:
    """What was run, in one line; nothing when the frozen configuration is gone or of another version."""
    try:
        run = load_run_config(layout.root)
    except (ConfigError, MissingInput):
        return ""
    schedule = run.schedule
    return (
        f"policy {schedule.policy}, {run.cluster.cells} cells; {run.objective.kind} on {run.tasks.family}:"
        f" {schedule.batch_groups} groups of {schedule.executions_per_group} executions per step,"
        f" {schedule.steps_per_burst} step(s) per burst, {schedule.extra_dispatch:g} batch(es) dispatched ahead;"
        f" seed {run.seed}"
    )


def write_report(layout: RunLayout, summary: Summary) -> Path:
    """Write RUN/report.html and return its path."""
    lines = list(m.read_metrics(layout.metrics))
    layout.report.write_text(render(layout.root.name, lines, summary, about=_about(layout)), encoding="utf-8")
    return layout.report
