"""How long before the end of a job its run must begin to leave: `cluster.job.margin_s` against what checkpoints took.

`RUN/jobs.json` keeps what one job must know of those before it: the longest checkpoint, and how many of them in a row took
no step and recorded no outcome. Written whole (tmp + rename) by the controller, read at submission too.
"""

from __future__ import annotations

from typing import Final

import msgspec

from gyre_hpc.config_job import JobConfig
from gyre_hpc.errors import ConfigError, CorruptRecord, StorageFull
from gyre_hpc.files import replace_file
from gyre_hpc.layout import RunLayout

SAFETY: Final = 1.5
"""A margin is at least so many times the longest checkpoint: file systems are slower when others leave as well."""


class JobRecord(msgspec.Struct, frozen=True):
    """`checkpoint_s` is the longest measured, 0.0 before the first; `fruitless` counts jobs in a row without progress."""

    checkpoint_s: float = 0.0
    fruitless: int = 0


def read_record(layout: RunLayout) -> JobRecord:
    """The record of a run, empty for one that has none. Raises CorruptRecord."""
    try:
        return msgspec.json.decode(layout.job_record.read_bytes(), type=JobRecord)
    except FileNotFoundError:
        return JobRecord()
    except msgspec.MsgspecError as error:
        raise CorruptRecord(
            f"{layout.job_record}: not a record of jobs ({error})",
            fix="remove it; it only holds the time of the longest checkpoint",
        ) from error


def write_record(layout: RunLayout, record: JobRecord) -> None:
    """Replace the record. Raises StorageFull."""
    try:
        replace_file(layout.job_record, msgspec.json.encode(record))
    except OSError as error:
        raise StorageFull(
            f"{layout.job_record}: {error.strerror}", fix=f"free space, then resume={layout.root}"
        ) from error


def needed_s(checkpoint_s: float) -> float:
    """Seconds of margin that a checkpoint of this length asks for."""
    return SAFETY * checkpoint_s


def check_margin(job: JobConfig, layout: RunLayout) -> None:
    """Raise ConfigError for a margin that the longest measured checkpoint of this run does not fit into."""
    longest = read_record(layout).checkpoint_s
    if 0 < job.margin_s < needed_s(longest):
        least = -(-int(needed_s(longest) * 10) // 10) + 1
        raise ConfigError(
            f"cluster.job.margin_s={job.margin_s} is below {SAFETY:g} x {longest:.1f} s, the longest checkpoint of"
            f" {layout.root} so far: the job might be killed while it writes one",
            fix=f"add cluster.job.margin_s={max(least, job.margin_s + 1)}",
        )
