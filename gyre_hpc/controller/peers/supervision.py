"""Processes that died: which deaths a restart cures, and how many restarts the run has left.

A process that ended because something is missing, damaged or full would only end again: that ends the run with the
process's own words, as an error of the same kind. Every other death costs one of `cluster.restarts`, which comes back
after `cluster.restart_window_s`: a long run outlives ordinary losses, a process that keeps dying ends it. A death by the
loss of its node costs none. A cell that no node left has room for waits, and the run goes on with fewer; it is tried again RETRY_S
later, then ever less often, and at once whenever a node or a process comes or goes.
"""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gyre_hpc.config_cluster import ClusterConfig
from gyre_hpc.controller.peers.inbound import NOT_STARTED, PeerId
from gyre_hpc.controller.peers.nodes import MOST_S
from gyre_hpc.controller.peers.peers import Peer, Peers
from gyre_hpc.errors import (
    CorruptRecord,
    GyreError,
    MissingInput,
    NodeUnfit,
    NoRoom,
    PeerLost,
    StorageFull,
)
from gyre_hpc.schedule.settings import standalone_cells
from gyre_hpc.transport.messages import PeerKind

log = logging.getLogger(__name__)
INCURABLE: dict[int, type[GyreError]] = {
    kind.exit_code: kind for kind in (MissingInput, CorruptRecord, StorageFull)
}
FIX = "\n  fix: "
LOG_TAIL_BYTES = 16384
RETRY_S = 5.0
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


@dataclass(frozen=True)
class Death:
    """How a process ended. `asked`: the controller ended it for what it had said."""

    code: int
    words: str
    asked: bool


