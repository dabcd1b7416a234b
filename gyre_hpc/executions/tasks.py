"""What a query is to the runner: a workspace to prepare, an instruction to give, an evaluator to run afterwards.

A query is "<family>:<seed>". A family turns the seed into a `Task`, the same one on every machine. Families are found by
name, imported when first asked for; any other family is named by its factory, "package.module/Factory".
Invariant: `hidden` writes outside the workspace and is called only after the harness has ended.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gyre_hpc.config import TasksConfig
from gyre_hpc.errors import ConfigError


class Task(Protocol):
    """One query."""

    @property
    def id(self) -> str:
        """The query itself."""

    @property
    def instruction(self) -> str:
        """The user's message to the agent."""

    def prepare(self, workspace: Path) -> None:
        """Fill the workspace (an empty folder) as the agent finds it."""

    def hidden(self, folder: Path) -> None:
        """Write what only the evaluator may see."""

    def evaluator(self, hidden: Path) -> list[str]:
        """Command run in a copy of the workspace, "{workspace}" filled in; `hidden` is readable there.

        It prints one JSON line {"score": number in 0..1, "evidence": text} and exits 0.
        """


class TaskFamily(Protocol):
    """All tasks of one kind."""

    def task(self, seed: int) -> Task:
        """The task of this seed."""


def _patchkit(config: TasksConfig) -> TaskFamily:
    from gyre_hpc.executions.patchkit.family import PatchkitFamily

    return PatchkitFamily(config.max_modules)


FAMILIES: dict[str, Callable[[TasksConfig], TaskFamily]] = {"patchkit": _patchkit}


@dataclass(frozen=True)
class TaskSource:
    """The run's family under its configured name."""

    name: str
    family: TaskFamily

    def task(self, query: str) -> Task:
        """Raises ConfigError for a query of another family or without a whole-number seed."""
        name, _, seed = query.rpartition(":")
        if name != self.name or not seed.isdecimal():
            raise ConfigError(
                f"query '{query}' is not of family '{self.name}'",
                fix=f"queries look like {self.name}:1000000",
            )
        return self.family.task(int(seed))


def task_source(config: TasksConfig) -> TaskSource:
    """The family that `tasks.family` names. Raises ConfigError with the nearest name."""
    factory = FAMILIES.get(config.family) or _imported(config.family)
    try:
        return TaskSource(config.family, factory(config))
    except ValueError as error:
        raise ConfigError(
            f"tasks.family={config.family}: {error}", fix="correct the tasks.* keys it names"
        ) from error


def _imported(name: str) -> Callable[[TasksConfig], TaskFamily]:
    module, _, attribute = name.partition("/")
    if not attribute:
        near = difflib.get_close_matches(name, FAMILIES, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"tasks.family={name} is not one of {', '.join(FAMILIES)}",
            fix=f"did you mean tasks.family={near}? A family of your own is package.module/Factory",
        )
    try:
        factory: Callable[[TasksConfig], TaskFamily] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"tasks.family={name}: {error}", fix="install the package that has it") from error
    return factory
