"""Which address a server binds and publishes: `cluster.host`, or with "auto" this node's own."""

from __future__ import annotations

import socket
from typing import Final

from gyre_hpc.errors import ConfigError

AUTO: Final = "auto"


def own_address(host: str) -> str:
    """`host`, or for "auto" the IPv4 address other nodes know this one by. Raises ConfigError naming the node."""
    if host != AUTO:
        return host
    name = socket.gethostname()
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise ConfigError(
            f"cluster.host=auto: node {name} has no address ({error})",
            fix="set cluster.host to an address of this node",
        ) from error
