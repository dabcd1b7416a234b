"""Local processes: nothing of a group outlives its leader, nothing of a run outlives its controller."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from gyre_hpc.config_cluster import ClusterConfig
from gyre_hpc.errors import MissingInput
from gyre_hpc.launch.choice import make_launcher
from gyre_hpc.launch.local import LocalLauncher
from gyre_hpc.launch.plan import ProcessSpec, child_environment
from gyre_hpc.layout import RunLayout

PATIENCE_S = 60.0


def shell(tmp_path: Path, script: str, **env: str) -> ProcessSpec:
    return ProcessSpec("cell-0", ["/bin/sh", "-c", script], env, tmp_path / "logs" / "cell-0.log")


async def line_of(spec: ProcessSpec) -> str:
    """The first whole line of the log, once there is one."""
    async with asyncio.timeout(PATIENCE_S):
        while not (spec.log.exists() and "\n" in spec.log.read_text()):
            await asyncio.sleep(0.01)
    return spec.log.read_text().splitlines()[0]


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


async def until_dead(pid: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while alive(pid):
            await asyncio.sleep(0.01)


async def test_the_exit_code_is_reported_and_both_outputs_are_logged(tmp_path: Path) -> None:
    spec = shell(tmp_path, "echo out; echo err >&2; exit 7")
    handle = await LocalLauncher().start(spec)
    assert await handle.wait() == 7
    assert handle.poll() == 7
    assert sorted(spec.log.read_text().split()) == ["err", "out"]


async def test_a_later_attempt_appends_to_the_log(tmp_path: Path) -> None:
    spec = shell(tmp_path, "echo attempt")
    for _ in range(2):
        await (await LocalLauncher().start(spec)).wait()
    assert spec.log.read_text() == "attempt\nattempt\n"


async def test_a_running_process_has_no_exit_code_and_is_killed_with_its_group(tmp_path: Path) -> None:
    spec = shell(tmp_path, "sleep 600 & echo $!; wait")
    handle = await LocalLauncher().start(spec)
    child = int(await line_of(spec))
    assert handle.poll() is None
    handle.kill()
    assert await handle.wait() == -signal.SIGKILL
    await until_dead(child)


async def test_what_a_process_leaves_in_its_group_is_killed_when_it_ends(tmp_path: Path) -> None:
    spec = shell(tmp_path, "sleep 600 & echo $!")
    handle = await LocalLauncher().start(spec)
    assert await handle.wait() == 0
    await until_dead(int(await line_of(spec)))


async def test_terminate_lets_a_process_end_in_its_own_way(tmp_path: Path) -> None:
    spec = shell(tmp_path, "trap 'exit 3' TERM; echo ready; sleep 600 & wait")
    handle = await LocalLauncher().start(spec)
    await line_of(spec)
    await handle.terminate(PATIENCE_S)
    assert handle.poll() == 3


async def test_terminate_kills_what_does_not_end_within_the_grace(tmp_path: Path) -> None:
    spec = shell(tmp_path, "trap '' TERM; echo ready; while :; do sleep 600; done")
    handle = await LocalLauncher().start(spec)
    await line_of(spec)
    await handle.terminate(0.05)
    assert handle.poll() == -signal.SIGKILL
    handle.kill()
    await handle.terminate(0.0)


async def test_a_missing_program_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingInput, match="/nowhere/program"):
        await LocalLauncher().start(ProcessSpec("runner-0", ["/nowhere/program"], {}, tmp_path / "log"))


CONTROLLER = """
import asyncio, sys
from pathlib import Path
from gyre_hpc.launch.local import LocalLauncher
from gyre_hpc.launch.plan import ProcessSpec
async def main():
    handle = await LocalLauncher().start(ProcessSpec("cell-0", ["sleep", "600"], {}, Path(sys.argv[1])))
    print(handle.pid, flush=True)
    await handle.wait()
asyncio.run(main())
"""


async def test_a_process_dies_with_the_controller_that_started_it(tmp_path: Path) -> None:
    controller = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CONTROLLER, str(tmp_path / "log"), stdout=asyncio.subprocess.PIPE
    )
    assert controller.stdout is not None
    child = int(await controller.stdout.readline())
    assert alive(child)
    controller.kill()
    await controller.wait()
    await until_dead(child)


def test_the_environment_drops_what_an_enclosing_job_left(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_CPU_BIND", "SBATCH_GRES", "PMIX_RANK", "SLURM_CONF", "PLAIN"):
        monkeypatch.setenv(name, "x")
    env = child_environment({"SLURM_CPU_BIND_WANTED": "1"})
    assert "SLURM_CPU_BIND" not in env and "SBATCH_GRES" not in env and "PMIX_RANK" not in env
    assert env["SLURM_CONF"] == env["PLAIN"] == "x"
    assert env["SLURM_CPU_BIND_WANTED"] == "1"
    assert env["PATH"] == os.environ["PATH"]


def test_a_local_cluster_gets_the_local_launcher(tmp_path: Path) -> None:
    assert isinstance(make_launcher(ClusterConfig(), RunLayout(tmp_path)), LocalLauncher)


@pytest.mark.parametrize("shape", [{"nodes": 2, "ranks": 3}, {"ranks": 0}])
def test_a_spec_that_cannot_be_laid_out_is_refused(shape: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="cell-0"):
        ProcessSpec("cell-0", ["true"], **shape)  # type: ignore[arg-type]


async def test_a_process_that_asked_for_it_dies_with_its_parent(tmp_path: Path) -> None:
    child = (
        "import os, signal; from gyre_hpc.launch.signals import die_with_parent;"
        "die_with_parent(os.getppid()); print(os.getpid(), flush=True); signal.pause()"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", parent, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    pid = int(await asyncio.wait_for(process.stdout.readline(), PATIENCE_S))
    process.kill()
    await process.wait()
    await until_dead(pid)


async def test_a_process_whose_parent_is_gone_already_dies_at_once() -> None:
    code = "from gyre_hpc.launch.signals import die_with_parent; die_with_parent(1 << 22)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await asyncio.wait_for(process.wait(), PATIENCE_S) == -signal.SIGKILL
