"""What a program of an execution sees: the choice between a private root (user namespaces) and none, and its environment.

Invariants under `userns`: the workspace is `/workspace` and HOME `/home/agent` for every execution alike (prompts that
quote a path share their prefix), host OS folders and `readonly` folders are read-only, the run folder is not visible.
Without namespaces (`none`, or `auto` on a machine that has none) programs see the host, which needs `trust_tasks=true`.
The network stays: the gateway is on loopback.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from gyre_hpc.errors import ConfigError
from gyre_hpc.executions.forkserver import LaunchSpec
from gyre_hpc.executions.launcher import Launcher, LaunchFailed
from gyre_hpc.executions.namespace import Bind, Root

log = logging.getLogger(__name__)

SYSTEM_FOLDERS = ("/usr", "/etc", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SECRETS = ("/etc/shadow", "/etc/gshadow", "/etc/munge", "/etc/ssl/private", "/etc/security/opasswd")
"""Masked where this user could read them: a run started as root must not hand them to its tasks."""
WORKSPACE = Path("/workspace")
HOME = Path("/home/agent")
SEARCH_PATH = "/usr/local/bin:/usr/bin:/bin"


@dataclasses.dataclass(frozen=True)
class Sandbox:
    """`isolated`: private root; else the host as it is. `readonly`: host folders every program of the run may read."""

    isolated: bool
    run_root: Path
    readonly: tuple[Path, ...] = ()

    def seen(self, workspace: Path) -> Path:
        """Where a program finds its workspace."""
        return WORKSPACE if self.isolated else workspace

    def command(
        self,
        argv: Sequence[str],
        *,
        workspace: Path,
        home: Path | None = None,
        readonly: Iterable[Path] = (),
        env: Mapping[str, str] | None = None,
        file_limit: int = 0,
    ) -> LaunchSpec:
        """`argv` started in the workspace with a scrubbed environment plus `env`. No `home`: HOME is a private /tmp."""
        own_tmp = "/tmp" if self.isolated else tempfile.gettempdir()
        shown_home = HOME if self.isolated and home is not None else home or Path(own_tmp)
        scrubbed = {
            "PATH": SEARCH_PATH,
            "HOME": str(shown_home),
            "TMPDIR": own_tmp,
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        root = self._root(workspace, home, readonly) if self.isolated else None
        return LaunchSpec(
            list(argv), {**scrubbed, **(env or {})}, str(self.seen(workspace)), root, file_limit
        )

    def _root(self, workspace: Path, home: Path | None, readonly: Iterable[Path]) -> Root:
        own = [Bind(str(path), str(path)) for path in readonly if _needs_bind(path, self.run_root)]
        own.append(Bind(str(workspace), str(WORKSPACE), writable=True))
        if home is not None:
            own.append(Bind(str(home), str(HOME), writable=True))
        shared = [str(path) for path in self.readonly if _needs_bind(path, self.run_root)]
        secrets = (path for path in SECRETS if os.access(path, os.R_OK))
        return Root((*system_folders(), *shared), (str(self.run_root), *secrets), tuple(own))


def system_folders() -> tuple[str, ...]:
    """The host's OS folders, and the resolver's file where /etc only links to it."""
    resolver = os.path.realpath("/etc/resolv.conf")
    extra = (resolver,) if os.path.isfile(resolver) and not _in_system(Path(resolver)) else ()
    return (*(path for path in SYSTEM_FOLDERS if os.path.exists(path)), *extra)


def _in_system(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in SYSTEM_FOLDERS)


def _needs_bind(path: Path, run_root: Path) -> bool:
    return path.is_relative_to(run_root) or not _in_system(path)


def fast_python() -> str:
    """A Python for stdlib-only programs that starts fast (no virtual environment, no version-manager shim)."""
    system = "/usr/bin/python3"
    return (
        system
        if _in_system(Path(os.path.realpath(system))) and os.path.exists(system)
        else os.path.realpath(sys.executable)
    )


async def probe(launcher: Launcher) -> str:
    """Why user namespaces do not work here; "" if they do. Really enters one and looks around."""
    with tempfile.TemporaryDirectory(prefix="gyre-probe-") as name:
        workspace = Path(name, "workspace")
        workspace.mkdir()
        spec = Sandbox(True, Path(name)).command(["/bin/sh", "-c", "echo ok > file"], workspace=workspace)
        output = Path(name, "output")
        try:
            process = await launcher.launch(spec, output, output)
            code = await process.wait()
        except LaunchFailed as error:
            return error.message
        if code != 0 or not (workspace / "file").is_file():
            return f"a program in a user namespace ended with {code}: {output.read_text(errors='replace')[-200:]}"
        return ""


def available() -> tuple[bool, str]:
    """(True, "") if programs can be isolated on this machine, else (False, why). Not inside a running event loop."""

    async def ask() -> str:
        launcher = Launcher()
        try:
            return await probe(launcher)
        finally:
            await launcher.close()

    why = asyncio.run(ask())
    return not why, why


def enabling_command() -> str:
    """What an administrator runs to allow unprivileged user namespaces on this machine."""
    switches = {
        "kernel/apparmor_restrict_unprivileged_userns": ("1", "0"),
        "kernel/unprivileged_userns_clone": ("0", "1"),
        "user/max_user_namespaces": ("0", "15000"),
    }
    for name, (closed, opened) in switches.items():
        path = Path("/proc/sys", name)
        if path.is_file() and path.read_text().strip() == closed:
            return f"sysctl {name.replace('/', '.')}={opened}"
    return "sysctl kernel.unprivileged_userns_clone=1"


async def choose(
    policy: str, trusted: bool, run_root: Path, readonly: Iterable[str], launcher: Launcher
) -> Sandbox:
    """The sandbox of a run. Raises ConfigError when tasks would run unisolated and nobody said that they are trusted."""
    folders = tuple(Path(path).absolute() for path in readonly)
    for folder in folders:
        if not folder.exists():
            raise ConfigError(f"tasks.readonly: {folder} does not exist", fix="name folders of this node")
    why = "tasks.sandbox=none" if policy == "none" else await probe(launcher)
    if not why:
        return Sandbox(True, run_root.resolve(), folders)
    if policy == "userns" or not trusted:
        fix = f"allow user namespaces ({enabling_command()}), or accept that tasks run with your rights: trust_tasks=true"
        raise ConfigError(
            f"tasks.sandbox={policy}: harness and tests would run without a sandbox: {why}", fix=fix
        )
    log.warning("tasks run without a sandbox, with the rights of this user: %s", why)
    return Sandbox(False, run_root.resolve(), folders)
