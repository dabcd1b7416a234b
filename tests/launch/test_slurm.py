"""Slurm steps on a real cluster of two nodes (slurm/dev_cluster.sh), and without any cluster the refusal to start."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from gyre_hpc.composition import compose
from gyre_hpc.config import save_run_config
from gyre_hpc.config_cluster import ClusterConfig
from gyre_hpc.errors import ConfigError
from gyre_hpc.launch import slurm
from gyre_hpc.launch.choice import make_launcher
from gyre_hpc.launch.commands import SlurmCommandFailed
from gyre_hpc.launch.job.allocation import Allocation
from gyre_hpc.launch.job.submit import submit
from gyre_hpc.launch.job.successor import submit_successor
from gyre_hpc.launch.local import spawn
from gyre_hpc.launch.nodes.placement import Node
from gyre_hpc.launch.nodes.scratch import job_folder
from gyre_hpc.launch.plan import ProcessSpec
from gyre_hpc.launch.slurm import NODE_LOST, SlurmLauncher, SlurmStep
from gyre_hpc.layout import RunLayout
from tests.launch.cluster import PATIENCE_S, SCRIPT, dev_cluster, running_cluster, squeue


def test_slurm_outside_a_job_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ConfigError, match="sbatch"):
        make_launcher(ClusterConfig(kind="slurm"), RunLayout(tmp_path))


@pytest.mark.parametrize(
    ("squeue_says", "usable"),
    [
        ("RUNNING n[1-2]", {"n1", "n2"}),
        ("RUNNING n1\nRUNNING n2", {"n1", "n2"}),
        ("COMPLETING n2", None),
        ("RUNNING n1\nCOMPLETING n2", None),
        ("PENDING ", None),
        ("", None),
    ],
)
def test_a_job_that_loses_its_nodes_because_it_ends_says_nothing_about_them(
    squeue_says: str, usable: set[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {"squeue": squeue_says, "sinfo": "n1 alloc main*\nn2 mix main*"}
    monkeypatch.setattr(slurm, "query", lambda *argv: answers[argv[0]])
    monkeypatch.setattr(slurm, "hostnames", lambda nodelist: ["n1", "n2"])
    assert bare_launcher(monkeypatch)._usable() == usable


def test_slurm_that_does_not_answer_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(*argv: str) -> str:
        asked.append(argv)
        raise SlurmCommandFailed("no answer within 30 s")

    monkeypatch.setattr(slurm, "query", refuse)
    launcher = bare_launcher(monkeypatch)
    assert [launcher._usable() for _ in range(5)] == [None] * 5 and len(asked) == 1
    launcher._ask_after = 0.0
    assert launcher._usable() is None and len(asked) == 2


def bare_launcher(monkeypatch: pytest.MonkeyPatch) -> SlurmLauncher:
    monkeypatch.setattr(slurm, "read_gres", lambda allocation: {})
    return SlurmLauncher(Allocation(("7",), (Node("n1", 4, None), Node("n2", 4, None))), ClusterConfig())


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with running_cluster("test", nodes=2, cpus=4, gpus=0, port=17600):
        yield


@pytest_asyncio.fixture
async def launcher(cluster: None, tmp_path: Path) -> AsyncIterator[SlurmLauncher]:
    """The launcher of a job that holds both nodes."""
    command = ["sbatch", "--parsable", "-N2", "--exclusive", "--mem=2048", "--no-kill", "-o", "/dev/null"]
    job = subprocess.check_output([*command, "--wrap=sleep 600"], text=True).strip()
    async with asyncio.timeout(PATIENCE_S):
        while (nodes := squeue(job, "%t %N")).split()[:1] != ["R"]:
            await asyncio.sleep(0.1)
    env = {
        "SLURM_JOB_ID": job,
        "SLURM_JOB_NODELIST": nodes.split()[1],
        "SLURM_JOB_CPUS_PER_NODE": "4(x2)",
        "SLURM_MEM_PER_NODE": "2048",
    }
    yield SlurmLauncher.from_environment(ClusterConfig(kind="slurm", cells=1), RunLayout(tmp_path), env)
    subprocess.run(["scancel", job], check=True)


def shell(tmp_path: Path, name: str, script: str, **shape: object) -> ProcessSpec:
    log = tmp_path / f"{name}.log"
    return ProcessSpec(name, ["/bin/bash", "-c", script], {"GREETING": "hi"}, log, mem="256M", **shape)  # type: ignore[arg-type]


async def until_logged(spec: ProcessSpec, word: str, count: int = 1) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not spec.log.exists() or spec.log.read_text().split().count(word) < count:
            await asyncio.sleep(0.05)


def steps(step: SlurmStep) -> str:
    return squeue(step._job, "%j", "-s")


@pytest.mark.slurm
@pytest.mark.root
async def test_a_step_runs_its_ranks_with_our_environment_and_reports_its_exit(
    launcher: SlurmLauncher, tmp_path: Path
) -> None:
    spec = shell(tmp_path, "cell-0", "echo $GREETING $SLURM_PROCID; exit 5", ranks=2, cpus_per_rank=2)
    step = await launcher.start(spec)
    assert await step.wait() == 5
    assert {"hi", "0", "1"} <= set(spec.log.read_text().split())


@pytest.mark.slurm
@pytest.mark.root
async def test_steps_run_side_by_side_and_end_one_by_one(launcher: SlurmLauncher, tmp_path: Path) -> None:
    specs = [shell(tmp_path, f"cell-{index}", "echo up; sleep 600", cpus_per_rank=2) for index in range(3)]
    running = [await launcher.start(spec) for spec in specs]
    for spec in specs:
        await until_logged(spec, "up")
    await running[0].terminate(PATIENCE_S)
    running[1].kill()
    assert await running[1].wait() != 0
    assert running[0].poll() is not None and running[2].poll() is None
    assert "cell-2" in steps(running[2])
    await running[2].terminate(PATIENCE_S)


async def test_a_step_that_is_ended_while_slurm_does_not_answer_is_ended_once_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether we end it or somebody has killed its srun: the tasks live on in both cases."""
    asked: list[tuple[str, str]] = []

    def answers_the_fourth_time(job: str, step_name: str, sig: str) -> bool:
        asked.append((step_name, sig))
        if len(asked) % 4:
            raise SlurmCommandFailed("Unable to contact slurm controller")
        return True

    monkeypatch.setattr(slurm, "signal_step", answers_the_fourth_time)
    monkeypatch.setattr(slurm, "AGAIN_S", 0.01)
    monkeypatch.setattr(slurm, "KILL_S", 0.2)
    for killed_outside in (True, False):
        spec = ProcessSpec("cell-0", ["sleep", "600"], log=tmp_path / "log")
        step = SlurmStep("7", "cell-0.1", spec, spawn(spec), {}, ("n1",))
        asked.clear()
        if killed_outside:
            os.kill(step.pid, signal.SIGKILL)
        else:
            step.kill()
        async with asyncio.timeout(PATIENCE_S):
            assert await step.wait() == -9
            while len(asked) < 4:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert asked == [("cell-0.1", "KILL")] * 4


