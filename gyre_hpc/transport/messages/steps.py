"""Steps of a role switch or a publication, told one by one as they end: who dies between two has told the earlier ones."""

from __future__ import annotations

import enum

from gyre_hpc.records import CellId
from gyre_hpc.transport.messages.base import Message, Serial

DONE = "done"


class StepName(enum.StrEnum):
    """Every step of a switch, by who takes it; in this order where a switch has both."""

    # the gateway, with the calls of a cell that leaves
    DRAIN = "drain"
    PREFETCH = "prefetch"
    """Executions are sent ahead; the bytes and pages of it stand at their PULL_PAGES."""
    CUT = "cut"
    EXPORT = "export"
    """KV pages of a cut call are kept for its destination."""
    PULL_PAGES = "pull_pages"
    """KV pages arrive at another cell, which may be long after the switch."""
    # the controller
    UNROUTE = "unroute"
    FLUSH = "flush"
    """The contribution of a batch that the cell leaves behind is in."""
    # the cell
    LEDGER = "ledger"
    """Host memory is counted."""
    RELEASE = "release"
    RESTORE = "restore"
    PULL = "pull"
    """Weights arrive."""
    OFFLOAD = "offload"
    WRITE = "write"
    START = "start"
    RESUME = "resume"
    LOAD = "load"
    CONFIRM = "confirm"
    # the controller: the end of the switch
    JOIN = "join"
    ROUTE = "route"
    LOST = "lost"
    """The cell is gone."""


class StepDone(Message, frozen=True):
    """A step of the command `serial` to, or about, `cell` has ended. Changes nothing; the controller journals it.

    `start`, `end`: Unix seconds on the teller's host. `bytes` and `pages` moved, `calls` concerned. `outcome`: DONE, or why not.
    """

    cell: CellId
    serial: Serial
    step: StepName
    start: float
    end: float
    bytes: int = 0
    pages: int = 0
    calls: int = 0
    outcome: str = DONE
