"""The command line of the harness, from configuration: placeholders filled in, program found, folders it needs named.

{base_url} {workspace} {instruction} {seed} {max_turns} are replaced in one pass, so an instruction that contains
braces stays as it is. An empty command is the shipped reference harness, which needs only a Python.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gyre_hpc.config import HarnessConfig
from gyre_hpc.errors import ConfigError, MissingInput
from gyre_hpc.executions.reference_harness import PROGRAM
from gyre_hpc.executions.sandbox import SEARCH_PATH, fast_python

_PLACEHOLDER = re.compile(r"\{(base_url|workspace|instruction|seed|max_turns)\}")
REFERENCE_DIALECTS = ("openai-chat", "anthropic-messages")
_REFERENCE = (
    *("-I", "-S", str(PROGRAM)),
    *("--base-url", "{base_url}", "--workspace", "{workspace}", "--instruction", "{instruction}"),
    *("--max-turns", "{max_turns}", "--seed", "{seed}"),
)


@dataclass(frozen=True)
class Harness:
    """The harness of a run: `command` and `env` with placeholders, `readonly` folders its program lies in."""

    command: tuple[str, ...]
    env: Mapping[str, str]
    readonly: tuple[Path, ...]
    max_turns: int

    def fill(
        self, *, base_url: str, workspace: Path, instruction: str, seed: int
    ) -> tuple[list[str], dict[str, str]]:
        """Command line and environment of one execution."""
        values = {
            "base_url": base_url,
            "workspace": str(workspace),
            "instruction": instruction,
            "seed": str(seed),
            "max_turns": str(self.max_turns),
        }

        def filled(text: str) -> str:
            return _PLACEHOLDER.sub(lambda match: values[match[1]], text)

        return [filled(word) for word in self.command], {key: filled(text) for key, text in self.env.items()}


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
        return Harness(command, config.env, (PROGRAM.parent, *program_folders(python)), config.max_turns)
    found = shutil.which(config.command[0])
    if found is None:
        raise MissingInput(
            f"harness.command: program '{config.command[0]}' is not on this node",
            fix="install it, or name its full path in harness.command",
        )
    program = str(Path(found).absolute())
    env = {"PATH": _search_path(program), **config.env}
    return Harness((program, *config.command[1:]), env, program_folders(program), config.max_turns)


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


def _search_path(program: str) -> str:
    """The scrubbed PATH, with the program's own folder (its interpreter often lies beside it)."""
    folder = str(Path(program).parent)
    return SEARCH_PATH if folder in SEARCH_PATH.split(":") else f"{folder}:{SEARCH_PATH}"
