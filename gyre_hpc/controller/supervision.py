"""Processes that died: which deaths a restart cures, and how many restarts the run has left.

A process that ended because something is missing, damaged or full would only end again: that ends the run with the
process's own words, as an error of the same kind. Every other death costs one of `cluster.restarts`, which comes back
after `cluster.restart_window_s`: a long run outlives ordinary losses, a process that keeps dying ends it.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from gyre_hpc.config import ClusterConfig
from gyre_hpc.controller.peers import Peer, PeerId, Peers
from gyre_hpc.errors import CorruptRecord, GyreError, MissingInput, PeerLost, StorageFull

INCURABLE: dict[int, type[GyreError]] = {
    kind.exit_code: kind for kind in (MissingInput, CorruptRecord, StorageFull)
}
FIX = "\n  fix: "
LOG_TAIL_BYTES = 16384
_LAST_ERROR = re.compile(
    r"^\d{4}-\d\d-\d\d \S+ (?:ERROR|CRITICAL) [\w.]+: (.*?)(?=^\d{4}-\d\d-\d\d |\Z)", re.DOTALL | re.MULTILINE
)


def last_error(log: Path) -> str:
    """The last error a process wrote to its log; "" if there is none."""
    try:
        data = log.read_bytes()[-LOG_TAIL_BYTES:]
    except OSError:
        return ""
    found = _LAST_ERROR.findall(data.decode(errors="replace"))
    return found[-1].strip() if found else ""


class Supervision:
    """The deaths of one controller's peers. `run` is the run folder."""

    def __init__(
        self, peers: Peers, cluster: ClusterConfig, run: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._peers, self._cluster, self._run, self._clock = peers, cluster, run, clock
        self._restarted_at: deque[float] = deque()
        self._last_words: dict[PeerId, str] = {}

    def said_goodbye(self, peer: PeerId, error: str) -> None:
        """The peer ends, and says why."""
        self._last_words[peer] = error

    def exited(self, id: PeerId, code: int, *, guest: bool = False) -> str:
        """Why the process ended, in its own words. Raises the error of an end that a restart would only repeat, but for
        a guest's, which the run can do without."""
        peer = self._peers.peers[id]
        words = self._last_words.pop(id, "") or last_error(peer.log)
        if code in INCURABLE and not guest:
            message, _, fix = words.partition(FIX)
            raise INCURABLE[code](
                f"{peer.name}: {message or f'exited with {code}'}", fix=fix or f"see {peer.log}"
            )
        return f"exited with {code}" + (f": {words.partition(FIX)[0]}" if words else "")

    async def relaunch_the_dead(self) -> list[Peer]:
        """Start every peer whose process has ended again. Raises PeerLost when the restarts are used up."""
        dead = self._peers.dead()
        for peer in dead:
            self._spend_restart(peer)
            await self._peers.launch(peer.kind, peer.index)
        return dead

    def _spend_restart(self, peer: Peer) -> None:
        now, window = self._clock(), self._cluster.restart_window_s
        while self._restarted_at and now - self._restarted_at[0] >= window:
            self._restarted_at.popleft()
        if len(self._restarted_at) >= self._cluster.restarts:
            raise PeerLost(
                f"{peer.name} died, and cluster.restarts={self._cluster.restarts} within"
                f" cluster.restart_window_s={window:g} are used up",
                fix=f"see {peer.log}; then gyre train resume={self._run}",
            )
        self._restarted_at.append(now)
