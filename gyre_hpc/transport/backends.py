"""Which region backends a process of a run has: by `transport.kind`. The one place that knows them all.

A backend's module is imported only where it is asked for. TCP needs no entry here: every region server has it.
"""

from __future__ import annotations

from collections.abc import Sequence

from gyre_hpc.config import RunConfig
from gyre_hpc.transport.backend import Backend
from gyre_hpc.transport.regions import RegionServer, run_key


def region_server(
    config: RunConfig, owner: str, secret: bytes, *, others: Sequence[Backend] = ()
) -> RegionServer:
    """The region server of process `owner` of this run, not yet started; `others` are backends made by the caller."""
    return RegionServer(
        config.cluster.host,
        owner,
        run_key(secret),
        secret=secret,
        backends=[*others, *make_backends(config.transport.kind, config.cluster.host, owner, secret)],
        same_host=config.transport.same_host,
    )


def make_backends(kind: str, host: str, owner: str, secret: bytes) -> list[Backend]:
    """The backends of this kind of transport beside TCP, not yet started."""
    if kind == "nixl":
        from gyre_hpc.transport.nixl_backend import NixlBackend

        return [NixlBackend(host, owner, secret)]
    return []
