"""Runs submitted to a real Slurm as a person does it, and what a person sees of them. All waits are bounded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.launch.cluster import SCRIPT, squeue

REPO = SCRIPT.parents[1]
RUN_S = 600.0
SMALL = (
    "experiment=quickstart",
    "cluster=devcluster",
    "schedule.steps=2",
    "schedule.batch_groups=2",
    "schedule.executions_per_group=4",
    "tasks.heldout=0",
    "trust_tasks=true",
)
LEFT_BY_A_JOB = {"SLURM_MEM_PER_CPU": "17", "SLURM_NTASKS": "9", "SBATCH_QOS": "nonsense", "PMI_RANK": "3"}


def gyre(*arguments: str) -> str:
    """What a person sees of a command that succeeds; the shell is one inside some other job."""
    command = [sys.executable, "-m", "gyre_hpc.cli", *arguments]
    env = os.environ | LEFT_BY_A_JOB | {"PYTHONPATH": str(REPO)}
    done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def submitted(*arguments: str) -> tuple[str, Path]:
    """Job id and run folder."""
    told = dict(line.split(maxsplit=1) for line in gyre("submit", *arguments).splitlines()[:4])
    return told["job"], Path(told["run"])


def until(what: str, probe: Callable[[], object], limit_s: float = RUN_S) -> None:
    deadline = time.monotonic() + limit_s
    while not probe():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.2)


def state(job: str) -> str:
    """State of the (first component of the) job, also when it has ended."""
    return (squeue(job, "%T", "--states=all").split() or [""])[0]


def completed(job: str, run: Path) -> bool:
    now = state(job)
    log = run / "jobs" / f"{job}.log"
    assert now not in ("FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT"), log.read_text()
    return now == "COMPLETED"


def steps_taken(run: Path) -> int:
    return int(json.loads((run / "summary.json").read_text())["steps"])
