"""What a peer's process runs and how its incarnations are numbered: whoever starts one keeps to it.

Launch n of epoch e has the incarnations from (e*10^6 + n)*1000 on; e*10^6 + n is the number of the launch. A process that
restarts its own worker (the gateway) adds to its incarnation, a relaunch has the next number, a resumed run starts higher
still: a late message of a dead process is always older, and no two processes of a run share an incarnation.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gyre_hpc.transport.messages import PeerKind

INCARNATIONS_PER_LAUNCH = 1000
LAUNCHES_PER_EPOCH = 1_000_000

MODULES = {
    PeerKind.CELL: "gyre_hpc.cells.leader",
    PeerKind.GATEWAY: "gyre_hpc.gateway.process",
    PeerKind.RUNNER: "gyre_hpc.executions.runner",
    PeerKind.PROCESSOR: "gyre_hpc.controller.processor",
}
OUTLIVE = (PeerKind.GATEWAY, PeerKind.RUNNER)
"""Kinds that go on without their controller for a while."""


def launch_number(epoch: int, launches: int) -> int:
    """The number of the launch that is the `launches`-th of its epoch."""
    return epoch * LAUNCHES_PER_EPOCH + launches


def number_of(incarnation: int) -> int:
    """The number of the launch that this incarnation belongs to."""
    return incarnation // INCARNATIONS_PER_LAUNCH


def epoch_of(incarnation: int) -> int:
    """The epoch of the controller, or service host, that launched this incarnation."""
    return number_of(incarnation) // LAUNCHES_PER_EPOCH


def command(kind: PeerKind, run: Path, number: int) -> list[str]:
    """The command line of launch `number` of a peer."""
    incarnation = number * INCARNATIONS_PER_LAUNCH
    return [sys.executable, "-m", MODULES[kind], "--run", str(run), "--incarnation", str(incarnation)]
