"""What SIGTERM means to a peer: under Slurm a notice to pass on, on one machine the end.

Slurm sends SIGTERM to every process of every step when a job is preempted, seconds to minutes before it kills them, and
tells the batch process nothing (measured, 22.05.8). So a peer under `cluster.kind=slurm` tells the controller over its link
and goes on until it is told to end; without a link, or after Shutdown, SIGTERM ends it there too. SIGINT always ends it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable

from gyre_hpc.config_cluster import ClusterConfig
from gyre_hpc.transport.messages import AskedToEnd
from gyre_hpc.transport.peer import Link

log = logging.getLogger(__name__)


def heed_signals(
    cluster: ClusterConfig,
    link: Callable[[], Link | None],
    end: Callable[[], None],
    noticed: Callable[[], None] = lambda: None,
) -> None:
    """Handle SIGTERM and SIGINT on the running loop. `noticed` is called when SIGTERM was passed on instead of `end`."""

    def terminated() -> None:
        current = link()
        if cluster.kind != "slurm" or current is None or not current.obeys:
            end()
            return
        log.warning("SIGTERM: the controller is told; this process goes on until it says so")
        current.send(AskedToEnd(signal.SIGTERM.name))
        noticed()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, terminated)
    loop.add_signal_handler(signal.SIGINT, end)
