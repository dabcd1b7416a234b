"""`gyre submit` on a real Slurm of four nodes: whole runs flat and het, a job that is too small, het steps, going on."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre_hpc.config_cluster import ClusterConfig
from gyre_hpc.launch.job.allocation import Allocation
from gyre_hpc.launch.nodes.placement import Node
from gyre_hpc.launch.plan import ProcessSpec
from gyre_hpc.launch.slurm import SlurmLauncher
from tests.launch.cluster import PATIENCE_S, dev_cluster, running_cluster, squeue
from tests.launch.slurm_runs import REPO, SMALL, completed, state, steps_taken, submitted, until

pytestmark = [pytest.mark.slurm, pytest.mark.root, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with running_cluster("submit", nodes=4, cpus=4, gpus=2, port=17620):
        yield


def tell_when_imported(module: Path, told: Path) -> None:
    """Let a module write what it sees of the variable INSIDE."""
    with module.open("a") as file:
        file.write("\nimport os as _os, pathlib as _pathlib\n")
        file.write(f"_pathlib.Path({str(told)!r}).write_text(_os.environ.get('INSIDE', 'nothing'))\n")


def test_a_submitted_run_ends_and_runs_the_code_that_was_frozen_with_it(
    cluster: None, tmp_path: Path
) -> None:
    """The cells run behind a prefix, as in a container; the controller does not."""
    job, run = submitted(
        *SMALL,
        f"root={tmp_path}",
        "cluster.job.sbatch=[--hold]",
        "cluster.container=[env,'INSIDE=container']",
    )
    told = {"controller/controller.py": tmp_path / "controller", "cells/cell.py": tmp_path / "cell"}
    for module, file in told.items():
        tell_when_imported(run / "package" / "gyre_hpc" / module, file)
    assert squeue(job, "%j") == "gyre-quickstart"
    subprocess.run(["scontrol", "release", job], check=True)
    until("the end of the job", lambda: completed(job, run))
    assert steps_taken(run) == 2 and (run / "report.html").is_file()
    assert [file.read_text() for file in told.values()] == ["nothing", "container"]


@pytest.mark.full
def test_a_het_run_has_its_cells_on_the_second_component(cluster: None, tmp_path: Path) -> None:
    """And runs from the nodes' own disks, if told so."""
    het = ("cluster.layout=het", "cluster.cell.gres=gpu:1", "cluster.job.sbatch=[--hold]")
    job, run = submitted(*SMALL, f"root={tmp_path}", "cluster.broadcast=package", *het)
    with (run / "package" / "gyre_hpc" / "cells" / "cell.py").open("a") as file:
        file.write(f"\nfrom pathlib import Path as _P\n_P({str(tmp_path / 'cell')!r}).write_text(__file__)\n")
    subprocess.run(["scontrol", "release", job], check=True)
    until("the start of the job", lambda: state(job) == "RUNNING", PATIENCE_S)
    until("the end of the job", lambda: completed(job, run))
    assert steps_taken(run) == 2
    log = (run / "logs" / "attempt-1" / "controller.log").read_text()
    steps = [line for line in log.splitlines() if "srun --jobid" in line]
    assert {("cell-" in line, "--het-group=1" in line) for line in steps} == {(True, True), (False, False)}
    imported = (tmp_path / "cell").read_text()
    assert imported.endswith("gyre_hpc/cells/cell.py") and not imported.startswith(str(run))
    assert not Path(imported).exists(), "the copy goes with the job"


@pytest.mark.full
def test_a_het_run_goes_on_without_the_node_of_a_cell(cluster: None, tmp_path: Path) -> None:
    """With fewer cells: its component has no other node with room."""
    job, run = submitted(*SMALL, f"root={tmp_path}", "cluster.layout=het", "schedule.steps=500")
    log, told = run / "logs" / "attempt-1" / "controller.log", run / "jobs" / f"{job}.log"
    until("a step", lambda: told.exists() and "step   1/500" in told.read_text())
    (lost,) = re.findall(r"gyre_hpc\.launch\.slurm: cell-1: srun .*--nodelist=(\w+)", log.read_text())
    dev_cluster("kill-node", lost)
    try:
        until("Slurm to cut the node off", lambda: lost not in squeue(job, "%N"), PATIENCE_S)
        fewer = f"cell-1: lost on {lost}; no node left has room for it: the run goes on with 1 of 2 cells"
        until("the news", lambda: fewer in told.read_text(), PATIENCE_S)
        reached = len(re.findall(r"^step ", told.read_text(), re.MULTILINE))
        until("more steps", lambda: len(re.findall(r"^step ", told.read_text(), re.MULTILINE)) > reached + 1)
        assert squeue(job, "%T").split() == ["RUNNING"] * 2
        subprocess.run(["scancel", "--batch", "--signal=TERM", job], check=True)
        until("the end of the job", lambda: state(job) == "FAILED")
        assert "interrupted by SIGTERM" in told.read_text()
    finally:
        dev_cluster("start-node", lost)


