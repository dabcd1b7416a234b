"""The tables of `report.html`, as HTML: one function each, every cell escaped."""

from __future__ import annotations

import html
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from gyre_hpc.report import metrics as m
from gyre_hpc.report.summary import Summary


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], kind: str = "") -> str:
    """Cells are escaped; `kind` is a CSS class."""
    head = "".join(f"<th>{html.escape(text)}</th>" for text in heads)
    body = "".join(
        f"<tr>{''.join(f'<td>{html.escape(str(value))}</td>' for value in row)}</tr>" for row in rows
    )
    return f'<table class="{kind}"><tr>{head}</tr>{body}</table>' if body else "<p>None.</p>"


def number(value: float | None, digits: int = 3) -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def reasons(lines: Sequence[m.AnyMetric]) -> str:
    """Closing reasons of training and held-out executions."""
    ended = [line for line in lines if isinstance(line, m.Ended)]
    counts = Counter((line.reason, line.group is None) for line in ended)
    return table(
        ("closing reason", "training", "held-out"),
        [
            (reason.replace("_", " "), counts[reason, False], counts[reason, True])
            for reason in sorted({line.reason for line in ended})
        ],
    )


def switches(lines: Sequence[m.AnyMetric]) -> str:
    """Role switches by direction, with their longest parts."""
    by_role: dict[str, list[m.Switch]] = defaultdict(list)
    for line in lines:
        if isinstance(line, m.Switch):
            by_role[line.role].append(line)
    rows = []
    for role, switches in sorted(by_role.items(), reverse=True):
        parts: dict[str, float] = defaultdict(float)
        for switch in switches:
            for part, seconds in switch.phases.items():
                parts[part] += seconds / len(switches)
        mean = sum(switch.seconds for switch in switches) / len(switches)
        slowest = max(switch.seconds for switch in switches)
        largest = sorted(parts.items(), key=lambda item: -item[1])[:3]
        words = ", ".join(f"{part} {seconds:.2f}" for part, seconds in largest)
        rows.append((f"to {role}", len(switches), f"{mean:.2f}", f"{slowest:.2f}", words))
    return table(("switch", "count", "mean s", "slowest s", "longest parts, mean s"), rows)


def steps(lines: Sequence[m.AnyMetric]) -> str:
    """Every optimizer step."""
    rows = [
        (
            line.version,
            number(line.score),
            line.executions,
            line.micro_steps,
            f"{line.tokens_trained:,}",
            number(sum(line.staleness) / len(line.staleness) if line.staleness else None, 2),
            number(line.metrics.get("grad_norm")),
            number(line.metrics.get("mismatch"), 4),
            f"{line.seconds:.1f}",
        )
        for line in lines
        if isinstance(line, m.Step)
    ]
    heads = (
        "version",
        "score",
        "executions",
        "micro-steps",
        "tokens trained",
        "staleness",
        "gradient norm",
        "mismatch",
        "s",
    )
    return (
        f"<section><details><summary>Every optimizer step</summary>{table(heads, rows)}</details></section>"
    )


def evaluations(summary: Summary) -> str:
    """Every evaluation point."""
    rows = [
        (line.version, number(line.score), number(line.score_se), line.executions, line.invalid)
        for line in summary.evaluations
    ]
    return table(("version", "score", "standard error", "scored executions", "excluded"), rows)


def kv_cache(summary: Summary) -> str:
    """What the KV policy and moves between cells cost."""
    seconds = "" if summary.publication_s is None else f", {summary.publication_s:.2f} s each"
    cached = f" ({summary.tokens_cached / summary.prompt_tokens:.0%})" if summary.prompt_tokens else ""
    old = f" ({summary.tokens_on_old_kv / summary.tokens_sampled:.0%})" if summary.tokens_sampled else ""
    rows = (
        ("publications", f"{summary.publications}{seconds}"),
        (
            "calls met by a publication, cut by one",
            f"{summary.calls_over_versions}, {summary.publication_cuts}",
        ),
        (
            "prompt tokens found in the cache",
            f"{summary.tokens_cached:,} of {summary.prompt_tokens:,}{cached}",
        ),
        ("tokens computed again for moved or cut calls", f"{summary.tokens_recomputed:,}"),
        ("pages found again by calls that moved", f"{summary.pages_found:,} of {summary.pages_due:,}"),
        ("tokens sampled on KV of older weights", f"{summary.tokens_on_old_kv:,}{old}"),
        ("most versions between a token and its KV", summary.kv_lag),
    )
    return table(("KV", ""), rows)


def faults(lines: Sequence[m.AnyMetric]) -> str:
    """Every fault, in order."""
    rows = [(f"{line.t:.0f} s", line.who, line.what) for line in lines if isinstance(line, m.Fault)]
    return table(("at", "who", "what"), rows, kind="words")
