"""What a run asks of Slurm, and that a job of that size is one the controller accepts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gyre_hpc.config_cluster import CellConfig, ClusterConfig
from gyre_hpc.config_job import JobConfig
from gyre_hpc.config_service import ServiceConfig, StepConfig
from gyre_hpc.errors import ConfigError
from gyre_hpc.launch.job import allocation
from gyre_hpc.launch.job.allocation import Allocation, check_allocation, read_allocation
from gyre_hpc.launch.job.request import Component, request_for, service_room, spread
from gyre_hpc.launch.nodes.gres import gres_counts, times
from gyre_hpc.launch.nodes.placement import Node


def slurm(**changes: object) -> ClusterConfig:
    return ClusterConfig(kind="slurm", **changes)  # type: ignore[arg-type]


@st.composite
def clusters(draw: st.DrawFn) -> ClusterConfig:
    nodes = draw(st.integers(1, 3))
    cell = CellConfig(
        nodes=nodes,
        ranks=nodes * draw(st.integers(1, 4)),
        cpus_per_rank=draw(st.integers(1, 3)),
        mem=draw(st.sampled_from(["512M", "1G", "3G"])),
        gres=draw(st.sampled_from(["", "gpu:2", "gpu:a100:1,nvme"])),
    )
    job = JobConfig(
        cells_per_node=1 if nodes > 1 else draw(st.integers(1, 3)),
        service_cpus=draw(st.integers(1, 3)),
        service_nodes=draw(st.integers(2, 3)),
    )
    layout = draw(st.sampled_from(["flat", "het"]))
    return slurm(cells=draw(st.integers(1, 7)), cell=cell, job=job, layout=layout)


def granted(components: tuple[Component, ...]) -> tuple[Allocation, dict[str, str]]:
    """The allocation Slurm gives for a request, with its generic resources per node."""
    het = len(components) > 1
    nodes, gres = list[Node](), dict[str, str]()
    for group, component in enumerate(components):
        for index in range(component.nodes):
            nodes.append(Node(f"n{group}-{index}", component.cpus, component.mem_mb, group if het else None))
            gres[nodes[-1].name] = component.gres
    return Allocation(tuple(str(7 + group) for group in range(len(components))), tuple(nodes)), gres


@given(clusters())
def test_a_job_as_requested_holds_what_the_configuration_asks_for(cluster: ClusterConfig) -> None:
    check_allocation(cluster, *granted(request_for(cluster).components))


@given(clusters(), st.sampled_from(["nodes", "cpus", "mem_mb", "gres"]))
def test_a_job_that_is_smaller_in_anything_is_refused_with_both_sides(
    cluster: ClusterConfig, less: str
) -> None:
    cluster.layout = "het"
    assume(cluster.cells % min(cluster.job.cells_per_node, cluster.cells) == 0)  # no place is left over
    services, cells = request_for(cluster).components
    if less == "gres" and not cells.gres:
        return
    smaller = (
        replace(cells, gres="") if less == "gres" else replace(cells, **{less: getattr(cells, less) - 1})
    )
    with pytest.raises(ConfigError) as refused:
        check_allocation(cluster, *granted((services, smaller)))
    assert f"{cluster.cells} cells" in str(refused.value) and "allocation: job 7" in str(refused.value)


def test_generic_resources_that_slurm_does_not_tell_are_not_judged() -> None:
    cluster = slurm(cell=CellConfig(gres="gpu:2"))
    job, _ = granted(request_for(cluster).components)
    check_allocation(cluster, job, {})


def test_a_type_of_device_satisfies_a_wish_for_any() -> None:
    cluster = slurm(cells=1, cell=CellConfig(gres="gpu:2"))
    job, _ = granted(request_for(cluster).components)
    check_allocation(cluster, job, {"n0-0": "gres:gpu:a100:2"})


@pytest.mark.parametrize("layout", ["flat", "het"])
def test_a_job_of_the_other_layout_is_refused(layout: str) -> None:
    other = "het" if layout == "flat" else "flat"
    job, gres = granted(request_for(slurm(layout=other)).components)
    with pytest.raises(ConfigError, match=f"cluster.layout={layout}, the job is {other}"):
        check_allocation(slurm(layout=layout), job, gres)


def test_cells_that_share_a_node_share_its_size() -> None:
    cell = CellConfig(ranks=2, cpus_per_rank=3, mem="2G", gres="gpu:2")
    job = JobConfig(cells_per_node=2, service_cpus=1, service_mem="2G")
    (component,) = request_for(slurm(cells=5, cell=cell, job=job)).components
    assert (component.nodes, component.cpus, component.mem_mb, component.gres) == (3, 13, 6144, "gpu:4")


def test_the_room_for_services_is_worked_out_of_their_sizes() -> None:
    sizes = ServiceConfig(runner=StepConfig(6, "10G"), gateway=StepConfig(2, "3G"))
    rooms = [service_room(slurm(service=sizes), nodes) for nodes in (1, 2, 4)]
    assert rooms == [(10, 15 * 1024), (6, 10 * 1024), (6, 10 * 1024)]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 99)), min_size=1), st.integers(1, 5))
def test_services_that_are_spread_take_at_least_their_share(sizes: list[tuple[int, int]], nodes: int) -> None:
    for room, needs in zip(spread(sizes, nodes), zip(*sizes, strict=True), strict=True):
        assert max(needs) <= room <= sum(needs) and room * nodes >= sum(needs)


def test_a_het_job_whose_first_component_has_one_node_does_not_survive_a_loss() -> None:
    job = JobConfig(service_nodes=1)
    with pytest.raises(ConfigError, match="service_nodes=1"):
        request_for(slurm(layout="het", job=job))
    warnings = request_for(slurm(layout="het", job=job, survive_node_loss=False)).warnings
    assert len(warnings) == 1 and "Slurm ends all components" in warnings[0]


def test_what_a_flat_job_does_not_survive_is_said() -> None:
    assert "batch node" in request_for(slurm(cells=2)).warnings[0]
    assert "one node" in request_for(slurm(cells=1)).warnings[0]


@pytest.mark.parametrize(
    ("cluster", "named"),
    [
        (ClusterConfig(), "cluster.kind=local"),
        (slurm(cell=CellConfig(nodes=2, ranks=2), job=JobConfig(cells_per_node=2)), "cells_per_node=2"),
        (slurm(cell=CellConfig(nodes=2, ranks=3)), "cluster.cell.ranks=3"),
        (slurm(job=JobConfig(service_mem="512M")), "service_mem=512M"),
        (slurm(service=ServiceConfig(runner=StepConfig(4)), job=JobConfig(service_cpus=3)), "runner.cpus=4"),
    ],
)
def test_keys_that_contradict_each_other_are_named(cluster: ClusterConfig, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        request_for(cluster)


def test_slurms_notation_of_generic_resources() -> None:
    assert gres_counts("gres:gpu:a100:4(S:0-1),nvme") == {"gpu:a100": 4, "nvme": 1}
    assert gres_counts("gpu") == {"gpu": 1} and gres_counts("") == {}
    assert times("gpu:2,nvme", 3) == "gpu:6,nvme:3"


def test_the_components_of_a_het_job_are_read_from_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "hostnames", lambda nodelist: nodelist.split("+"))
    env = {"SLURM_JOB_ID": "3", "SLURM_JOB_NODELIST": "a+b", "SLURM_HET_SIZE": "2"}
    for group, (job, nodes, cpus) in enumerate([("3", "a+b", "2(x2)"), ("4", "c", "8")]):
        env[f"SLURM_JOB_ID_HET_GROUP_{group}"] = job
        env[f"SLURM_JOB_NODELIST_HET_GROUP_{group}"] = nodes
        env[f"SLURM_JOB_CPUS_PER_NODE_HET_GROUP_{group}"] = cpus
    env["SLURM_MEM_PER_NODE_HET_GROUP_0"], env["SLURM_MEM_PER_CPU_HET_GROUP_1"] = "1000", "500"
    nodes = (Node("a", 2, 1000, 0), Node("b", 2, 1000, 0), Node("c", 8, 4000, 1))
    assert read_allocation(env) == Allocation(("3", "4"), nodes)


def test_outside_a_job_there_is_no_allocation() -> None:
    assert read_allocation({}) is None