@pytest.mark.full
def test_a_run_that_was_told_to_end_goes_on_when_submitted_again(cluster: None, tmp_path: Path) -> None:
    job, run = submitted(*SMALL, f"root={tmp_path}", "schedule.steps=3")
    log = run / "jobs" / f"{job}.log"
    until("a step", lambda: log.exists() and "step   1/3" in log.read_text())
    subprocess.run(["scancel", "--batch", "--signal=TERM", job], check=True)
    until("the end of the job", lambda: state(job) == "FAILED")
    assert "interrupted by SIGTERM" in log.read_text()
    job, _ = submitted(f"resume={run}", "cluster.job.time=00:30:00")
    assert squeue(job, "%l") == "30:00"
    until("the end of the job", lambda: completed(job, run))
    assert steps_taken(run) == 3 and (run / "owner.2").exists()


@pytest.mark.full
def test_a_requeued_job_goes_on_by_itself(cluster: None, tmp_path: Path) -> None:
    job, run = submitted(*SMALL, f"root={tmp_path}", "schedule.steps=3")
    log = run / "jobs" / f"{job}.log"
    until("a step", lambda: log.exists() and "step   1/3" in log.read_text())
    subprocess.run(["scontrol", "requeue", job], check=True)
    until("the second start", lambda: (run / "owner.2").exists())
    until("the end of the job", lambda: completed(job, run))
    assert steps_taken(run) == 3 and "step   1/3" in log.read_text()


def test_a_job_that_is_too_small_is_refused_with_both_sides(cluster: None, tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    size = [
        "--nodes=2",
        "--cpus-per-task=1",
        "--mem=1G",
        "--gres=gpu:1",
        f"--output={log}",
        f"--chdir={REPO}",
    ]
    command = ["sbatch", "--parsable", *size, str(REPO / "slurm" / "train.sbatch")]
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    keys = ["experiment=quickstart", f"root={tmp_path}/runs", "cluster.cells=2", "cluster.cell.gres=gpu:2"]
    for wrong, right in (([], "2048 MiB"), (["cluster.cell.mem=1G"], "gpu:2")):
        log.unlink(missing_ok=True)
        job = subprocess.check_output([*command, *keys, *wrong], text=True, env=env).strip()
        until("the end of the job", lambda job=job: state(job) == "FAILED", PATIENCE_S)
        said = log.read_text()
        assert "configuration: cluster.layout=flat, 2 cells" in said and right in said
        assert f"allocation: job {job}: " in said and "1 CPUs, 1024 MiB, gres gres:gpu:1" in said
    assert not (tmp_path / "runs").exists()


HET = """#!/bin/bash
#SBATCH --nodes=1 --ntasks=1 --mem=1024 --no-kill --output=/dev/null
#SBATCH hetjob
#SBATCH --nodes=1 --ntasks=1 --cpus-per-task=2 --mem=1024 --no-kill --gres=gpu:1
sleep 600
"""


async def test_steps_of_a_het_job_run_on_their_component_and_end_when_told(
    cluster: None, tmp_path: Path
) -> None:
    (tmp_path / "job.sh").write_text(HET)
    leader = subprocess.check_output(["sbatch", "--parsable", tmp_path / "job.sh"], text=True).strip()
    until("both components", lambda: squeue(leader, "%T").split() == ["RUNNING"] * 2, PATIENCE_S)
    names = squeue(leader, "%N").split()
    nodes = (Node(names[0], 1, 1024, 0), Node(names[1], 2, 1024, 1))
    launcher = SlurmLauncher(Allocation((leader, str(int(leader) + 1)), nodes), ClusterConfig(kind="slurm"))

    def spec(name: str, **size: object) -> ProcessSpec:
        script = "trap 'echo told; exit 3' TERM; echo on $SLURMD_NODENAME; sleep 600 & wait"
        return ProcessSpec(name, ["/bin/bash", "-c", script], log=tmp_path / name, **size)  # type: ignore[arg-type]

    specs = [spec("runner-0", service=True), spec("cell-0", mem="512M", gres="gpu:1")]
    for each, node in zip(specs, names, strict=True):
        step = await launcher.start(each)
        async with asyncio.timeout(PATIENCE_S):
            while "on" not in each.log.read_text().split():
                await asyncio.sleep(0.05)
        assert each.log.read_text().split()[-2:] == ["on", node]
        await step.terminate(PATIENCE_S)
        assert step.poll() == 3 and "told" in each.log.read_text()
    assert {node.name for node in await launcher._live_nodes()} == set(names)
    subprocess.run(["scancel", leader], check=True)
