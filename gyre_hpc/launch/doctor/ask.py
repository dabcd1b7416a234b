"""How `gyre doctor` asks: a command with a deadline. Nothing raises, nothing hangs: no answer is an answer.

What may block or crash the process that tries it (a file system whose server is gone, a broken device library) is asked
of a child Python, `gyre_hpc.launch.doctor.probes`. A child that cannot even be killed is left behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import Final

from gyre_hpc.launch.plan import child_environment

ASK_S: Final = 20.0
"""Longer than a busy slurmctld takes (MessageTimeout, 10 s), short enough to wait for at a terminal."""
PROBE_S: Final = 60.0
"""Importing torch from a cold parallel file system takes tens of seconds."""
LAST_WORDS_S: Final = 1.0


@dataclass(frozen=True)
class Answer:
    """`code` is None where the command was killed at its deadline, `missing` where there is no such program."""

    code: int | None
    out: str = ""
    err: str = ""
    missing: bool = False

    @property
    def good(self) -> bool:
        return self.code == 0

    @property
    def why(self) -> str:
        """The last line it said, or how it ended; for an answer that is not good."""
        said = (self.err.strip() or self.out.strip()).splitlines()
        ended = "killed at its deadline without an answer" if self.code is None else f"exit code {self.code}"
        return f"{said[-1]} ({ended})" if said else ended


def ask(*argv: str, deadline_s: float | None = None) -> Answer:
    """Run a command outside any job's environment. Returns after `deadline_s` (`ASK_S`) and a moment at the latest."""
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            env=child_environment({}),
        )
    except OSError as error:
        return Answer(127, err=f"{argv[0]}: {error.strerror}", missing=isinstance(error, FileNotFoundError))
    try:
        out, err = process.communicate(timeout=ASK_S if deadline_s is None else deadline_s)
        return Answer(process.returncode, out, err)
    except subprocess.TimeoutExpired:
        return Answer(None, *_end(process))


def _end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Kill the command with its group; what it had said."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.communicate(timeout=LAST_WORDS_S)
    except subprocess.TimeoutExpired:
        return "", ""


def probe(name: str, *arguments: str, deadline_s: float = PROBE_S) -> Answer:
    """What a child Python says of `name`, as JSON in `out`."""
    return ask(sys.executable, "-m", "gyre_hpc.launch.doctor.probes", name, *arguments, deadline_s=deadline_s)
