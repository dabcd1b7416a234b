"""What the run folder says of the gateway and the runner: `services/<kind>.json`, replaced whole by each process at its start.

A controller that takes over a run reads it to learn which of them may have outlived the one before. A record proves nothing by
itself: the process is looked at, or awaited.
"""

from __future__ import annotations

import logging

import msgspec

from gyre_hpc.files import replace_file
from gyre_hpc.launch.identity import ProcessIdentity, job_id
from gyre_hpc.layout import RunLayout
from gyre_hpc.transport.messages import PeerKind

log = logging.getLogger(__name__)


class ServiceRecord(msgspec.Struct, frozen=True):
    """One process. `incarnation` is the first of its launch, `job` the Slurm job it runs in ("" outside Slurm)."""

    incarnation: int
    process: ProcessIdentity
    job: str = ""


def record_service(layout: RunLayout, kind: PeerKind, incarnation: int) -> None:
    """This process is the run's `kind`."""
    layout.services.mkdir(exist_ok=True)
    record = ServiceRecord(incarnation, ProcessIdentity.own(), job_id())
    replace_file(layout.service(kind), msgspec.json.encode(record))


def read_service(layout: RunLayout, kind: PeerKind) -> ServiceRecord | None:
    """The last process of this kind; None if there was none, or if the file cannot be read."""
    path = layout.service(kind)
    try:
        return msgspec.json.decode(path.read_bytes(), type=ServiceRecord)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        log.warning("%s: not a record of a service (%s); its process is not looked for", path, error)
        return None
