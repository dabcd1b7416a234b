"""The margin of a job against what checkpoints of the run took, and the script of a job that goes on after another."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre_hpc.config_job import JobConfig
from gyre_hpc.errors import ConfigError, CorruptRecord
from gyre_hpc.launch.job.margin import JobRecord, check_margin, needed_s, read_record, write_record
from gyre_hpc.launch.job.successor import continued, options_of, with_options
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


@pytest.mark.parametrize(
    "line",
    [
        "--dependency=after:3",
        "'--dependency=after:3'",
        "--dependency afterok:3",
        "-d afterok:3",
        "-dafterok:3",
    ],
)
def test_a_successor_waits_for_nothing_that_its_job_has_waited_for(line: str) -> None:
    """Of two dependencies the later one would count: the successor would start beside its job."""
    script = f"#!/bin/bash\n#SBATCH --deadline=now+1hour\n#SBATCH {line}\nexec true\n"
    options = [line for line in continued(script, Path("/runs/a"), "7").splitlines() if "#SBATCH" in line]
    assert options == ["#SBATCH --dependency=afterany:7", "#SBATCH --deadline=now+1hour"]


SHOWN = (
    "JobId=9 JobName=gyre Account=(null) QOS=(null) Requeue=0 Restarts=0 TimeLimit=00:10:00 TimeMin=N/A Partition=gpu"
    " ExcNodeList=(null) NumNodes=3 NumCPUs=12 NumTasks=4 CPUs/Task=3 NtasksPerN:B:S:C=1:0:*:* MinMemoryNode=4G"
    " Features=a100&ib Reservation=(null) StdOut=/runs/log TresPerNode=gres:gpu:2 WorkDir=/home/me"
)


def test_a_successor_of_a_script_by_hand_asks_for_what_the_command_line_of_its_job_did() -> None:
    """Its nodes are those the job began with, not those a loss has left it."""
    script = (REPO / "slurm" / "train.sbatch").read_text()
    lines = with_options(script, options_of(SHOWN, "4")).splitlines()
    last = {line.partition("=")[0]: line for line in lines if line.startswith("#SBATCH")}
    assert last["#SBATCH --nodes"].endswith("=4") and last["#SBATCH --cpus-per-task"].endswith("=3")
    assert last["#SBATCH --mem"].endswith("=4G") and last["#SBATCH --gres"].endswith("=gpu:2")
    assert last["#SBATCH '--constraint"] == "#SBATCH '--constraint=a100&ib'"
    assert "#SBATCH --no-requeue" in lines and not any("null" in line for line in lines)
    assert continued("\n".join(lines), Path("/runs/a"), "9").count("\nset -- ") == 1