class Supervision:
    """The deaths of one controller's peers. `run` is the run folder, `tell(who, what)` a line for a person."""

    def __init__(
        self,
        peers: Peers,
        cluster: ClusterConfig,
        run: Path,
        tell: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._peers, self._cluster, self._run, self._tell, self._clock = peers, cluster, run, tell, clock
        self._deaths: dict[PeerId, Death] = {}
        self._waiting: set[PeerId] = set()
        """Cells that no node has room for."""
        self._try_at, self._retry_s = 0.0, RETRY_S
        self._happened = 0
        self._none_since: float | None = None
        self._restarted_at: deque[float] = deque()
        self._last_words: dict[PeerId, str] = {}

    def said_goodbye(self, peer: PeerId, error: str) -> None:
        """The peer ends, and says why."""
        self._last_words[peer] = error

    def exited(self, id: PeerId, code: int, *, asked: bool = False, guest: bool = False) -> str:
        """Why the process ended, in its own words. Raises the error of an end that a restart would only repeat, but for
        a guest's, which the run can do without. `asked`: the controller ended it for what it had said."""
        peer = self._peers.peers[id]
        words = self._last_words.pop(id, "") or last_error(peer.log)
        if code in INCURABLE and not guest:
            message, _, fix = words.partition(FIX)
            raise INCURABLE[code](
                f"{peer.name}{peer.where}: {message or f'exited with {code}'}", fix=fix or f"see {peer.log}"
            )
        words = words.partition(FIX)[0]
        if not guest:
            self._deaths[id] = Death(code, words, asked)
            self._peers.nodes.stir()
        if code == NOT_STARTED:
            return "is not started: no node has room for it"
        silent = ", its node does not answer" if peer.handle is not None and peer.handle.unanswered else ""
        return f"exited with {code}{peer.where}{silent}" + (f": {words}" if words else "")

    async def relaunch_the_dead(self) -> list[Peer]:
        """Start every peer whose process has ended again, where a node has room for it.

        Cells are of one size: once one has found no room, those that wait with it are not tried.
        Raises PeerLost when the restarts are used up, or no cell that trains has found room for `cluster.start_timeout_s`.
        """
        started: list[Peer] = []
        if self._happened != self._peers.nodes.happened:
            self._happened = self._peers.nodes.happened
            self._try_at, self._retry_s = 0.0, RETRY_S
        early = full = self._clock() < self._try_at
        for peer in self._peers.dead():
            if peer.id not in self._waiting:
                await self._lay_blame(peer)
            elif full:
                continue
            if await self._launched(peer):
                started.append(peer)
            else:
                full = True
        if full and not early:
            self._try_at, self._retry_s = self._clock() + self._retry_s, min(2 * self._retry_s, MOST_S)
        return started

    async def _lay_blame(self, peer: Peer) -> None:
        """A death is its node's, or costs a restart; a cell's counts against its node too."""
        nodes, death = self._peers.nodes, self._deaths.pop(peer.id, Death(0, "", False))
        if death.code == NOT_STARTED:
            return
        if death.code == NodeUnfit.exit_code:
            nodes.is_unfit(peer.nodes, death.words)
            return
        unanswered = peer.handle is not None and peer.handle.unanswered
        if await nodes.took(peer.nodes, unanswered=unanswered):
            return
        if peer.kind is PeerKind.CELL and not death.asked:
            nodes.died(peer.nodes, f"{peer.name}: {death.words or f'exited with {death.code}'}")
        self._spend_restart(peer)

    async def _launched(self, peer: Peer) -> bool:
        before = peer.where
        try:
            await self._peers.launch(peer.kind, peer.index)
        except NoRoom as error:
            if peer.kind is not PeerKind.CELL:
                raise
            self._without_room(peer, before, error)
            return False
        self._none_since = None
        if peer.id in self._waiting:
            self._waiting.discard(peer.id)
            self._tell(peer.name, f"starts again{peer.where}: {self._cells_left()}")
        return True

    def _without_room(self, peer: Peer, where: str, error: NoRoom) -> None:
        if peer.id not in self._waiting:
            log.warning("%s", error)
            self._tell(peer.name, f"lost{where}; no node left has room for it: {self._cells_left()}")
        now = self._clock()
        self._waiting.add(peer.id)
        if self._able_to_train():
            self._none_since = None
            return
        self._none_since = now if self._none_since is None else self._none_since
        if now - self._none_since > self._cluster.start_timeout_s:
            raise PeerLost(
                f"no cell that trains is left, and for cluster.start_timeout_s={self._cluster.start_timeout_s:g} no node had"
                f" room for one: {error.message}",
                fix=f"gyre submit resume={self._run} (or gyre train resume=) on other nodes",
            )

    def _cells(self) -> list[Peer]:
        return [
            peer
            for peer in self._peers.peers.values()
            if peer.kind is PeerKind.CELL and peer.launcher is None
        ]

    def _alive(self) -> int:
        return sum(not peer.dead for peer in self._cells())

    def _able_to_train(self) -> bool:
        """Whether one of them lives: those of the standalone pool alone would serve for ever."""
        cells = self._cells()
        pool = standalone_cells(len(cells), self._cluster.standalone)
        return any(not peer.dead and peer.index not in pool for peer in cells)

    def _cells_left(self) -> str:
        return f"the run goes on with {self._alive()} of {len(self._cells())} cells"

    def where(self, id: PeerId) -> str:
        """ " on NODE", or "" where the peer is on this host or not known."""
        peer = self._peers.peers.get(id)
        return peer.where if peer is not None else ""

    def _spend_restart(self, peer: Peer) -> None:
        now, window = self._clock(), self._cluster.restart_window_s
        while self._restarted_at and now - self._restarted_at[0] >= window:
            self._restarted_at.popleft()
        if len(self._restarted_at) >= self._cluster.restarts:
            raise PeerLost(
                f"{peer.name}{peer.where} died, and cluster.restarts={self._cluster.restarts} within"
                f" cluster.restart_window_s={window:g} are used up",
                fix=f"see {peer.log}; then gyre train resume={self._run}",
            )
        self._restarted_at.append(now)
