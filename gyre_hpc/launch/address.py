"""The address of this node, once per process: `cluster.host=auto` becomes what every server of the process binds."""

from __future__ import annotations

import os
import re

from gyre_hpc.config_cluster import ClusterConfig
from gyre_hpc.errors import GyreError
from gyre_hpc.launch.commands import query
from gyre_hpc.layout import RunLayout
from gyre_hpc.transport.hosts import AUTO, own_address
from gyre_hpc.transport.rendezvous import read_rendezvous


def settle_host(cluster: ClusterConfig, layout: RunLayout | None = None) -> None:
    """Replace `cluster.host=auto`; with the run's `layout` by the route to its controller. Raises ConfigError."""
    rendezvous = read_rendezvous(layout) if layout else None
    cluster.host = node_address(cluster.host, cluster.interface, rendezvous.host if rendezvous else "")


def node_address(host: str = AUTO, interface: str = "", controller: str = "") -> str:
    """The same of plain values; without a controller by the names Slurm and the system have for this node."""
    if host != AUTO or interface or controller:
        return own_address(host, interface=interface, controller=controller)
    name = os.environ.get("SLURMD_NODENAME", "")
    told = _told_by_slurm(name) if name else ""
    if told and told != name:
        return own_address(host, controller=told)
    return own_address(host, names=[name] if name else [])


def _told_by_slurm(name: str) -> str:
    """NodeAddr of this node; "" where Slurm does not say. It is the name itself unless the site gave another."""
    try:
        said = query("scontrol", "show", "node", name, "--oneliner")
    except GyreError:
        return ""
    found = re.search(r"\bNodeAddr=(\S+)", said)
    return found[1] if found else ""
