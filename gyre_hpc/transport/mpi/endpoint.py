"""`python -m gyre_hpc.transport.mpi.endpoint`: the disposable process that speaks MPI for one host beside it.

A one-rank step on the host's node. It relays frames between its host's Unix socket and the inter-communicators that the
host tells it to accept or join, and moves regions. It knows nothing of links. Accept and Connect block all MPI of a
process, so a watchdog ends the process when one takes longer than `--join-s`; the host does the same from outside,
and starts another. It also ends when its host is gone and when a region has not moved for `--stall-s`; not by SIGTERM,
which a preemption sends to all and its host judges.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from pathlib import Path

from gyre_hpc.errors import GyreError, PeerLost
from gyre_hpc.layout import RunLayout
from gyre_hpc.transport.mpi.host_socket import HostSocket
from gyre_hpc.transport.mpi.wire import Ready, Unfit
from gyre_hpc.transport.rendezvous import read_secret

log = logging.getLogger("gyre_hpc.transport.mpi.endpoint")
HOST_S = 30.0
"""Longest wait for the host's socket."""


def serve(args: argparse.Namespace) -> None:
    """The life of the process: until its host is gone or MPI is unfit."""
    host = HostSocket(args.socket, HOST_S)
    try:
        from gyre_hpc.transport.mpi import library
    except (ImportError, RuntimeError) as error:
        why = " ".join(str(error).split())
        host.send(Unfit(f"mpi4py finds no MPI library ({why}); pip install 'gyre_hpc[mpi]'"))
        return
    found = library.name()
    reason = library.unfit_library(found, args.plugin, os.environ)
    if not reason:
        library.initialise()
        reason = library.unfit_world(found, args.plugin, os.environ)
    if reason:
        log.error("%s", reason)
        host.send(Unfit(reason))
        return
    from gyre_hpc.transport.mpi.service import Service

    log.info("%s", found)
    host.send(Ready(found))
    Service(host, args.name, read_secret(RunLayout(args.run)), args.join_s, args.stall_s).run()


def main(argv: list[str] | None = None) -> int:
    """Entry point of the endpoint; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m gyre_hpc.transport.mpi.endpoint", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="run folder")
    parser.add_argument("--name", required=True, help="name of the host: controller, cell-0, ...")
    parser.add_argument("--socket", type=Path, required=True, help="Unix socket of the host")
    parser.add_argument("--plugin", required=True, help="srun's --mpi, for messages")
    parser.add_argument("--join-s", type=float, required=True, help="longest time one join may take")
    parser.add_argument("--stall-s", type=float, required=True, help="longest time a region may not move")
    args = parser.parse_args(argv)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        serve(args)
    except PeerLost as error:
        log.info("%s", error.message)
    except GyreError as error:
        log.critical("%s", error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)
