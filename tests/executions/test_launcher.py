"""The fork server: what becomes of a program, and that nothing of it is ever left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gyre_hpc.executions.forkserver import LaunchSpec, decode, encode
from gyre_hpc.executions.launcher import Launcher, LaunchFailed, Process
from gyre_hpc.executions.namespace import Bind, Root
from gyre_hpc.executions.sandbox import Sandbox
from tests.executions.alive import Alive

FAMILY_OF_THREE = "setsid sleep 1000 & (sleep 1000 & sleep 1000) & echo up; wait"


async def shell(launcher: Launcher, sandbox: Sandbox, workspace: Path, text: str, out: Path) -> Process:
    return await launcher.launch(sandbox.command(["/bin/sh", "-c", text], workspace=workspace), out, out)


def test_a_launch_request_survives_the_wire() -> None:
    root = Root(("/usr",), ("/run",), (Bind("/a b", "/c", True), Bind("/d", "/e")))
    spec = LaunchSpec(["x", "ü\n"], {"A": "1"}, "/", root, 5)
    assert decode(encode(spec)[4:]) == spec


@pytest.mark.parametrize(
    ("text", "code"), [("true", 0), ("exit 3", 3), ("kill -TERM $$", -15), ("kill -SEGV $$", -11)]
)
async def test_the_exit_is_reported_as_it_was(
    launcher: Launcher, sandbox: Sandbox, workspace: Path, tmp_path: Path, text: str, code: int
) -> None:
    process = await shell(launcher, sandbox, workspace, text, tmp_path / "log")
    assert await process.wait() == code


async def test_a_missing_program_is_named(
    launcher: Launcher, sandbox: Sandbox, workspace: Path, tmp_path: Path
) -> None:
    for program in ("/no/such/program", "no-such-program"):
        with pytest.raises(LaunchFailed, match=program):
            await launcher.launch(
                sandbox.command([program], workspace=workspace), tmp_path / "log", tmp_path / "log"
            )


async def test_long_arguments_arrive_whole(
    launcher: Launcher, sandbox: Sandbox, workspace: Path, tmp_path: Path
) -> None:
    words = ["x" * 100_000, "y" * 100_000]
    spec = sandbox.command(["/bin/sh", "-c", 'echo "${#1} ${#2}"', "sh", *words], workspace=workspace)
    process = await launcher.launch(spec, tmp_path / "log", tmp_path / "log")
    assert await process.wait() == 0
    assert (tmp_path / "log").read_text() == "100000 100000\n"


async def test_ending_a_program_ends_all_its_descendants(
    launcher: Launcher, sandbox: Sandbox, workspace: Path, alive: Alive
) -> None:
    process = await shell(launcher, sandbox, workspace, FAMILY_OF_THREE, alive.path)
    alive.wait_for(b"up")
    assert not alive.none_left()
    process.end()
    await process.wait()
    assert alive.none_left()


async def test_a_program_that_exits_leaves_no_descendant(
    launcher: Launcher, sandbox: Sandbox, workspace: Path, alive: Alive
) -> None:
    process = await shell(launcher, sandbox, workspace, "setsid sleep 1000 & exit 4", alive.path)
    assert await process.wait() == 4
    assert alive.none_left()


async def test_programs_outlive_the_fork_server_and_the_next_launch_restarts_it(
    launcher: Launcher, sandbox: Sandbox, workspace: Path, tmp_path: Path
) -> None:
    os.mkfifo(workspace / "go")
    waiting = await shell(launcher, sandbox, workspace, "cat go; exit 5", tmp_path / "log")
    assert launcher.server_pid is not None
    os.kill(launcher.server_pid, signal.SIGKILL)
    second = await shell(launcher, sandbox, workspace, "exit 6", tmp_path / "log")
    assert await second.wait() == 6
    (workspace / "go").write_text("")
    assert await waiting.wait() == 5


OWNER = """
import asyncio, sys
from pathlib import Path
from gyre_hpc.executions.launcher import Launcher
from gyre_hpc.executions.sandbox import Sandbox
async def main():
    sandbox = Sandbox(sys.argv[1] == "True", Path(sys.argv[2]))
    spec = sandbox.command(["/bin/sh", "-c", sys.argv[4]], workspace=Path(sys.argv[2]))
    process = await Launcher().launch(spec, Path(sys.argv[3]), Path(sys.argv[3]))
    await process.wait()
asyncio.run(main())
"""


def test_the_death_of_the_owner_ends_its_programs(sandbox: Sandbox, workspace: Path, alive: Alive) -> None:
    arguments = [str(sandbox.isolated), str(workspace), str(alive.path), FAMILY_OF_THREE]
    owner = subprocess.Popen([sys.executable, "-c", OWNER, *arguments])
    alive.wait_for(b"up")
    owner.kill()
    owner.wait()
    alive.wait_until_none_left()
