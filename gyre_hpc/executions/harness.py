"""The command line of the harness, from configuration: placeholders filled in, program found, folders it needs named.

The program comes from `harness.packages` (installed into a private prefix beforehand), else from this node's PATH.

{base_url} {workspace} {instruction} {seed} {max_turns} are replaced in one pass, so an instruction that contains
braces stays as it is. An empty command is the shipped reference harness, which needs only a Python.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gyre_hpc.config import HarnessConfig
from gyre_hpc.errors import ConfigError, MissingInput
from gyre_hpc.executions.reference_harness import PROGRAM
from gyre_hpc.executions.sandbox import SEARCH_PATH, fast_python
from gyre_hpc.harnesses.packages import is_installed, prefix_of, programs

_PLACEHOLDER = re.compile(r"\{(base_url|workspace|instruction|seed|max_turns)\}")
REFERENCE_DIALECTS = ("openai-chat", "anthropic-messages")
_REFERENCE = (
    *("-I", "-S", str(PROGRAM)),
    *("--base-url", "{base_url}", "--workspace", "{workspace}", "--instruction", "{instruction}"),
    *("--max-turns", "{max_turns}", "--seed", "{seed}"),
)


@dataclass(frozen=True)
class Invocation:
    """One execution's command line, extra environment, and files of its HOME by relative path."""

    argv: list[str]
    env: dict[str, str]
    files: dict[str, str]

    def write_files(self, home: Path) -> None:
        """Put the files into an empty HOME."""
        for name, text in self.files.items():
            path = home / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


@dataclass(frozen=True)
class Harness:
    """The harness of a run: `command`, `env`, `files` with placeholders, `readonly` folders its program lies in."""

    command: tuple[str, ...]
    env: Mapping[str, str]
    readonly: tuple[Path, ...]
    max_turns: int
    files: Mapping[str, str]

    def fill(self, *, base_url: str, workspace: Path, instruction: str, seed: int) -> Invocation:
        """What one execution needs."""
        values = {
            "base_url": base_url,
            "workspace": str(workspace),
            "instruction": instruction,
            "seed": str(seed),
            "max_turns": str(self.max_turns),
        }

        def filled(text: str) -> str:
            return _PLACEHOLDER.sub(lambda match: values[match[1]], text)

        return Invocation(
            [filled(word) for word in self.command],
            {key: filled(text) for key, text in self.env.items()},
            {name: filled(text) for name, text in self.files.items()},
        )


def find_harness(config: HarnessConfig) -> Harness:
    """The configured harness. Raises MissingInput naming the program when this node does not have it, ConfigError."""
    if not config.command:
        if config.dialect not in REFERENCE_DIALECTS:
            raise ConfigError(
                f"harness.dialect={config.dialect}: the shipped reference program does not speak it",
                fix=f"set harness.dialect={REFERENCE_DIALECTS[0]}, or name your own program in harness.command",
            )
        python = fast_python()
        command = (python, *_REFERENCE, "--dialect", config.dialect)
        readonly = (PROGRAM.parent, *program_folders(python))
        return Harness(command, config.env, readonly, config.max_turns, {})
    prefix = prefix_of(config.packages, config.prefix) if config.packages else None
    program = _find_program(config.command[0], config.packages, prefix)
    own = (prefix, *_virtual_environment(prefix / "venv")) if prefix is not None else ()
    folders = tuple(dict.fromkeys([*own, *program_folders(program)]))
    env = {"PATH": _search_path([*(programs(prefix) if prefix else ()), Path(program).parent]), **config.env}
    return Harness((program, *config.command[1:]), env, folders, config.max_turns, _home_files(config.files))


def _find_program(name: str, packages: Sequence[str], prefix: Path | None) -> str:
    """Full path of the program, from the prefix or this node. Raises MissingInput."""
    if prefix is not None and not is_installed(packages, prefix):
        raise MissingInput(
            f"{prefix}: {', '.join(packages)} are not installed there",
            fix="gyre stage, with the arguments of gyre submit, installs them; harness.prefix names a folder that every node sees",
        )
    path = os.pathsep.join(
        [*map(str, programs(prefix) if prefix else ()), os.environ.get("PATH", os.defpath)]
    )
    found = shutil.which(name, path=path)
    if found is None:
        raise MissingInput(
            f"harness.command: program '{name}' is not on this node",
            fix="install it, name its full path in harness.command, or its package in harness.packages",
        )
    return str(Path(found).absolute())


def _home_files(files: Mapping[str, str]) -> Mapping[str, str]:
    """The files if all lie inside HOME. Raises ConfigError."""
    for name in files:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ConfigError(
                f"harness.files: '{name}' is not inside HOME", fix="give paths relative to HOME, without .."
            )
    return files


def program_folders(program: str) -> tuple[Path, ...]:
    """Folders that must be visible for `program` to start: where it lies, where its link leads, its Python's own."""
    path = Path(program)
    real = path.resolve()
    folders = [path.parent, real.parent, *_virtual_environment(path.parent.parent)]
    if real.is_relative_to(sys.base_prefix):
        folders.append(Path(sys.base_prefix))
    return tuple(dict.fromkeys(folders))


def _virtual_environment(folder: Path) -> list[Path]:
    """The folder and the Python it was made from, if it is a virtual environment."""
    file = folder / "pyvenv.cfg"
    if not file.is_file():
        return []
    pairs = (line.partition("=") for line in file.read_text().splitlines())
    homes = [Path(value.strip()).parent for key, _, value in pairs if key.strip() == "home"]
    return [folder, *homes]


def _search_path(folders: Sequence[Path]) -> str:
    """The scrubbed PATH behind the program's own folders (its interpreter often lies there)."""
    scrubbed = SEARCH_PATH.split(":")
    return ":".join(dict.fromkeys([*(path for path in map(str, folders) if path not in scrubbed), *scrubbed]))
