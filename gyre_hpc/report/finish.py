"""The end of a run as a person sees it: summary.json, report.html, and a table on the terminal."""

from __future__ import annotations

import msgspec
from rich.console import Console
from rich.table import Table

from gyre_hpc.layout import RunLayout
from gyre_hpc.report.html import write_report
from gyre_hpc.report.summary import Summary, summarise


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _idle(summary: Summary) -> str:
    return "  ".join(f"{role} {causes['total']:.0%}" for role, causes in summary.idle_share.items()) or "-"


def table(summary: Summary) -> Table:
    """The closing table."""
    error = "" if summary.score_se is None else f" +- {summary.score_se:.3f}"
    reasons = "  ".join(f"{reason} {count}" for reason, count in sorted(summary.executions.items()))
    rows = (
        ("held-out score before", _number(summary.score_before)),
        ("held-out score after", _number(summary.score_after) + error),
        ("optimizer steps", f"{summary.steps} in {summary.bursts} bursts"),
        ("role switches", str(summary.role_switches)),
        ("joins into a running batch", str(summary.joins_mid_batch)),
        ("executions", reasons or "-"),
        (
            "model calls",
            f"{summary.calls}, re-routed {summary.calls_rerouted}, lost {summary.calls_lost},"
            f" of unknown role {summary.calls_unknown}",
        ),
        ("tokens trained", f"{summary.tokens_trained}, recomputed {summary.tokens_recomputed}"),
        (
            "KV cache",
            f"{summary.tokens_cached} of {summary.prompt_tokens} prompt tokens found,"
            f" {summary.publication_cuts} calls cut by publications, {summary.tokens_on_old_kv} tokens on older KV",
        ),
        ("mean staleness", _number(summary.staleness_mean, 2)),
        ("idle share by role", _idle(summary)),
        ("transport", summary.transport or "-"),
        ("wall time", f"{summary.wall_s:.0f} s"),
    )
    result = Table(show_header=False)
    for name, value in rows:
        result.add_row(name, value)
    return result


def finish(layout: RunLayout, console: Console) -> Summary:
    """Write summary and report from the metrics, show the table and the paths."""
    summary = summarise(layout.metrics)
    layout.summary.write_bytes(msgspec.json.format(msgspec.json.encode(summary)))
    write_report(layout, summary)
    console.print(table(summary))
    console.print(f"report:  {layout.report}", soft_wrap=True)
    console.print(f"summary: {layout.summary}", soft_wrap=True)
    return summary
