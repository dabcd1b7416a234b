"""How long a service looks for another controller, and how it learns that there is one while its own link still stands.

A controller whose host is lost, or that was declared gone by force, does not close its links. The rendezvous file tells:
once it names a higher epoch the link to the earlier controller ends, and the service goes over.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from typing import Final

from gyre_hpc.config_cluster import ClusterConfig
from gyre_hpc.errors import CorruptRecord
from gyre_hpc.layout import RunLayout
from gyre_hpc.transport.links import Link
from gyre_hpc.transport.rendezvous import read_rendezvous
from gyre_hpc.transport.wire import HANDSHAKE_S

LOOK_S: Final = 2.0
"""Seconds between two looks at the rendezvous file: a fraction of the time after which a silent peer is LOST."""


def orphan_grace(cluster: ClusterConfig) -> float:
    """Seconds gateway and runner live without a controller; no limit where they have a job of their own."""
    return math.inf if cluster.runners == "external" else cluster.orphan_grace_s


def first_wait(cluster: ClusterConfig) -> float:
    """Seconds they wait for the controller that has just started them, which listens already unless it has died since."""
    return (
        min(cluster.start_timeout_s, max(orphan_grace(cluster), HANDSHAKE_S))
        if cluster.runners == "job"
        else math.inf
    )


@contextlib.asynccontextmanager
async def until_succession(link: Link, layout: RunLayout) -> AsyncIterator[None]:
    """Inside, `link` ends as soon as another controller has taken the run over."""
    watching = asyncio.create_task(_leave_at_succession(link, layout))
    try:
        yield
    finally:
        watching.cancel()


async def _leave_at_succession(link: Link, layout: RunLayout) -> None:
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            rendezvous = read_rendezvous(layout)
        except (OSError, CorruptRecord):
            continue
        if rendezvous is not None and rendezvous.epoch > link.epoch:
            link.abandon()
            return
