"""Nodes that a run had better not get again, and why: kept in the run folder, so that its next job knows them.

A node is bad when Slurm lost it, when it failed `cluster.health_probe`, or after `cluster.bad_node_deaths` deaths of cells on
it within `cluster.bad_node_window_s`. It is named once with its last words, gets no step while another node has room, and
is left out (`excluded_nodes`) when the job is handed back, until `cluster.bad_node_expire_s` is over. Deaths of services and
ends that the controller asked for say nothing about a node and are not counted.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec

from gyre_hpc.config import load_run_config
from gyre_hpc.config_cluster import ClusterConfig
from gyre_hpc.errors import GyreError
from gyre_hpc.files import replace_file
from gyre_hpc.launch.commands import SlurmCommandFailed, query
from gyre_hpc.launch.job.request import request_for
from gyre_hpc.launch.nodes.states import USABLE, node_states
from gyre_hpc.layout import RunLayout

log = logging.getLogger(__name__)
EXCLUDE_S: Final = 25.0
"""Slurm kills what does not end within KillWait (30 s by default), the caller of a requeue among them."""
AGAIN_S: Final = 0.5


class BadNode(msgspec.Struct, frozen=True):
    """Since `at` and until `until` (seconds since 1970). `why`: for a person, with the node's last words."""

    node: str
    at: float
    until: float
    why: str


def read_bad_nodes(layout: RunLayout, now: float) -> list[BadNode]:
    """Those whose time is not over, oldest first; a file that cannot be read says nothing."""
    try:
        nodes = msgspec.json.decode(layout.bad_nodes.read_bytes(), type=list[BadNode])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("%s: %s; no node is called bad", layout.bad_nodes, error)
        return []
    return [node for node in nodes if node.until > now]


class BadNodes:
    """The bad nodes of a run that goes on. Every method that finds a node bad returns it the first time, None later."""

    def __init__(
        self, layout: RunLayout, cluster: ClusterConfig, clock: Callable[[], float] = time.time
    ) -> None:
        self._layout, self._cluster, self._clock = layout, cluster, clock
        self._deaths: dict[str, deque[float]] = {}
        self._bad = {bad.node: bad for bad in read_bad_nodes(layout, clock())}
        self.inherited = tuple(self._bad.values())
        """Those that an earlier controller, or what outlived it, has named."""

    @property
    def names(self) -> frozenset[str]:
        now = self._clock()
        return frozenset(bad.node for bad in self._bad.values() if bad.until > now)

    def died(self, node: str, words: str) -> BadNode | None:
        """A cell on the node died; `words`: its last."""
        now, window = self._clock(), self._cluster.bad_node_window_s
        deaths = self._deaths.setdefault(node, deque())
        deaths.append(now)
        while now - deaths[0] >= window:
            deaths.popleft()
        if len(deaths) < self._cluster.bad_node_deaths:
            return None
        return self._found(node, f"{len(deaths)} cells died on it within {window:g} s, the last {words}")

    def lost(self, node: str, words: str) -> BadNode | None:
        """Slurm has lost the node."""
        return self._found(node, f"lost: {words}")

    def unfit(self, node: str, words: str) -> BadNode | None:
        """The site's health probe failed there."""
        return self._found(node, f"cluster.health_probe failed: {words}")

    def _found(self, node: str, why: str) -> BadNode | None:
        if node in self.names:
            return None
        now = self._clock()
        bad = self._bad[node] = BadNode(node, now, now + self._cluster.bad_node_expire_s, why)
        try:
            replace_file(self._layout.bad_nodes, msgspec.json.encode(list(self._bad.values())))
        except OSError as error:
            log.error("%s: %s; the run's next job may be given %s", self._layout.bad_nodes, error, node)
        return bad


def excluded_nodes(layout: RunLayout) -> list[str]:
    """Bad nodes that the run's next job should not be given, as far as its partitions have enough others."""
    bad = read_bad_nodes(layout, time.time())
    if not bad:
        return []
    try:
        components = request_for(load_run_config(layout.root).cluster).components
        states = node_states(query("sinfo", "-h", "-N", "-o", "%N %t %P"))
    except GyreError as error:
        log.warning("excluding all bad nodes: %s", error.message)
        return sorted(node.node for node in bad)
    wanted: dict[str, int] = {}
    for component in components:
        wanted[component.partition] = wanted.get(component.partition, 0) + component.nodes
    return sorted(spared([node.node for node in bad], wanted, states))


def spared(
    bad: Iterable[str], wanted: Mapping[str, int], states: Mapping[str, Mapping[str, str]]
) -> list[str]:
    """As many of `bad`, in order, as leave each partition the nodes wanted of it; else the job would wait for ever."""
    chosen: list[str] = []
    for name in bad:
        left = {*chosen, name}
        if all(_usable(states.get(partition, {}), left) >= count for partition, count in wanted.items()):
            chosen.append(name)
        else:
            log.warning("%s is bad and not excluded: too few nodes would be left", name)
    return chosen


def _usable(states: Mapping[str, str], without: Iterable[str]) -> int:
    return sum(state in USABLE for node, state in states.items() if node not in set(without))


def keep_bad_nodes_from(job: str, layout: RunLayout) -> None:
    """Keep the bad nodes from a job that was just requeued or submitted. What the site refuses is logged.

    Slurm takes ExcNodeList for pending jobs only (man scontrol), so this follows `scontrol requeue`; while the job's
    processes still end it may say "try again in a bit" (measured), which is done for EXCLUDE_S.
    """
    deadline = time.monotonic() + EXCLUDE_S
    try:
        names = excluded_nodes(layout)
        if not names:
            return
        given = load_run_config(layout.root).cluster.job.exclude
        everything = ",".join([*([given] if given else []), *names])
        while not _excluded(job, everything, deadline):
            time.sleep(AGAIN_S)
        log.info("job %s: it is not given %s", job, ", ".join(names))
    except GyreError as error:
        log.warning("job %s: its bad nodes are not excluded: %s", job, error.message)


def _excluded(job: str, nodes: str, deadline: float) -> bool:
    """False: to be tried again. Raises SlurmCommandFailed for a refusal, or when the time is over."""
    try:
        query("scontrol", "update", f"JobId={job}", f"ExcNodeList={nodes}")
    except SlurmCommandFailed as error:
        if "try again" in error.message and time.monotonic() < deadline:
            return False
        raise
    return True


def submitted_exclude(exclude: str, layout: RunLayout) -> str:
    """`cluster.job.exclude` of a run that is submitted again."""
    return ",".join(filter(None, [exclude, *excluded_nodes(layout)]))
