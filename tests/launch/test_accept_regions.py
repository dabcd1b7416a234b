"""The acceptance job's pulls between two nodes, and the transport that follows from what they measured."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path

import pytest

from gyre_hpc.bench.mpi_pair import ENVIRONMENT
from gyre_hpc.errors import GyreError
from gyre_hpc.launch.doctor import accept_regions
from gyre_hpc.launch.doctor.accept_regions import (
    OWNER,
    PULLER,
    Measured,
    Way,
    choose,
    devices,
    judge_regions,
    measure,
    own,
    read_measured,
)
from gyre_hpc.launch.doctor.ask import Answer
from gyre_hpc.launch.doctor.site import State
from gyre_hpc.layout import RunLayout
from gyre_hpc.transport.mpi.host import socket_path
from gyre_hpc.transport.mpi.pair import endpoint_arguments
from gyre_hpc.transport.regions import run_key
from gyre_hpc.transport.rendezvous import write_secret

SECRET = b"s" * 32
NAMES = ["a", "b"]
ENDED = Answer(0)
NEITHER: dict[str, list[str]] = {"a": [], "b": []}
BOTH = {"a": ["mlx5_0"], "b": ["mlx5_0", "mlx5_1"]}
JOINED, APART = Way(1.0), Way(why="no MPI library that srun starts")


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept_regions, "AUTO", "127.0.0.1")


async def met(folder: Path) -> Measured:
    _, found = await asyncio.gather(
        own(folder, SECRET, "a", 1 << 20, 60.0), measure(folder, SECRET, "b", 60.0)
    )
    assert read_measured(folder) == found
    return found


@pytest.mark.nixl
async def test_every_way_is_measured_between_two_nodes(tmp_path: Path) -> None:
    found = await met(tmp_path)
    assert found.ways.keys() == {"sockets", "nixl", "mpi"} and found.devices.keys() == {"a", "b"}
    assert {name for name, way in found.ways.items() if way.gb_per_s > 0 and not way.why} == {
        "sockets",
        "nixl",
    }
    findings = {each.name: each for each in judge_regions(found, ENDED, NAMES)}
    assert {each.state for each in findings.values()} == {State.OK}
    assert all("a to b" in each.found for each in findings.values())
    assert "GB/s" in findings["region tcp"].found and "GB/s" in findings["region nixl"].found
    assert "no MPI library" in findings["region mpi"].found


@pytest.mark.mpi
async def test_endpoints_that_were_started_apart_join_and_move_the_region(tmp_path: Path) -> None:
    secret = write_secret(RunLayout(tmp_path))
    mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert mpiexec is not None
    endpoints = [
        await asyncio.create_subprocess_exec(
            *(mpiexec, "-iface", "lo", "-n", "1", sys.executable),
            *endpoint_arguments(tmp_path, name, socket_path(run_key(secret), name), "pmi2"),
            env=os.environ | ENVIRONMENT,
        )
        for name in (OWNER, PULLER)
    ]
    _, found = await asyncio.gather(
        own(tmp_path, secret, "a", 1 << 20, 60.0, mpi=True),
        measure(tmp_path, secret, "b", 60.0, mpi=True),
    )
    assert [await asyncio.wait_for(endpoint.wait(), 60) for endpoint in endpoints] == [0, 0]
    assert found.ways["mpi"].gb_per_s > 0 and not found.ways["mpi"].why
    (finding,) = [each for each in judge_regions(found, ENDED, NAMES) if each.name == "region mpi"]
    assert "joined" in finding.found and "GB/s" in finding.found
    assert choose(found) == "mpi"


@pytest.mark.nixl
@pytest.mark.rdma
async def test_rdma_beats_tcp_where_there_is_rdma(tmp_path: Path) -> None:
    assert devices()
    assert choose(await met(tmp_path)) == "nixl"


async def test_without_nixl_the_command_that_brings_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accept_regions.nixl_agent, "installed", lambda: False)
    found = await met(tmp_path)
    tcp, _, nixl = judge_regions(found, ENDED, NAMES)
    assert tcp.state is State.OK and nixl.state is State.OK and "pip install" in nixl.found
    assert choose(found) == "sockets"


async def test_an_owner_that_does_not_come_is_told_and_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(GyreError, match="did not appear"):
        await measure(tmp_path, SECRET, "b", 0.2)
    (finding,) = judge_regions(read_measured(tmp_path), Answer(1, err="b: did not appear"), NAMES)
    assert finding.state is State.WARNING and "did not appear" in finding.found and finding.fix


def measured(tcp: Way, nixl: Way, devices: dict[str, list[str]], mpi: Way = APART) -> Measured:
    return Measured({"sockets": tcp, "nixl": nixl, "mpi": mpi}, devices)


@pytest.mark.parametrize(
    ("nixl", "devices", "mpi", "best"),
    [
        (Way(20.0), BOTH, APART, "nixl"),
        (Way(20.0), BOTH, JOINED, "nixl"),
        (Way(20.0), NEITHER, APART, "sockets"),
        (Way(20.0), {"a": ["mlx5_0"], "b": []}, JOINED, "mpi"),
        (Way(2.1), BOTH, APART, "sockets"),
        (Way(why="the read failed"), BOTH, JOINED, "mpi"),
        (Way(why="the read failed"), BOTH, APART, "sockets"),
    ],
)
def test_the_transport_follows_from_measurements(
    nixl: Way, devices: dict[str, list[str]], mpi: Way, best: str
) -> None:
    assert choose(measured(Way(2.0), nixl, devices, mpi)) == best


def test_nothing_measured_means_tcp() -> None:
    assert choose(None) == "sockets"


def test_a_closed_port_is_a_warning_that_says_what_to_open() -> None:
    found = measured(Way(why="connection refused"), Way(why="refused too"), NEITHER)
    tcp, *_ = judge_regions(found, ENDED, NAMES)
    assert tcp.state is State.WARNING and "connection refused" in tcp.found and "ports" in tcp.fix
