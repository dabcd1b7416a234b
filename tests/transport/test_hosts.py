"""The address a server publishes: in network namespaces with the interfaces, routes and names of real sites."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gyre_hpc.errors import ConfigError
from gyre_hpc.transport.hosts import own_address

in_namespace = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None,
    reason="needs root and iproute2; enable: apt install iproute2",
)
NODE = """
ip link set lo up
ip link add eth7 type veth peer name e; ip link set e up; ip addr add 10.71.0.5/24 dev eth7; ip link set eth7 up
ip link add ib7 type veth peer name i; ip link set i up; ip addr add 10.72.0.5/24 dev ib7; ip link set ib7 up
ip route add 10.73.0.0/24 via 10.72.0.1
mount -t tmpfs none /mnt; printf '{hosts}' >/mnt/hosts; mount --bind /mnt/hosts /etc/hosts; hostname here
"""
"""A node with an Ethernet and an InfiniBand network; 10.73.0.0/24 lies behind the latter."""
DEBIAN = "127.0.0.1 localhost\\n127.0.1.1 here\\n"


def on_node(call: str, *, hosts: str = DEBIAN, more: str = "") -> str:
    """What `own_address(CALL)` says there, or the error."""
    program = f"from gyre_hpc.launch.address import *\ntry: print({call})\nexcept Exception as e: print(e)"
    script = f"set -e; {NODE.format(hosts=hosts)}\n{more}\nexec {sys.executable} -c '{program}'"
    command = ["unshare", "--net", "--mount", "--uts", "bash", "-c", script]
    env = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
    env["PYTHONPATH"] = str(Path(__file__).parents[2])
    return subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout.strip()


def test_a_given_address_is_taken_as_it_is() -> None:
    assert own_address("127.0.0.1", controller="10.0.0.1") == "127.0.0.1"


@pytest.mark.root
@in_namespace
@pytest.mark.parametrize(
    ("controller", "own"),
    [
        ("10.71.0.9", "10.71.0.5"),
        ("10.73.0.9", "10.72.0.5"),
        ("10.71.0.5", "10.71.0.5"),
        ("127.0.0.1", "127.0.0.1"),
    ],
)
def test_a_peer_takes_the_address_of_the_route_to_its_controller(controller: str, own: str) -> None:
    assert on_node(f'own_address("auto", controller="{controller}")') == own


@pytest.mark.root
@in_namespace
def test_a_named_interface_wins() -> None:
    assert on_node('own_address("auto", interface="ib7", controller="10.71.0.9")') == "10.72.0.5"
    said = on_node('own_address("auto", interface="ib9")')
    assert "cluster.interface=ib9: node here" in said and "ib7 10.72.0.5" in said


@pytest.mark.root
@in_namespace
def test_the_controller_never_takes_the_loopback_address_its_own_name_resolves_to() -> None:
    assert on_node("node_address()", more="ip route add default via 10.71.0.1") == "10.71.0.5"
    named = f"{DEBIAN}10.72.0.5 cell7\\n"
    assert (
        on_node("node_address()", hosts=named, more="export SLURMD_NODENAME=cell7 PATH=/sbin") == "10.72.0.5"
    )


@pytest.mark.root
@in_namespace
def test_a_machine_by_itself_has_loopback() -> None:
    assert on_node("node_address()", more="ip link set eth7 down; ip link set ib7 down") == "127.0.0.1"


@pytest.mark.root
@in_namespace
def test_a_peer_without_a_way_to_its_controller_says_so() -> None:
    said = on_node('own_address("auto", controller="10.99.0.1")')
    assert "node here has no way to 10.99.0.1" in said and "cluster.interface" in said


def test_a_name_that_does_not_resolve_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-node.invalid")
    assert own_address("auto", names=["neither.invalid"])
    with pytest.raises(ConfigError, match=r"gone\.invalid"):
        own_address("auto", controller="gone.invalid")
