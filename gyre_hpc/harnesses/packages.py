"""Harness packages in a private prefix: `npm:NAME@VERSION` by npm, `pypi:NAME==VERSION` by pip into a venv of its own.

A prefix holds `node_modules/` and `venv/`; the file INSTALLED lists what is in it and is written last, so a prefix
without it, or with another list, is made anew. Installing takes a lock beside the prefix. The installers see the
user's proxy, certificate and registry settings and nothing else of the environment.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from gyre_hpc.errors import ConfigError, GyreError, MissingInput

INSTALLED = "INSTALLED"
_PINNED = re.compile(r"npm:(?:@[\w.-]+/)?[\w.-]+@[\w.+-]+|pypi:[\w.-]+(?:\[[\w,.-]+\])?==[\w.+!-]+")
_ENVIRONMENT = re.compile(
    r"PATH|HOME|LANG|LC_\w+|TMPDIR|SSL_CERT_\w+|NODE_EXTRA_CA_CERTS|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE"
    r"|PIP_(INDEX_URL|EXTRA_INDEX_URL|FIND_LINKS|CERT|CONFIG_FILE|CONSTRAINT|DEFAULT_TIMEOUT|NO_INDEX)"
    r"|(?i:npm_config_(registry|cafile|cache)|(https?|no|all)_proxy)"
)


class InstallFailed(GyreError):
    """A package manager failed (names the command and its last words)."""


def prefix_of(packages: Sequence[str], root: str) -> Path:
    """Where these packages lie under `root`; "" = ~/.local/share/gyre/harnesses. Raises ConfigError for unpinned ones."""
    for package in packages:
        if not _PINNED.fullmatch(package):
            raise ConfigError(
                f"harness.packages: '{package}' is not pinned",
                fix="write npm:NAME@VERSION or pypi:NAME==VERSION",
            )
    folder = Path(root).expanduser() if root else Path.home() / ".local/share/gyre/harnesses"
    name = re.sub(r"[^\w.]+", "-", packages[0].partition(":")[2]).strip("-")
    return folder.absolute() / name


def programs(prefix: Path) -> list[Path]:
    """Folders in which installed programs are found."""
    return [prefix / "node_modules/.bin", prefix / "venv/bin"]


def is_installed(packages: Sequence[str], prefix: Path) -> bool:
    """Whether the prefix holds exactly these packages, whole."""
    marker = prefix / INSTALLED
    return marker.is_file() and marker.read_text().split() == list(packages)


def install(packages: Sequence[str], prefix: Path, lock: Path | None = None) -> bool:
    """Make the prefix hold these packages; False if it did already. Raises InstallFailed, MissingInput.

    `lock`: constraints for pip.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with _locked(prefix.with_name(prefix.name + ".lock")):
        if is_installed(packages, prefix):
            return False
        shutil.rmtree(prefix, ignore_errors=True)
        prefix.mkdir()
        wanted = {
            kind: [p.partition(":")[2] for p in packages if p.startswith(kind)] for kind in ("npm:", "pypi:")
        }
        if wanted["npm:"]:
            _run(
                [_tool("npm"), "install", "--prefix", str(prefix), "--no-audit", "--no-fund", *wanted["npm:"]]
            )
        if wanted["pypi:"]:
            _run([sys.executable, "-m", "venv", str(prefix / "venv")])
            constraints = [] if lock is None else ["--constraint", str(lock)]
            pip = [str(prefix / "venv/bin/python"), "-m", "pip", "install", "--quiet", *constraints]
            _run([*pip, *wanted["pypi:"]])
        (prefix / INSTALLED).write_text("\n".join(packages) + "\n")
    return True


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise MissingInput(
            f"program '{name}' is not on this machine", fix=f"install {name} (Node.js 20 or newer)"
        )
    return found


def installer_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What an installer sees of this environment."""
    return {key: value for key, value in environment.items() if _ENVIRONMENT.fullmatch(key)}


def _run(command: list[str]) -> None:
    env = installer_environment(os.environ)
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-5:])
        raise InstallFailed(
            f"{' '.join(command)} ended with {done.returncode}:\n{last}", fix="see its last words"
        )
