"""The margin of a job against what checkpoints of the run took, and the script of a job that goes on after another."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre_hpc.config_job import JobConfig
from gyre_hpc.errors import ConfigError, CorruptRecord
from gyre_hpc.launch.margin import JobRecord, check_margin, needed_s, read_record, write_record
from gyre_hpc.launch.successor import continued
from gyre_hpc.layout import RunLayout

REPO = Path(__file__).parents[2]


def test_a_margin_the_longest_checkpoint_does_not_fit_into_is_refused_with_both_numbers(
    tmp_path: Path,
) -> None:
    layout = RunLayout(tmp_path)
    check_margin(JobConfig(margin_s=1), layout)
    write_record(layout, JobRecord(checkpoint_s=140.0))
    check_margin(JobConfig(margin_s=210), layout)
    check_margin(JobConfig(margin_s=0), layout)
    with pytest.raises(ConfigError, match=r"margin_s=180 is below 1\.5 x 140\.0 s") as refused:
        check_margin(JobConfig(margin_s=180), layout)
    fix = int(refused.value.fix.rpartition("=")[2])
    assert fix >= needed_s(140.0)


def test_what_is_no_record_is_named(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    assert read_record(layout) == JobRecord()
    layout.job_record.write_text("{")
    with pytest.raises(CorruptRecord, match=r"jobs\.json"):
        read_record(layout)


def test_a_successor_waits_for_the_job_and_names_the_run() -> None:
    snapshot = (REPO / "tests" / "launch" / "snapshots" / "het.sbatch").read_text()
    once = continued(snapshot, Path("/runs/a"), "7")
    assert once.splitlines()[:2] == ["#!/bin/bash", "#SBATCH --dependency=afterany:7"]
    twice = continued(once, Path("/runs/a"), "8")
    assert twice.count("--dependency=") == 1 and "afterany:8" in twice
    for script in (snapshot, (REPO / "slurm" / "train.sbatch").read_text()):
        lines = continued(script, Path("/runs/a"), "7").splitlines()
        assert lines.index("set -- resume=/runs/a") > max(
            index for index, line in enumerate(lines) if line.startswith("#SBATCH")
        )