@pytest.mark.slurm
@pytest.mark.root
def test_a_submission_whose_answer_is_lost_makes_one_job(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, folder = shutil.which("sbatch"), tmp_path / "bin"
    folder.mkdir()
    (folder / "sbatch").write_text(f'#!/bin/bash\n{real} "$@"; echo "Socket timed out" >&2; exit 1\n')
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    layout = RunLayout(tmp_path / "run")
    layout.root.mkdir()
    script = "#!/bin/bash\n#SBATCH --job-name=once --mem=64 --output=/dev/null --hold\nsleep 600\n"
    job = submit(script, layout).job
    listed = subprocess.check_output(["squeue", "-h", "--name=once", "-o", "%i"], text=True).split()
    assert listed == [job] and (layout.jobs / f"{job}_submission.sh").read_text() == script
    subprocess.run(["scancel", job], check=True)


@pytest.mark.slurm
@pytest.mark.root
async def test_a_service_has_cpus_and_memory_of_its_own(launcher: SlurmLauncher, tmp_path: Path) -> None:
    """As Slurm tells of its step; where there are cgroups they confine it to that."""
    spec = replace(shell(tmp_path, "gateway-0", "echo up; exec sleep 600", cpus_per_rank=2), service=True)
    step = await launcher.start(spec)
    await until_logged(spec, "up")
    (id,) = squeue(step._job, "%i %j", "-s").splitlines()[:1]
    told = subprocess.check_output(["scontrol", "show", "step", id.split()[0]], text=True)
    assert "TRES=cpu=2,mem=256M,node=1" in told and "Name=gateway-0.1" in told
    assert "--exact" in Path(f"/proc/{step.pid}/cmdline").read_text().split("\0")
    await step.terminate(PATIENCE_S)


@pytest.mark.slurm
@pytest.mark.root
async def test_every_node_is_tidied_beside_what_runs_there(launcher: SlurmLauncher, tmp_path: Path) -> None:
    """The nodes share this machine, so that one folder stands for what each of them keeps of the job."""
    busy = shell(tmp_path, "cell-0", "echo up; exec sleep 600", cpus_per_rank=4)
    step = await launcher.start(busy)
    await until_logged(busy, "up")
    await launcher.everywhere(["/bin/bash", "-c", "echo on $SLURMD_NODENAME"], tmp_path / "log")
    told = (tmp_path / "log").read_text().splitlines()
    assert sorted(line for line in told if line.startswith("on ")) == ["on cell0", "on cell1"]
    layout, base = RunLayout(tmp_path / "run"), tmp_path / "node"
    for folder in (layout.root, base):
        folder.mkdir()
    save_run_config(compose([f"cluster.scratch={base}"]), layout.root)
    left = job_folder(str(base), layout, {"SLURM_JOB_ID": step._job})
    (left / "cell-3").mkdir(parents=True)
    command = [sys.executable, "-m", "gyre_hpc.launch.nodes.scratch", "--run", str(layout.root)]
    await launcher.everywhere(command, tmp_path / "log")
    assert list(base.iterdir()) == [] and step.poll() is None
    await step.terminate(PATIENCE_S)


@pytest.mark.slurm
@pytest.mark.root
async def test_a_dead_rank_ends_its_own_step_only(launcher: SlurmLauncher, tmp_path: Path) -> None:
    script = "echo up; [ $SLURM_PROCID = 1 ] && kill -9 $$; exec sleep 600"
    other = shell(tmp_path, "cell-1", "echo up; exec sleep 600")
    survivor = await launcher.start(other)
    await until_logged(other, "up")
    step = await launcher.start(shell(tmp_path, "cell-0", script, ranks=2))
    async with asyncio.timeout(PATIENCE_S):
        assert await step.wait() != 0
    assert survivor.poll() is None
    await survivor.terminate(PATIENCE_S)


@pytest.mark.slurm
@pytest.mark.root
async def test_a_step_whose_srun_dies_is_cancelled(launcher: SlurmLauncher, tmp_path: Path) -> None:
    spec = shell(tmp_path, "cell-0", "echo up; exec sleep 600")
    step = await launcher.start(spec)
    await until_logged(spec, "up")
    os.kill(step.pid, 9)
    assert await step.wait() == -9
    async with asyncio.timeout(PATIENCE_S):
        while "cell-0" in steps(step):
            await asyncio.sleep(0.1)


@pytest.mark.slurm
@pytest.mark.root
async def test_a_lost_node_ends_its_step_and_gets_no_other(launcher: SlurmLauncher, tmp_path: Path) -> None:
    spec = shell(tmp_path, "cell-0", "echo up $SLURMD_NODENAME; exec sleep 600")
    step = await launcher.start(spec)
    await until_logged(spec, "up")
    node = spec.log.read_text().split()[-1]
    dev_cluster("kill-node", node)
    try:
        async with asyncio.timeout(PATIENCE_S):
            assert await step.wait() == step.poll() == NODE_LOST
            while node in [alive.name for alive in await launcher._live_nodes()]:
                await asyncio.sleep(0.2)
        again = shell(tmp_path, "cell-0b", "echo on $SLURMD_NODENAME")
        assert await (await launcher.start(again)).wait() == 0
        assert again.log.read_text().split()[-1] != node
    finally:
        dev_cluster("start-node", node)


async def by_hand(folder: Path, *size: str) -> tuple[str, ProcessSpec]:
    """slurm/train.sbatch with a `gyre` that prints its arguments and how it ended: its job, and where it logs."""
    program = folder / ".venv" / "bin" / "gyre"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/bash\ntrap 'echo ended; exit 9' TERM\necho $@\nsleep 600 & wait\n")
    program.chmod(0o755)
    spec = ProcessSpec("job", ["true"], log=folder / "job.log")
    script = SCRIPT.with_name("train.sbatch")
    command = ["sbatch", "--parsable", *size, f"--output={spec.log}", f"--chdir={folder}", str(script)]
    job = subprocess.check_output([*command, "steps=3"], text=True, cwd=folder).strip()
    await until_logged(spec, "steps=3")
    return job, spec


@pytest.mark.slurm
@pytest.mark.root
async def test_the_batch_script_becomes_the_controller_and_gets_its_signals(
    cluster: None, tmp_path: Path
) -> None:
    job, spec = await by_hand(tmp_path, "--nodes=1", "--cpus-per-task=2", "--mem=512")
    assert spec.log.read_text().split() == ["controller", "cluster.kind=slurm", "steps=3"]
    subprocess.run(["scancel", "--batch", "--signal=TERM", job], check=True)
    await until_logged(spec, "ended")


@pytest.mark.slurm
@pytest.mark.root
async def test_a_successor_of_a_script_by_hand_has_the_size_of_its_job_and_goes_on_with_the_run(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was given on the command line of sbatch is part of the job, not of the script that Slurm gives of it."""
    monkeypatch.chdir(tmp_path)
    size = ("--nodes=2", "--cpus-per-task=2", "--mem=512", "--time=7", "--no-requeue", "--job-name=by-hand")
    job, spec = await by_hand(tmp_path, *size)
    layout = RunLayout(tmp_path / "run")
    layout.root.mkdir()
    successor = submit_successor(layout, job).job
    shape = "%j %D %m %l %P"
    assert squeue(successor, shape) == squeue(job, shape) == "by-hand 2 512M 7:00 debug"
    assert squeue(successor, "%t") == "PD"
    subprocess.run(["scancel", job], check=True)
    await until_logged(spec, f"resume={layout.root}")
    assert squeue(successor, "%C") == "4"
    subprocess.run(["scancel", successor], check=True)


@pytest.mark.slurm
@pytest.mark.root
@pytest.mark.full
@pytest.mark.timeout(900)
async def test_a_whole_run_trains_with_one_step_per_cell(cluster: None, tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    size = ["--nodes=2", "--cpus-per-task=4", "--mem=4G", f"--output={log}", f"--chdir={tmp_path}"]
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    keys = ["experiment=quickstart", "name=flat", f"root={tmp_path}", "cluster.cells=2", "tasks.heldout=0"]
    keys += [
        "schedule.steps=1",
        "schedule.batch_groups=2",
        "schedule.executions_per_group=4",
        "trust_tasks=true",
    ]
    command = ["sbatch", "--parsable", *size, str(SCRIPT.with_name("train.sbatch")), *keys]
    job = subprocess.check_output(command, text=True, env=env).strip()
    seen: set[str] = set()
    async with asyncio.timeout(600):
        while state := squeue(job, "%T"):
            seen |= set(squeue(job, "%j", "-s").split()) if state == "RUNNING" else set()
            await asyncio.sleep(0.5)
    summaries = list(tmp_path.glob("flat-*/summary.json"))
    assert summaries, log.read_text()
    assert json.loads(summaries[0].read_text())["steps"] == 1
    assert {name.partition(".")[0] for name in seen} >= {
        "cell-0",
        "cell-1",
        "gateway-0",
        "runner-0",
        "processor-0",
    }
