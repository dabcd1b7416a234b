"""Which address a server binds and publishes: `cluster.host`, or with "auto" this node's own, as others reach it;
and the name of its node, by which people and Slurm know it.

The interface's address where one is named (`cluster.interface`), else the address of the route to the controller, which
peers know. The controller knows only names: of those that resolve, the first address that is not loopback (Debian's
/etc/hosts has the host's own name at 127.0.1.1), else that of the route out, else loopback: a machine by itself. IPv4.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Sequence
from typing import Final

import psutil

from gyre_hpc.errors import ConfigError

AUTO: Final = "auto"
ELSEWHERE: Final = "198.51.100.1"
"""An address of no machine (RFC 5737). Nothing is sent there: the way out is looked up."""
LOOPBACK: Final = "127.0.0.1"
ANY_PORT: Final = 9


def own_address(host: str, *, interface: str = "", controller: str = "", names: Sequence[str] = ()) -> str:
    """`host`, or for "auto" this node's address; `names` are what others call it. Raises ConfigError naming the node."""
    if host != AUTO:
        return host
    if interface:
        return interface_address(interface)
    if controller:
        return route_to(controller)
    return _of_names([*names, socket.gethostname()])


def interface_address(interface: str) -> str:
    """The first IPv4 address of a network interface. Raises ConfigError naming those there are."""
    there = {
        name: [each.address for each in addresses if each.family is socket.AF_INET]
        for name, addresses in psutil.net_if_addrs().items()
    }
    if not there.get(interface):
        known = ", ".join(f"{name} {found[0]}" for name, found in sorted(there.items()) if found)
        raise ConfigError(
            f"cluster.interface={interface}: node {socket.gethostname()} has no address there; it has {known}",
            fix="name one that every node has, or leave cluster.interface empty",
        )
    return str(there[interface][0])


def route_to(address: str) -> str:
    """The address this node has towards another (a name or an address). Raises ConfigError where there is no way."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, ANY_PORT))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"cluster.host=auto: node {socket.gethostname()} has no way to {address} ({error})",
            fix="set cluster.interface to the network that all nodes share",
        ) from error


def _of_names(names: Sequence[str]) -> str:
    found = [address for name in names if (address := _resolved(name))]
    outward = [address for address in found if not ipaddress.ip_address(address).is_loopback]
    if outward:
        return outward[0]
    with contextlib.suppress(ConfigError):
        return route_to(ELSEWHERE)
    return LOOPBACK


def _resolved(name: str) -> str | None:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return None


def node_name() -> str:
    """Slurm's name of this node, else the host's."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def whereabouts() -> str:
    """The first line of a process's log: node, pid and, inside Slurm, job and step."""
    said = f"node={node_name()} pid={os.getpid()}"
    for word, name in (("job", "SLURM_JOB_ID"), ("step", "SLURM_STEP_ID")):
        said += f" {word}={os.environ[name]}" if os.environ.get(name) else ""
    return said
