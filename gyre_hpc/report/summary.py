"""`summary.json`: a run in numbers, computed from `metrics.jsonl` alone, so it can be made again at any time."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import msgspec

from gyre_hpc.report import metrics as m


class Summary(msgspec.Struct, frozen=True):
    """Scores are means over valid held-out executions; `score_se` is of the difference's later point.

    `joins_mid_batch`: cells that joined after the batch's first claim. `calls_lost`: no client received the complete
    answer and no continuation was accepted. `idle_share`: idle seconds over all seconds, of the roles rollout and
    training and of the whole device time (`all`, with switching, starting and lost cells), by cause (`total` = all
    causes). Steps are those that were not undone. `switch_seconds`: mean seconds of a switch. Absent is None, never 0.
    `transport`: how regions travelled between hosts.
    """

    score_before: float | None
    score_after: float | None
    score_se: float | None
    steps: int
    bursts: int
    role_switches: int
    joins_mid_batch: int
    executions: dict[str, int]
    calls: int
    calls_rerouted: int
    calls_lost: int
    tokens_trained: int
    tokens_recomputed: int
    staleness_mean: float | None
    idle_share: dict[str, dict[str, float]]
    wall_s: float
    evaluations: tuple[m.Evaluated, ...] = ()
    void_bursts: int = 0
    calls_unknown: int = 0
    """Calls of unknown role: what they sampled is trained last."""
    calls_over_versions: int = 0
    """Calls that a publication met under way: sampled by more than one version."""
    publications: int = 0
    publication_s: float | None = None
    """Mean seconds from the decision until every engine serves the version."""
    publication_cuts: int = 0
    """Calls that publications have cut (kv_policy=strict); they went on under the new version."""
    prompt_tokens: int = 0
    tokens_cached: int = 0
    """Prompt tokens that had their KV before their call began."""
    tokens_on_old_kv: int = 0
    """Tokens sampled by newer weights than the oldest KV they may have seen (kv_policy=keep_execution)."""
    kv_lag: int = 0
    """Most versions between a token and the oldest KV it may have seen."""
    pages_due: int = 0
    """KV pages that moved calls had where they were cut."""
    pages_found: int = 0
    """Of these, the ones they found where they went on."""
    faults: int = 0
    tokens_sampled: int = 0
    training_score: tuple[float | None, ...] = ()
    switch_seconds: dict[str, float] = {}
    transport: str = ""


WORKING = ("rollout", "training")
"""Roles in which a cell can be busy; in every other it is idle by definition."""


def idle_shares(lines: list[m.Busy]) -> dict[str, dict[str, float]]:
    """Idle seconds by cause over all seconds: of each working role, and of all device time."""
    seconds: dict[str, float] = defaultdict(float)
    idle: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for line in lines:
        for name in (line.role, "all") if line.role in WORKING else ("all",):
            seconds[name] += line.seconds
            if line.cause:
                idle[name][line.cause] += line.seconds - line.busy
    shares = {}
    for name in (*WORKING, "all"):
        if seconds[name] > 0:
            causes = {cause: lost / seconds[name] for cause, lost in sorted(idle[name].items())}
            shares[name] = {"total": sum(causes.values()), **causes}
    return shares


def summarise(path: Path) -> Summary:
    """The summary of a `metrics.jsonl`."""
    lines = list(m.read_metrics(path))
    ended = [line for line in lines if isinstance(line, m.Ended)]
    steps = steps_that_count(lines)
    bursts = [line for line in lines if isinstance(line, m.Burst)]
    points = [line for line in lines if isinstance(line, m.Evaluated)]
    switches = [line for line in lines if isinstance(line, m.Switch)]
    joins = [line for line in lines if isinstance(line, m.Join)]
    published = [line for line in lines if isinstance(line, m.Published)]
    stale = [staleness for line in steps for staleness in line.staleness]
    first, last = (points[0], points[-1]) if len(points) > 1 else (points[0] if points else None, None)
    return Summary(
        score_before=first.score if first else None,
        score_after=last.score if last else None,
        score_se=last.score_se if last else None,
        steps=len(steps),
        bursts=sum(line.version is not None for line in bursts),
        void_bursts=sum(line.version is None for line in bursts),
        role_switches=_role_switches(lines),
        joins_mid_batch=sum(line.mid_batch for line in joins),
        executions=dict(Counter(line.reason for line in ended)),
        calls=sum(line.calls for line in ended),
        calls_rerouted=sum(line.calls_rerouted for line in ended),
        calls_lost=sum(line.calls_lost for line in ended),
        calls_unknown=sum(line.calls_unknown for line in ended),
        calls_over_versions=sum(line.calls_over_versions for line in ended),
        publications=len(published),
        publication_s=sum(line.seconds for line in published) / len(published) if published else None,
        publication_cuts=sum(line.calls_cut for line in published),
        prompt_tokens=sum(line.prompt_tokens for line in ended),
        tokens_cached=sum(line.tokens_cached for line in ended),
        tokens_on_old_kv=sum(line.tokens_on_old_kv for line in ended),
        kv_lag=max((line.kv_lag for line in ended), default=0),
        pages_due=sum(line.pages_due for line in ended),
        pages_found=sum(line.pages_found for line in ended),
        tokens_trained=sum(line.tokens_trained for line in steps),
        tokens_recomputed=sum(line.tokens_recomputed for line in ended),
        tokens_sampled=sum(line.tokens_sampled for line in ended),
        staleness_mean=sum(stale) / len(stale) if stale else None,
        idle_share=idle_shares([line for line in lines if isinstance(line, m.Busy)]),
        wall_s=lines[-1].t if lines else 0.0,
        evaluations=tuple(points),
        faults=sum(isinstance(line, m.Fault) for line in lines),
        training_score=tuple(line.score for line in steps),
        switch_seconds=_mean_seconds(switches),
        transport=next((line.transport for line in reversed(lines) if isinstance(line, m.Opened)), ""),
    )


def steps_that_count(lines: list[m.AnyMetric]) -> list[m.Step]:
    """Steps that no restored core has undone."""
    steps: list[m.Step] = []
    for line in lines:
        if isinstance(line, m.Step):
            steps.append(line)
        elif isinstance(line, m.Restored):
            steps = [step for step in steps if step.version <= line.version]
    return steps


def _role_switches(lines: list[m.AnyMetric]) -> int:
    """Completed switches between rollout and training, both ways. A cell that died and came back has not switched."""
    role: dict[int, str] = {}
    count = 0
    for line in lines:
        if isinstance(line, m.Opened):
            role.clear()
        elif isinstance(line, m.RoleChange):
            if line.role in WORKING:
                count += line.cell in role and role[line.cell] != line.role
                role[line.cell] = line.role
            elif line.role == "lost":
                role.pop(line.cell, None)
    return count


def _mean_seconds(switches: list[m.Switch]) -> dict[str, float]:
    by_role: dict[str, list[float]] = defaultdict(list)
    for line in switches:
        by_role[line.role].append(line.seconds)
    return {f"to_{role}": sum(values) / len(values) for role, values in sorted(by_role.items())}
