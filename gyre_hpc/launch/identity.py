"""Which process this is, and of which job, so that another one can tell later whether it still lives: a pid alone may be a
stranger's.

The name is the host's, the boot id and the start time of the process make the pid unmistakable. What is asked from another
host proves nothing.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec
import psutil

START_SLACK_S = 1.0
"""Two readings of a process's start may differ by clock corrections."""


class ProcessIdentity(msgspec.Struct, frozen=True):
    """`boot_id` is "" where the kernel names none. `process_start` is psutil's create time, Unix seconds."""

    host: str
    boot_id: str
    pid: int
    process_start: float

    @classmethod
    def own(cls) -> ProcessIdentity:
        """Of this process."""
        return cls(socket.gethostname(), boot_id(), os.getpid(), psutil.Process().create_time())

    @property
    def here(self) -> bool:
        """Whether it ran on this host."""
        return self.host == socket.gethostname()

    def gone(self) -> bool:
        """Whether it has ended; to be asked on its own host."""
        if self.boot_id and self.boot_id != boot_id():
            return True
        try:
            process = psutil.Process(self.pid)
            dead = process.status() == psutil.STATUS_ZOMBIE
            return dead or bool(abs(process.create_time() - self.process_start) > START_SLACK_S)
        except psutil.NoSuchProcess:
            return True


def boot_id() -> str:
    """The kernel's name of this boot; "" where there is none."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


def job_id() -> str:
    """The Slurm job this process belongs to (of a heterogeneous one its component's); "" outside Slurm."""
    return os.environ.get("SLURM_JOB_ID", "")


def job_restarts() -> int:
    """How often Slurm has started that job again."""
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))
