"""Controller and the services that outlived the one before it."""

from __future__ import annotations

from gyre_hpc.records import ExecutionId
from gyre_hpc.transport.messages.base import Message


class Holding(Message, frozen=True):
    """Gateway or runner to a controller it has not met: every attempt (execution, number) it works on or answers for.

    The first message of such a link; empty from a process that has just started. Before any other message the
    controller takes up each of them or returns it.
    """

    attempts: tuple[tuple[ExecutionId, int], ...]
