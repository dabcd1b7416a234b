"""`python -m gyre_hpc.gateway.process --run RUN --incarnation K`: the gateway process.

A small parent binds the listening socket and keeps it while workers come and go: a harness that calls during a restart
waits in the backlog instead of being refused. A worker that dies is followed by the next one, with the next
incarnation; one that ends on purpose, or for a reason a restart cannot cure, ends the parent with its exit code.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import uvloop

from gyre_hpc.config import load_run_config
from gyre_hpc.errors import ConfigError, CorruptRecord, GyreError, MissingInput, StorageFull
from gyre_hpc.launch.address import settle_host
from gyre_hpc.launch.elsewhere.services import record_service
from gyre_hpc.launch.incarnations import epoch_of
from gyre_hpc.launch.nodes.scratch import process_scratch
from gyre_hpc.launch.nodes.watchdog import outlive
from gyre_hpc.launch.signals import die_with_parent
from gyre_hpc.layout import RunLayout
from gyre_hpc.transport.hosts import whereabouts
from gyre_hpc.transport.messages import PeerKind

log = logging.getLogger(__name__)

BACKLOG = 1024
INCURABLE = frozenset(kind.exit_code for kind in (ConfigError, MissingInput, CorruptRecord, StorageFull))
"""Exit codes of a worker that the next one would only repeat."""
SHORT_LIFE_S = 10.0
"""A worker that lived shorter counts towards giving up."""
MAX_SHORT_LIVES = 3
BACK_OFF_S = 0.2
INCARNATIONS_PER_WORKER = 20
"""A worker takes the next number for each new link; a launch has a thousand."""


def listen(host: str) -> socket.socket:
    """A listening socket on a free port. Raises GyreError naming the host."""
    try:
        return socket.create_server((host, 0), backlog=BACKLOG)
    except OSError as error:
        raise GyreError(
            f"the gateway cannot listen on cluster.host={host}: {error.strerror}",
            fix="set cluster.host to an address of this node",
        ) from error


class Supervisor:
    """The parent: socket and workers. `shielded`: SIGTERM is the worker's to judge, whose end ends the parent."""

    def __init__(
        self, run: Path, incarnation: int, listening: socket.socket, *, shielded: bool = False
    ) -> None:
        self._run = run
        self._shielded = shielded
        self._first = incarnation
        self._socket = listening
        self._ending = threading.Event()
        self._worker: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Keep a worker alive; the exit code of the last one."""
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGTERM, signal.SIG_IGN if self._shielded else self._on_signal)
        incarnation, short_lives = self._first, 0
        while True:
            started = time.monotonic()
            code = self._serve(incarnation)
            if code == 0 or code in INCURABLE or self._ending.is_set():
                return max(code, 0)
            short_lives = short_lives + 1 if time.monotonic() - started < SHORT_LIFE_S else 0
            if short_lives >= MAX_SHORT_LIVES:
                log.error("%d gateway workers in a row lived less than %g s", short_lives, SHORT_LIFE_S)
                return 1
            log.error("the gateway worker ended with code %d: starting the next", code)
            self._ending.wait(BACK_OFF_S)
            incarnation += INCARNATIONS_PER_WORKER

    def _serve(self, incarnation: int) -> int:
        handle = self._socket.fileno()
        command = [
            sys.executable,
            "-m",
            __spec__.name,
            "--run",
            str(self._run),
            "--incarnation",
            str(incarnation),
        ]
        command += ["--launch", str(self._first), "--socket", str(handle), "--parent", str(os.getpid())]
        self._worker = subprocess.Popen(command, pass_fds=[handle])
        if self._ending.is_set():
            self._worker.terminate()
        return self._worker.wait()

    def _on_signal(self, number: int, frame: object) -> None:
        self._ending.set()
        if self._worker is not None:
            self._worker.send_signal(signal.SIGTERM)


def work(run: Path, launch: int, incarnation: int, handle: int) -> None:
    """Run one worker on an inherited socket."""
    from gyre_hpc.gateway.worker import Worker

    layout, config = RunLayout(run), load_run_config(run)

    async def live() -> bool:
        worker = Worker(layout, config, socket.socket(fileno=handle), launch, incarnation)
        await worker.run()
        return worker.orphaned

    if uvloop.run(live()):
        grace_s = config.cluster.orphan_grace_s
        outlive(layout, config.cluster, epoch_of(incarnation), waited_s=grace_s)


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0 after a clean end, else that of the error."""
    parser = argparse.ArgumentParser(prog="python -m gyre_hpc.gateway.process")
    parser.add_argument("--run", type=Path, required=True, help="run folder")
    parser.add_argument("--incarnation", type=int, required=True, help="number of this launch")
    parser.add_argument("--launch", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--socket", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        if options.socket is not None:
            die_with_parent(options.parent)  # nobody restarts or ends a worker without its parent
            work(options.run, options.launch, options.incarnation, options.socket)
            return 0
        log.info("gateway %s", whereabouts())
        record_service(RunLayout(options.run.resolve()), PeerKind.GATEWAY, options.incarnation)
        cluster = load_run_config(options.run).cluster
        settle_host(cluster, RunLayout(options.run))
        listening, shielded = listen(cluster.host), cluster.kind == "slurm"
        with process_scratch(options.run, "gateway-0"):
            return Supervisor(options.run, options.incarnation, listening, shielded=shielded).run()
    except GyreError as error:
        log.error("%s", error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
