"""What a program in a private root can see and change, and when a run may do without one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gyre_hpc.errors import ConfigError
from gyre_hpc.executions.launcher import Launcher
from gyre_hpc.executions.sandbox import HOME, WORKSPACE, Sandbox, choose, fast_python

isolated = pytest.mark.userns


async def say(launcher: Launcher, sandbox: Sandbox, workspace: Path, text: str, **options: object) -> str:
    """What a shell script prints in the sandbox, output and errors together."""
    log = workspace.parent / "log"
    log.unlink(missing_ok=True)
    spec = sandbox.command(["/bin/sh", "-c", text], workspace=workspace, **options)  # type: ignore[arg-type]
    process = await launcher.launch(spec, log, log)
    await process.wait()
    return log.read_text()


@pytest.fixture
def private(tmp_path: Path) -> Sandbox:
    toolchain = tmp_path / "toolchain"
    toolchain.mkdir()
    (toolchain / "tool").write_text("hammer")
    return Sandbox(True, tmp_path / "run", (toolchain,))


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "executions" / "workspace"
    folder.mkdir(parents=True)
    (tmp_path / "run" / "secret").write_text("0123")
    return folder


@isolated
async def test_every_execution_finds_its_workspace_and_home_in_the_same_place(
    launcher: Launcher, private: Sandbox, workspace: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    assert await say(launcher, private, workspace, "pwd; echo $HOME", home=home) == f"{WORKSPACE}\n{HOME}\n"


@isolated
async def test_the_run_folder_and_other_files_of_the_host_are_not_visible(
    launcher: Launcher, private: Sandbox, workspace: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    hidden = workspace.parent / "hidden"
    hidden.mkdir()
    seen = await say(
        launcher,
        private,
        workspace,
        f"ls {run} {run}/secret {Path(__file__)}; ls -A /root /tmp; ls -A {run.parent}",
    )
    assert "secret" not in seen.replace(f"{run}/secret'", "")
    assert seen.count("No such file or directory") >= 3
    assert "toolchain" in seen


@isolated
async def test_a_run_folder_below_a_visible_folder_is_masked(launcher: Launcher, tmp_path: Path) -> None:
    run = tmp_path / "run"
    workspace = run / "workspace"
    workspace.mkdir(parents=True)
    (run / "secret").write_text("0123")
    sandbox = Sandbox(True, run, (tmp_path,))
    assert await say(launcher, sandbox, workspace, f"ls -A {run}; ls {tmp_path}") == "run\n"


@isolated
@pytest.mark.parametrize("place", ["/usr", "/etc", "/", "/proc/sys/kernel", "{toolchain}", "/dev", "/home"])
async def test_nothing_outside_the_workspace_can_be_written(
    launcher: Launcher, private: Sandbox, workspace: Path, tmp_path: Path, place: str
) -> None:
    folder = place.format(toolchain=tmp_path / "toolchain")
    said = await say(launcher, private, workspace, f"echo x > {folder}/gyre-test && echo written")
    assert "written" not in said
    assert not Path(folder, "gyre-test").exists()


@isolated
async def test_the_root_cannot_be_remounted_from_inside(
    launcher: Launcher, private: Sandbox, workspace: Path
) -> None:
    said = await say(
        launcher,
        private,
        workspace,
        "mount -o remount,bind,rw /usr && echo done; umount /proc/sys && echo done; grep CapEff /proc/self/status",
    )
    assert "done" not in said
    assert "CapEff:\t0000000000000000" in said


@isolated
async def test_kernel_settings_are_read_only_even_for_root(
    launcher: Launcher, private: Sandbox, workspace: Path
) -> None:
    said = await say(launcher, private, workspace, "echo 0 > /proc/sys/kernel/printk_delay && echo written")
    assert "written" not in said


@isolated
@pytest.mark.root
async def test_a_run_started_as_root_does_not_hand_out_the_host_s_secrets(
    launcher: Launcher, private: Sandbox, workspace: Path
) -> None:
    assert Path("/etc/shadow").read_text()
    assert await say(launcher, private, workspace, "cat /etc/shadow") == ""


@isolated
async def test_workspace_home_and_tmp_are_writable_and_tmp_is_private(
    launcher: Launcher, private: Sandbox, workspace: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    text = "echo w > file; echo h > $HOME/file; echo t > /tmp/gyre-private && cat /tmp/gyre-private"
    assert await say(launcher, private, workspace, text, home=home) == "t\n"
    assert (workspace / "file").read_text() == "w\n"
    assert (home / "file").read_text() == "h\n"
    assert not Path("/tmp/gyre-private").exists()


@isolated
async def test_other_processes_are_not_visible(launcher: Launcher, private: Sandbox, workspace: Path) -> None:
    said = await say(
        launcher, private, workspace, f"kill -0 {os.getpid()} || echo none; ls /proc | grep -c '^[0-9]'"
    )
    assert said.splitlines()[-2] == "none"
    assert int(said.splitlines()[-1]) <= 5


async def test_readonly_folders_are_readable(
    launcher: Launcher, sandbox: Sandbox, workspace: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "with space"
    folder.mkdir()
    (folder / "file").write_text("seen")
    text = f"cat '{folder}/file'; echo x > '{folder}/new' && echo written"
    said = await say(launcher, sandbox, workspace, text, readonly=[folder])
    assert said.startswith("seen")
    assert ("written" in said) is not sandbox.isolated


async def test_the_environment_is_scrubbed(
    launcher: Launcher, sandbox: Sandbox, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GYRE_TEST_TOKEN", "secret")
    said = await say(launcher, sandbox, workspace, "env", env={"EXTRA": "1"})
    assert "GYRE_TEST_TOKEN" not in said
    assert "EXTRA=1" in said


async def test_loopback_is_reachable(launcher: Launcher, sandbox: Sandbox, workspace: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket; socket.create_connection(('127.0.0.1', {port})).sendall(b'hello')"
        assert await say(launcher, sandbox, workspace, f'{fast_python()} -I -S -c "{code}"') == ""
        connection, _ = server.accept()
        with connection:
            assert connection.recv(10) == b"hello"


async def test_running_without_a_sandbox_needs_trust(launcher: Launcher, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trust_tasks=true"):
        await choose("none", False, tmp_path, [], launcher)
    assert not (await choose("none", True, tmp_path, [], launcher)).isolated


async def test_a_missing_readonly_folder_is_named(launcher: Launcher, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tasks\.readonly: /no/such"):
        await choose("none", True, tmp_path, ["/no/such"], launcher)


@isolated
async def test_auto_isolates_where_it_can(launcher: Launcher, tmp_path: Path) -> None:
    assert (await choose("auto", False, tmp_path, [], launcher)).isolated


WITHOUT_NAMESPACES = """
import asyncio
from pathlib import Path
from gyre_hpc.errors import ConfigError
from gyre_hpc.executions.launcher import Launcher
from gyre_hpc.executions.sandbox import choose
async def main():
    for policy, trusted in (("auto", False), ("userns", True), ("auto", True)):
        try:
            print((await choose(policy, trusted, Path("/"), [], Launcher())).isolated)
        except ConfigError as error:
            print(error.fix)
asyncio.run(main())
"""


@isolated
def test_a_machine_without_user_namespaces_is_found_out_and_told_how_to_enable_them() -> None:
    forbid = "echo 0 > /proc/sys/user/max_user_namespaces && exec "
    command = ["unshare", "-Ur", "sh", "-c", forbid + '"$0" -c "$1"', sys.executable, WITHOUT_NAMESPACES]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert "sysctl user.max_user_namespaces=15000" in said[0] and "trust_tasks=true" in said[0]
    assert "trust_tasks=true" in said[1]
    assert said[2] == "False"
