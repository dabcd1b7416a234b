"""What a run measures, as typed lines of `metrics.jsonl`; the report and the summary read nothing else.

Times are seconds since the run's first start (`t`), on the controller's clock, continued over resumes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from gyre_hpc.errors import CorruptRecord

log = logging.getLogger(__name__)


GONE = "gone"
"""Role of a guest that never comes back."""


class Metric(msgspec.Struct, frozen=True, tag_field="kind"):
    """Base of all lines."""

    t: float


class Opened(Metric, tag="opened", frozen=True):
    """A controller took over the run (its start, or a resume): cells of an earlier one are gone.

    `transport`: how regions travel between hosts, `auto` resolved.
    """

    transport: str = ""


class RoleChange(Metric, tag="role", frozen=True):
    """The cell entered a phase of `controller.phases.Phase`: rollout, leaving, joining, training, ..., lost; or is GONE.

    `reason`: why it is, or was, blocked or quarantined.
    """

    cell: int
    role: str
    reason: str = ""


class Water(Metric, tag="water", frozen=True):
    """The ledger: waterlevel w, running executions p-f, capacity C_R, running evaluations e, published version."""

    waterlevel: int
    running: int
    capacity: int
    evaluating: int
    version: int


class Busy(Metric, tag="busy", frozen=True):
    """Since the last line of this cell: seconds observed in a role, of which busy; `cause` names why not."""

    cell: int
    role: str
    seconds: float
    busy: float
    cause: str


class Join(Metric, tag="join", frozen=True):
    """A cell joined training of batch `batch`; `mid_batch` when the first micro-step was already claimed."""

    cell: int
    batch: int
    mid_batch: bool


class Switch(Metric, tag="switch", frozen=True):
    """A finished switch to `role` (rollout or training): seconds from the decision, and those of its parts."""

    cell: int
    role: str
    seconds: float
    phases: dict[str, float]


class Step(Metric, tag="step", frozen=True):
    """An optimizer step. `score` is the mean valid reward of the step's executions."""

    version: int
    score: float | None
    groups: int
    executions: int
    micro_steps: int
    tokens_trained: int
    staleness: tuple[int, ...]
    metrics: dict[str, float]
    seconds: float


class Published(Metric, tag="published", frozen=True):
    """Every live engine serves the version: `seconds` from the decision. `calls_cut` went on under it (kv_policy=strict)."""

    version: int
    seconds: float
    calls_cut: int


class Restored(Metric, tag="restored", frozen=True):
    """The core holds this version again: steps above it that were taken so far are undone."""

    version: int


class Burst(Metric, tag="burst", frozen=True):
    """The end of a burst; `version` is None when it was void."""

    index: int
    version: int | None


class Ended(Metric, tag="ended", frozen=True):
    """An execution's final outcome and the gateway's account of it."""

    execution: int
    group: int | None
    reason: str
    score: float | None
    wall_s: float
    calls: int
    calls_rerouted: int
    calls_lost: int
    tokens_sampled: int
    tokens_recomputed: int
    prompt_tokens: int
    held_s: float
    calls_unknown: int = 0
    pages_due: int = 0
    pages_found: int = 0
    kv_lag: int = 0
    tokens_on_old_kv: int = 0
    tokens_cached: int = 0
    calls_over_versions: int = 0


class Evaluated(Metric, tag="evaluated", frozen=True):
    """A complete evaluation point; `score_se` over executions."""

    version: int
    score: float | None
    score_se: float | None
    executions: int
    invalid: int


class Fault(Metric, tag="fault", frozen=True):
    """A process died or a switch failed, and what was done."""

    who: str
    what: str


AnyMetric = (
    Opened
    | RoleChange
    | Water
    | Busy
    | Join
    | Switch
    | Step
    | Published
    | Restored
    | Burst
    | Ended
    | Evaluated
    | Fault
)
_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[AnyMetric] = msgspec.json.Decoder(AnyMetric)


class MetricsWriter:
    """Appends lines; each is flushed when written. A torn last line of an earlier writer is cut off first."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._file.truncate(_whole_lines(path))

    def write(self, metric: AnyMetric) -> None:
        """A full disk costs the line, never the run: the journal is what must not be lost."""
        line = _encoder.encode(metric) + b"\n"
        try:
            written = self._file.write(line)
            if written < len(line):
                self._file.truncate(self._file.seek(0, os.SEEK_END) - written)
                log.warning("metrics.jsonl: no space left; the line is dropped")
        except OSError as error:
            log.warning("metrics.jsonl: %s; the line is dropped", error)

    def close(self) -> None:
        self._file.close()


def _whole_lines(path: Path) -> int:
    """Bytes up to and including the last newline."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - 65536)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0


def read_metrics(path: Path) -> Iterator[AnyMetric]:
    """Lines in order; a torn last line (the writer died) is skipped, any other bad line raises CorruptRecord."""
    if not path.exists():
        return
    size = os.path.getsize(path)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield _decoder.decode(line)
            except msgspec.MsgspecError as error:
                if file.tell() == size and not line.endswith(b"\n"):
                    return
                raise _corrupt(path, number, error) from error


class MetricsTail:
    """A `metrics.jsonl` that grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = self._lines = 0

    def new(self) -> list[AnyMetric]:
        """The whole lines that came since the last call; none while there is no file. Raises CorruptRecord."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [self._decoded(line) for line in whole.splitlines()]

    def _decoded(self, line: bytes) -> AnyMetric:
        self._lines += 1
        try:
            return _decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise _corrupt(self._path, self._lines, error) from error


def _corrupt(path: Path, number: int, error: msgspec.MsgspecError) -> CorruptRecord:
    return CorruptRecord(f"{path}:{number}: {error}", fix="remove that line; only plots use it")
