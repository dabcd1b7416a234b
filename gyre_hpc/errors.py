"""The error taxonomy: every error a person can meet says what, where, and what to do next.

`GyreError` is the only base. A subclass names the part of the world at fault; the command line prints
`str(error)` and exits with `exit_code`. Code inside a package raises these; only process borders catch them.
"""

from __future__ import annotations


class GyreError(Exception):
    """Base of all errors shown to a person. `fix` says what to do next."""

    exit_code = 1

    def __init__(self, message: str, *, fix: str = "") -> None:
        super().__init__(f"{message}\n  fix: {fix}" if fix else message)
        self.message = message
        self.fix = fix


class ConfigError(GyreError):
    """A configuration key or value that cannot be used (names the key)."""

    exit_code = 2


class MissingInput(GyreError):
    """A file, folder or program the run needs is absent (names the path)."""

    exit_code = 2


class RunOwned(GyreError):
    """Another controller owns the run directory."""

    exit_code = 3


class CorruptRecord(GyreError):
    """Bytes at rest do not match their checksum or format (names file and offset)."""

    exit_code = 4


class StorageFull(GyreError):
    """A write failed for lack of space or quota (names the path)."""

    exit_code = 5


class Interrupted(GyreError):
    """A person or the site ended the run; it can be resumed. The exit code is the shell's for the signal: 128 + N."""

    def __init__(self, message: str, *, fix: str, signal: int) -> None:
        super().__init__(message, fix=fix)
        self.exit_code = 128 + signal


class NoRoom(GyreError):
    """No node of the job has room for a process (names it, and what it needs)."""

    exit_code = 2


class NodeUnfit(GyreError):
    """The site's health probe failed on a node (names the node, with the probe's words)."""

    exit_code = 8


class PeerLost(GyreError):
    """A peer process stopped answering (names peer, node and time)."""


class ProtocolViolation(GyreError):
    """A peer sent a message that its state does not allow (names both)."""


class IllegalTransition(GyreError):
    """A state machine was asked for a transition it does not have (names both states)."""


class NoProgress(GyreError):
    """Jobs in a row took no step and recorded no outcome: another one would do no better (names how many)."""


class HandedBack(GyreError):
    """The job ends before the run does, and another one goes on by itself. The exit code is not 0: the run is not done."""

    def __init__(self, message: str, *, fix: str, exit_code: int) -> None:
        super().__init__(message, fix=fix)
        self.exit_code = exit_code


class ScheduleStuck(GyreError):
    """Too many bursts in a row ended without a step (names the reasons)."""
