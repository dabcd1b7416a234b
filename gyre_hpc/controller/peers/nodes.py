"""The nodes of a run as its controller knows them: silent, unfit, lost, bad, and the cells that no node has room for.

A node is silent from the first missed heartbeats of a peer on it until a peer on it is heard again or a probe step starts
there: heartbeats notice a dead node within `cluster.suspect_after_s`, Slurm after its SlurmdTimeout. No process starts on
a silent or unfit node. Only while something is amiss is Slurm asked: LOOK_S after it began, then ever less often, down to once in
MOST_S; at once whenever something happens. A death whose node was lost or does not answer is the node's, and costs no restart.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from gyre_hpc.launch.nodes.bad_nodes import BadNode, BadNodes
from gyre_hpc.launch.plan import SiteLauncher

log = logging.getLogger(__name__)
LOOK_S: Final = 5.0
MOST_S: Final = 60.0
"""A run that goes on with fewer cells for days asks no more often than a person would."""


@dataclass
class Nodes:
    """`tell(who, what)`: a line for a person."""

    launcher: SiteLauncher
    bad: BadNodes
    tell: Callable[[str, str], None]
    clock: Callable[[], float] = time.monotonic
    silent: set[str] = field(default_factory=set)
    unfit: set[str] = field(default_factory=set)
    usable: frozenset[str] | None = None
    """What Slurm said last; None before, and where nobody says."""
    happened: int = 0
    """Counts what happens to nodes and processes: whoever waits for room may look again."""
    _looked_at: float = float("-inf")
    _wait_s: float = LOOK_S
    _looking: asyncio.Task[None] | None = None

    @property
    def never(self) -> frozenset[str]:
        """Nodes no process may start on."""
        return frozenset(self.silent | self.unfit)

    # ---- what peers tell of their nodes -------------------------------------------------------------------------

    def fell_silent(self, nodes: Collection[str]) -> None:
        """A peer on these nodes is SUSPECT, or did not end when it was killed."""
        if not self.silent.issuperset(nodes):
            self.stir()
        self.silent |= set(nodes)

    def heard(self, nodes: Collection[str]) -> None:
        """A peer on these nodes speaks (again), or has ended as a process of a living node does."""
        if not self.silent.isdisjoint(nodes):
            self.stir()
        self.silent -= set(nodes)

    def stir(self) -> None:
        """Something has happened: Slurm may know more, and there may be room."""
        self.happened += 1
        self._wait_s = LOOK_S

    def died(self, nodes: Collection[str], words: str) -> None:
        """A cell died there."""
        for node in nodes:
            self._named(self.bad.died(node, words))

    def is_unfit(self, nodes: Collection[str], words: str) -> None:
        """The health probe of a cell failed there."""
        for node in nodes:
            self.unfit.add(node)
            self._named(self.bad.unfit(node, words))

    async def took(self, nodes: Collection[str], *, unanswered: bool) -> bool:
        """Whether a process that has ended on `nodes` was taken by the loss of one of them."""
        if unanswered:
            self.fell_silent(nodes)
            return True
        self._learn(await self.launcher.usable())
        lost = set(nodes) - (self.usable if self.usable is not None else set(nodes))
        if not lost:
            self.heard(nodes)
        return bool(lost)

    # ---- what Slurm tells ---------------------------------------------------------------------------------------

    def look(self, amiss: bool, inhabited: Collection[str]) -> None:
        """To be called often. `inhabited`: nodes on which a process of ours lives, which speaks for itself."""
        if not amiss and not self.silent:
            self._wait_s = LOOK_S
            return
        idle = self._looking is None or self._looking.done()
        if idle and self.clock() - self._looked_at >= self._wait_s:
            self._looked_at = self.clock()
            self._wait_s = min(2 * self._wait_s, MOST_S)
            self._looking = asyncio.create_task(self._look(self.silent - set(inhabited)))

    async def _look(self, to_probe: Iterable[str]) -> None:
        self._learn(await self.launcher.usable())
        for node in sorted(to_probe):
            if (self.usable is None or node in self.usable) and await self.launcher.answers(node):
                log.info("node %s answers again", node)
                self.heard([node])

    def _learn(self, usable: frozenset[str] | None) -> None:
        if usable is None:
            return
        if self.usable is None:
            self._name_the_inherited(usable)
        if self.usable is not None and usable != self.usable:
            self.stir()
        for node in sorted((self.usable or frozenset()) - usable):
            self._named(self.bad.lost(node, "Slurm took it out of the job or calls it down"))
        self.usable = usable

    def _name_the_inherited(self, usable: Collection[str]) -> None:
        """A job that Slurm has started again may have nodes that were bad before."""
        for bad in self.bad.inherited:
            if bad.node in usable:
                self.tell(f"node {bad.node}", f"given to this run again though bad, taken last: {bad.why}")

    def _named(self, bad: BadNode | None) -> None:
        if bad is not None:
            self.tell(f"node {bad.node}", f"bad: {bad.why}")

    def close(self) -> None:
        """Look no more."""
        if self._looking is not None:
            self._looking.cancel()
