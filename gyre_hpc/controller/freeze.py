"""What code made a run: package version, git state and a copy of the package, frozen at its start."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec

PACKAGE = Path(__file__).resolve().parent.parent


class Frozen(msgspec.Struct, frozen=True):
    """Content of `frozen.json`. `commit` is "" where the package is not in a git checkout; `dirty` lists changed files."""

    version: str
    python: str
    commit: str
    dirty: tuple[str, ...]
    packages: dict[str, str]


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(PACKAGE), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=20,
            check=False,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _tracked() -> bool:
    """Whether git knows the package: an environment inside some other checkout must not pass for its code."""
    return bool(_git("ls-files", "--", "__init__.py"))


def freeze_code(run: Path) -> None:
    """Write `frozen.json`, `package/` (no weights) and, of a changed checkout, `dirty.diff` into the run folder."""
    tracked = _tracked()
    names = ("torch", "megatron-core", "renderers", "numpy", "msgspec", "h5py")
    frozen = Frozen(
        version=importlib.metadata.version("gyre_hpc"),
        python=sys.version.split()[0],
        commit=_git("rev-parse", "HEAD").strip() if tracked else "",
        dirty=tuple(line[3:] for line in _git("status", "--porcelain").splitlines()) if tracked else (),
        packages={name: importlib.metadata.version(name) for name in names},
    )
    (run / "frozen.json").write_bytes(msgspec.json.format(msgspec.json.encode(frozen)))
    if changes := _git("diff", "HEAD") if tracked else "":
        (run / "dirty.diff").write_text(changes)
    ignore = shutil.ignore_patterns("__pycache__", "*.safetensors")
    shutil.copytree(PACKAGE, run / "package" / PACKAGE.name, ignore=ignore)
