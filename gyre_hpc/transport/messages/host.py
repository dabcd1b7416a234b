"""Controller and cell host: cells offered by another job, their processes started, ended and told of."""

from __future__ import annotations

from typing import NewType

from gyre_hpc.transport.messages.base import Message

ProcessSerial = NewType("ProcessSerial", int)
"""Number of a process on its host: grows with each start that one controller asks of it."""


class OfferCells(Message, frozen=True):
    """The first message of a host: it has room for `cells` cells; `rollout_only` ones never train.

    `job` is its Slurm job, "" outside of one.
    """

    cells: int
    rollout_only: bool
    job: str


class LeaveCells(Message, frozen=True):
    """The host ends in `grace_s` seconds at the latest: have its cells leave. Answered with Shutdown when none is left.

    From the controller: they leave already, because their site told them, and not the host, to end.
    """

    grace_s: float
    reason: str


class StartProcess(Message, frozen=True):
    """Start this process as one of the host's own. Words of `argv` that are `PYTHON` or `RUN` are the host's to fill in.

    `log` is relative to the run folder. The sizes are those of `launch.plan.ProcessSpec`. Answered with ProcessEnded, at last.
    """

    serial: ProcessSerial
    name: str
    argv: tuple[str, ...]
    env: dict[str, str]
    log: str
    nodes: int
    ranks: int
    cpus_per_rank: int
    mem: str
    gres: str
    avoid: frozenset[str] = frozenset()
    never: frozenset[str] = frozenset()


class EndProcess(Message, frozen=True):
    """Ask the process to end and kill it after `grace_s`; 0: kill it now. Nothing if it has ended."""

    serial: ProcessSerial
    grace_s: float


class ProcessEnded(Message, frozen=True):
    """The process, or the attempt to start it, has ended with `code`; `error` says why it could not be started.

    It ran on `nodes`; `lost` are those of them that Slurm has taken out of the host's job, or that do not answer.
    """

    serial: ProcessSerial
    code: int
    error: str = ""
    nodes: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
