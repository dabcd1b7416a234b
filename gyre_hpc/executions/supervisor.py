"""One execution under its time limits: prepared, started, ended, and the reason why it ended.

Two clocks, both monotonic. The overall clock runs from the order to start. The harness clock runs from the program's
start and stands still while the gateway holds a call (told by `held`), or nobody could tell (`orphaned`), up to
`max_stall_credit_s`.
Invariant: when `run` returns or raises, no process of the execution is left.

    exit 0 -> completed          other exit -> failed             harness limit -> harness_timeout
    overall limit -> overall_timeout      end of the job -> walltime      cannot start, guard lost -> infrastructure      cancel(reason) -> that reason
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gyre_hpc.executions.forkserver import LaunchSpec
from gyre_hpc.executions.launcher import Launcher, LaunchFailed, Process
from gyre_hpc.records import ClosingReason

LOG_TAIL_BYTES = 2000
LEAST_WAIT_S = 0.05
"""Between two looks at the clocks: one that stands still at its limit must not be asked without a pause."""


@dataclass(frozen=True)
class Limits:
    """Seconds. `max_stall_credit_s` is the most the harness clock may stand still; `walltime_s` runs from the order."""

    harness_s: float
    overall_s: float
    max_stall_credit_s: float = 0.0
    walltime_s: float = math.inf


@dataclass(frozen=True)
class Closing:
    """How an execution ended. `exit_code` is None unless the program ended by itself."""

    reason: ClosingReason
    exit_code: int | None
    detail: str
    wall_s: float


class Supervision:
    """Supervises one execution; made when the order arrives, which starts the overall clock."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._held_s = 0.0
        self._orphaned_at: float | None = None
        self._ordered = time.monotonic()
        self._cancelled: asyncio.Future[ClosingReason] = asyncio.get_running_loop().create_future()

    def held(self, seconds: float) -> None:
        """The gateway has held calls of this execution for so long in all. Never shrinks."""
        self._held_s = max(self._held_s, seconds)

    def orphaned(self) -> None:
        """From here on the gateway's word does not come through: the time counts as held."""
        self._orphaned_at = self._orphaned_at or time.monotonic()

    def adopted(self) -> None:
        """The gateway's word comes through again. What it held meanwhile is in its own figure, and not added to this."""
        self._held_s, self._orphaned_at = self._held_so_far_s(), None

    def _held_so_far_s(self) -> float:
        orphaned_s = 0.0 if self._orphaned_at is None else time.monotonic() - self._orphaned_at
        return self._held_s + orphaned_s

    def cancel(self, reason: ClosingReason) -> None:
        """End the execution now. The first reason stands."""
        if not self._cancelled.done():
            self._cancelled.set_result(reason)

    def overall_left_s(self) -> float:
        """Seconds until the overall limit."""
        return self._ordered + self._limits.overall_s - time.monotonic()

    async def run(
        self, launcher: Launcher, prepare: Callable[[], LaunchSpec], log: Path, started: Callable[[], None]
    ) -> Closing:
        """Prepare (in a thread) and start the program, then wait for its end or end it."""
        try:
            async with asyncio.timeout(self.overall_left_s()):
                spec = await asyncio.to_thread(prepare)
                process = await launcher.launch(spec, log, log)
        except TimeoutError:
            return self._unstarted(f"not started within {self._limits.overall_s:g} s")
        except LaunchFailed as error:
            return self._unstarted(error.message)
        except OSError as error:
            return self._unstarted(f"{log.parent}: {error}")
        try:
            started()
            return await self._until_closed(process, log)
        finally:
            process.end()
            with contextlib.suppress(LaunchFailed):
                await process.wait()

    def _unstarted(self, detail: str) -> Closing:
        return Closing(ClosingReason.INFRASTRUCTURE, None, detail, 0.0)

    async def _until_closed(self, process: Process, log: Path) -> Closing:
        begun = time.monotonic()
        exited = asyncio.ensure_future(process.wait())
        limit: ClosingReason | None = None
        try:
            while limit is None and not exited.done() and not self._cancelled.done():
                left, _ = self._next_limit(begun)
                patience = max(left, LEAST_WAIT_S)
                await asyncio.wait(
                    (exited, self._cancelled), timeout=patience, return_when=asyncio.FIRST_COMPLETED
                )
                left, reason = self._next_limit(begun)
                limit = reason if left <= 0 else None
        finally:
            if not exited.done():
                exited.cancel()
        wall_s = time.monotonic() - begun
        if exited.done() and not exited.cancelled():
            return self._exited(exited, log, wall_s)
        if self._cancelled.done():
            return Closing(self._cancelled.result(), None, "cancelled", wall_s)
        assert limit is not None
        seconds = {
            ClosingReason.HARNESS_TIMEOUT: self._limits.harness_s,
            ClosingReason.OVERALL_TIMEOUT: self._limits.overall_s,
            ClosingReason.WALLTIME: self._limits.walltime_s,
        }[limit]
        return Closing(
            limit, None, f"limit of {seconds:g} s, {self._held_s:.1f} s held by the gateway", wall_s
        )

    def _next_limit(self, begun: float) -> tuple[float, ClosingReason]:
        """Seconds until the nearer limit, and which it is. What the gateway has held so far moves the harness's."""
        credit = min(self._held_so_far_s(), self._limits.max_stall_credit_s)
        harness_left = begun + self._limits.harness_s + credit - time.monotonic()
        overall_left = self.overall_left_s()
        walltime_left = self._ordered + self._limits.walltime_s - time.monotonic()
        return min(
            (overall_left, ClosingReason.OVERALL_TIMEOUT),
            (harness_left, ClosingReason.HARNESS_TIMEOUT),
            (walltime_left, ClosingReason.WALLTIME),
            key=lambda limit: limit[0],
        )

    def _exited(self, exited: asyncio.Future[int], log: Path, wall_s: float) -> Closing:
        try:
            code = exited.result()
        except LaunchFailed as error:
            return Closing(ClosingReason.INFRASTRUCTURE, None, error.message, wall_s)
        if code == 0:
            return Closing(ClosingReason.COMPLETED, 0, "", wall_s)
        return Closing(ClosingReason.FAILED, code, f"exit code {code}: {last_line(log)}", wall_s)


def last_line(log: Path) -> str:
    """The last line a program wrote, for a person to read."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")
