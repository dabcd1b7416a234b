"""A process of this host that an earlier controller started and that outlived it, behind the handle of a launched process.

It is held by a pidfd, so a signal reaches it or nobody. It is no child of ours: that it has ended is seen, with which code
is not. Gateway and runner take their own children with them however they end, so the process alone is signalled.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
from typing import Final

from gyre_hpc.launch.identity import ProcessIdentity

UNKNOWN_CODE: Final = 1
"""Reported as the exit code of a process that others reap."""


class SurvivingProcess:
    """Watches and ends one process. Make it with `find`."""

    nodes: tuple[str, ...] = ()
    unanswered = False

    def __init__(self, name: str, pid: int, descriptor: int) -> None:
        self._name, self._pid, self._descriptor = name, pid, descriptor
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(descriptor, self._end)

    @classmethod
    def find(cls, name: str, identity: ProcessIdentity) -> SurvivingProcess | None:
        """The process if it runs on this host; None if it has ended or ran elsewhere."""
        if not identity.here:
            return None
        try:
            descriptor = os.pidfd_open(identity.pid)
        except OSError:
            return None
        if identity.gone():  # asked after it is held: the pid cannot pass on any more
            os.close(descriptor)
            return None
        return cls(name, identity.pid, descriptor)

    @property
    def name(self) -> str:
        return self._name

    @property
    def pid(self) -> int:
        return self._pid

    def poll(self) -> int | None:
        if not self._ended.done() and _has_ended(self._descriptor):
            self._end()
        return UNKNOWN_CODE if self._ended.done() else None

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    async def terminate(self, grace_s: float) -> None:
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self.wait()
        except TimeoutError:
            self.kill()
            await self.wait()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    def _end(self) -> None:
        self._ended.get_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._ended.set_result(UNKNOWN_CODE)


def _has_ended(descriptor: int) -> bool:
    """A pidfd becomes readable when its process ends, whether or not it has been reaped."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))
