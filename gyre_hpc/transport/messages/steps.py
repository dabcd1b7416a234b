"""Steps of a role switch or a publication, told one by one as they end: who dies between two has told the earlier ones."""

from __future__ import annotations

from gyre_hpc.records import CellId
from gyre_hpc.transport.messages.base import Message, Serial

DONE = "done"


class StepDone(Message, frozen=True):
    """A step of the command `serial` to, or about, `cell` has ended. Changes nothing; the controller journals it.

    `start`, `end`: Unix seconds on the teller's host. `bytes` and `pages` moved, `calls` concerned. `outcome`: DONE, or why not.
    """

    cell: CellId
    serial: Serial
    step: str
    start: float
    end: float
    bytes: int = 0
    pages: int = 0
    calls: int = 0
    outcome: str = DONE
