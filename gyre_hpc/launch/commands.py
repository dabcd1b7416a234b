"""Slurm's commands: the one place that runs them. What they answer is text; what they refuse keeps their own words."""

from __future__ import annotations

import subprocess
from typing import Final

from gyre_hpc.errors import GyreError, MissingInput
from gyre_hpc.launch.plan import child_environment

COMMAND_S: Final = 30.0
"""Slurm's query commands wait for a busy controller about this long."""


class SlurmCommandFailed(GyreError):
    """A Slurm command returned an error (names command and node)."""


def query(*argv: str) -> str:
    """Output of a Slurm command. Raises SlurmCommandFailed with its own words."""
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=COMMAND_S, env=child_environment({}), check=False
        )
    except FileNotFoundError as error:
        raise MissingInput(
            f"{argv[0]}: no such program", fix="run on a node with Slurm's commands"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise SlurmCommandFailed(f"{' '.join(argv)}: no answer within {COMMAND_S:g} s") from error
    if done.returncode != 0:
        raise SlurmCommandFailed(f"{' '.join(argv)}: {done.stderr.strip() or f'exit {done.returncode}'}")
    return done.stdout.strip()


def hostnames(nodelist: str) -> list[str]:
    """Slurm's node list notation ("n[1-3],m7") as names; lists of several components are separated by white space."""
    return query("scontrol", "show", "hostnames", ",".join(nodelist.split())).split()
