"""Traces: recorded durations as a workload. One row per execution, CSV with a header or JSONL.

Columns: `query` (any text; the executions of a query form its group), `seconds`, and optionally `tokens` (training cost is
shared out by them instead of by seconds) and `run` (rows of different runs never mix in a group; a seed draws from run
seed % runs). What a query's history forecasts is the mean of its executions in the other runs, or of all of them if
there is one run. With a target mean each run is scaled so that its durations, cut at the limit, have that mean.
"""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gyre_hpc.errors import ConfigError, MissingInput
from gyre_hpc.simulate.workload import GroupWork, Trace

Row = tuple[str, str, float, float]
"""(run, query, seconds, tokens); 0 tokens where the file has none."""
Durations = dict[str, dict[str, list[float]]]
"""run -> query -> seconds of its executions."""
KNOWN = ("run", "query", "seconds", "tokens")


@dataclass(frozen=True)
class TraceRuns:
    """A workload of several recorded runs; a seed draws from one of them."""

    runs: tuple[Trace, ...]

    def groups(self, seed: int, executions: int) -> Iterator[GroupWork]:
        """Endless groups of this many executions."""
        return self.runs[seed % len(self.runs)].groups(seed, executions)


def read_trace(path: Path) -> list[Row]:
    """All rows. Raises MissingInput, or ConfigError naming file and line."""
    if not path.is_file():
        raise MissingInput(f"{path}: no such trace", fix="give trace=FILE.csv or trace=FILE.jsonl")
    with path.open(newline="") as file:
        records = _json_lines(path, file) if path.suffix == ".jsonl" else csv.DictReader(file)
        rows = [_row(path, number, record) for number, record in enumerate(records, 1)]
    if not rows:
        raise ConfigError(f"{path}: no row", fix="write one row per execution: query, seconds")
    if 0 < sum(row[3] > 0 for row in rows) < len(rows):
        raise ConfigError(f"{path}: some rows have no tokens", fix="give tokens in every row or in none")
    return rows


def _json_lines(path: Path, lines: Iterable[str]) -> Iterator[dict[str, object]]:
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"{path}: row {number}: {error}", fix="write one JSON object per line"
            ) from error
        if not isinstance(record, dict):
            raise ConfigError(f"{path}: row {number}: not an object", fix="write one JSON object per line")
        yield record


def _row(path: Path, number: int, record: dict[str, object] | dict[str, str]) -> Row:
    unknown = [str(key) for key in record if key not in KNOWN]
    missing = [key for key in ("query", "seconds") if record.get(key) in (None, "")]
    if unknown or missing:
        what = f"unknown column {unknown[0]}" if unknown else f"no {missing[0]}"
        raise ConfigError(f"{path}: row {number}: {what}", fix=f"columns are {', '.join(KNOWN)}")
    try:
        seconds, tokens = float(str(record["seconds"])), float(str(record.get("tokens") or 0))
    except ValueError as error:
        raise ConfigError(
            f"{path}: row {number}: {error}", fix="write seconds and tokens as numbers"
        ) from error
    if not (0 < seconds < float("inf") and 0 <= tokens < float("inf")):
        raise ConfigError(
            f"{path}: row {number}: seconds={seconds}, tokens={tokens}", fix="write positive numbers"
        )
    return str(record.get("run", "")), str(record["query"]), seconds, tokens


def trace_workload(
    path: Path, limit_s: float, training_per_s: float, mean_s: float | None = None
) -> TraceRuns:
    """The workload of a trace file; `mean_s`: scale each run to that mean under the limit."""
    rows = read_trace(path)
    seconds: Durations = defaultdict(lambda: defaultdict(list))
    tokens: Durations = defaultdict(lambda: defaultdict(list))
    for run, query, duration, sampled in rows:
        seconds[run][query].append(duration)
        tokens[run][query].append(sampled)
    for queries in seconds.values():
        factor = 1.0 if mean_s is None else _scale(path, queries, mean_s, limit_s)
        for query, members in queries.items():
            queries[query] = [min(limit_s, factor * member) for member in members]
    return TraceRuns(
        tuple(
            Trace(
                queries=tuple(tuple(members) for members in queries.values()),
                forecasts=tuple(_forecast(seconds, run, query) for query in queries),
                limit_s=limit_s,
                training_per_s=training_per_s,
                training=_by_tokens(queries, tokens[run], training_per_s),
            )
            for run, queries in seconds.items()
        )
    )


def _forecast(seconds: Durations, run: str, query: str) -> float:
    """Mean of the query in the other runs; of its own run if no other has it."""
    others = [member for other in seconds if other != run for member in seconds[other].get(query, ())]
    known = others or seconds[run][query]
    return sum(known) / len(known)


def _by_tokens(
    queries: dict[str, list[float]], tokens: dict[str, list[float]], training_per_s: float
) -> tuple[tuple[float, ...], ...]:
    """Node-seconds per execution in proportion to tokens, the same in sum as by seconds; empty without tokens."""
    total = sum(map(sum, tokens.values()))
    if not total:
        return ()
    per_token = training_per_s * sum(map(sum, queries.values())) / total
    return tuple(tuple(sampled * per_token for sampled in tokens[query]) for query in queries)


def _scale(path: Path, queries: dict[str, list[float]], mean_s: float, limit_s: float) -> float:
    """The factor at which durations cut at the limit have this mean."""
    if mean_s >= limit_s:
        raise ConfigError(
            f"{path}: mean {mean_s:.0f} s is not below the limit {limit_s:.0f} s",
            fix="set world.mean_h below world.limit_h",
        )
    members = [member for group in queries.values() for member in group]
    low, high = 0.0, limit_s / min(members)
    for _ in range(60):
        middle = (low + high) / 2
        below = sum(min(limit_s, middle * member) for member in members) < mean_s * len(members)
        low, high = (middle, high) if below else (low, middle)
    return high
