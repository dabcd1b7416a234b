"""Death of a parent ends its children: PR_SET_PDEATHSIG, for processes that start others.

The kernel sends the signal when the THREAD that forked the child ends, so fork from a thread that lives as long as
the process (the event loop's), never from a worker thread. The setting is cleared by fork and by running a set-user-id
program, and kept by exec.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from typing import Final

PR_SET_PDEATHSIG: Final = 1
_libc: Final = ctypes.CDLL(None, use_errno=True)
_prctl: Final = _libc.prctl
"""Bound at import: between fork and exec nothing may be looked up or imported."""
ORPHANED: Final = 113
"""Exit code of a child whose parent died before the child could ask to be told."""


def follow_parent(sig: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
    """A `preexec_fn` that makes the child receive `sig` when the calling thread ends."""
    parent, number = os.getpid(), int(sig)

    def preexec() -> None:
        _prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(ORPHANED)

    return preexec


def die_with_parent(parent: int, sig: signal.Signals = signal.SIGKILL) -> None:
    """Ask for `sig` when `parent` ends, at once if it has; for a process that was started without `follow_parent`."""
    if _prctl(PR_SET_PDEATHSIG, int(sig), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os.kill(os.getpid(), sig)
