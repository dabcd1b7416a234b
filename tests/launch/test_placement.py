"""Placement of steps on the nodes of an allocation."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_hpc.config_cluster import ClusterConfig
from gyre_hpc.errors import ConfigError, NoRoom
from gyre_hpc.launch.job.allocation import with_room_kept
from gyre_hpc.launch.nodes.placement import Node, Placement, cpus_per_node, megabytes, place, place_beside
from gyre_hpc.launch.plan import ProcessSpec
from gyre_hpc.launch.slurm import srun_command

NODES = [Node("n0", 4, 4096), Node("n1", 4, 4096)]


def cell(name: str = "cell-0", **shape: object) -> ProcessSpec:
    return ProcessSpec(name, ["leader"], **shape)  # type: ignore[arg-type]


def test_steps_spread_over_the_nodes_and_the_batch_host_comes_last() -> None:
    first = place(cell(cpus_per_rank=2, mem="1G"), NODES, [])
    second = place(cell(cpus_per_rank=2, mem="1G"), NODES, [first])
    assert (first.nodes, second.nodes) == (("n1",), ("n0",))
    assert first.exact and second.exact


@pytest.mark.parametrize("spec", [cell(cpus_per_rank=2, mem="1G"), cell(mem="2G")])
def test_a_cell_that_does_not_fit_beside_the_others_has_no_room(spec: ProcessSpec) -> None:
    full = [Placement(("n0", "n1"), 3, 3072, exact=True)]
    with pytest.raises(NoRoom, match="0 have room"):
        place(spec, NODES, full)


def test_devices_are_counted_where_slurm_told_them() -> None:
    nodes = [replace(node, gres="gres:gpu:a100:4") for node in NODES]
    running: list[Placement] = []
    for _ in range(4):
        running.append(place(cell(mem="1M", gres="gpu:2"), nodes, running))
    assert sorted(step.nodes for step in running) == [("n0",)] * 2 + [("n1",)] * 2
    with pytest.raises(NoRoom, match="gpu:2"):
        place(cell(mem="1M", gres="gpu:2"), nodes, running)
    assert place(cell(mem="1M", gres="gpu:2"), NODES, running).exact, "not told: nothing is known"
    assert place(cell(mem="1M"), nodes, running).exact


def test_cells_leave_the_services_their_room_where_the_job_was_planned_so() -> None:
    cluster = ClusterConfig(kind="slurm", cells=2)
    planned = with_room_kept(cluster, [Node("n0", 3, 4096), Node("n1", 3, 4096)])
    first = place(cell(mem="2G"), planned, [])
    place(cell(mem="2G"), planned, [first])
    for more in ("2G", "1M"):  # neither memory nor CPUs are left
        with pytest.raises(NoRoom):
            place(cell(mem=more), [node for node in planned if node.name in first.nodes], [first])
    assert place(cell("gateway-0", service=True), planned, [first]).exact
    tight = [Node("n0", 2, 4096)]
    assert with_room_kept(cluster, tight) == tuple(tight)
    het = [Node("n0", 2, 2048, 0), Node("n1", 8, 8192, 1)]
    assert with_room_kept(cluster, het) == tuple(het)


def test_a_bad_node_comes_last_and_a_silent_one_never() -> None:
    spec = cell(cpus_per_rank=3, mem="1G", avoid=frozenset({"n1"}))
    first = place(spec, NODES, [])
    second = place(spec, NODES, [first])
    assert (first.nodes, second.nodes) == (("n0",), ("n1",))
    with pytest.raises(NoRoom):
        place(replace(spec, never=frozenset({"n1"})), NODES, [first])
    service = cell("gateway-0", service=True, never=frozenset({"n1"}))
    assert place(service, NODES, []).nodes == ("n0",)
    assert place(service, NODES[1:], []).nodes == ("n1",), "the run cannot do without it"


def test_sharing_steps_take_nothing_away() -> None:
    sharing = [Placement(("n0", "n1"), 4, 4096, exact=False)]
    assert place(cell(cpus_per_rank=4, mem="4G"), NODES, sharing).exact


def service(name: str, cpus: int = 1, mem: str = "1G") -> ProcessSpec:
    return cell(name, cpus_per_rank=cpus, mem=mem, service=True)


def test_services_have_their_own_in_what_the_cells_will_leave_over() -> None:
    planned = [Placement(("n0",), 3, 2048, exact=True), Placement(("n1",), 3, 2048, exact=True)]
    first = place(service("gateway-0"), NODES, [], planned)
    second = place(service("runner-0", mem="512M"), NODES, [first], planned)
    third = place(service("processor-0"), NODES, [first, second], planned)
    assert (first.nodes, second.nodes) == (("n1",), ("n0",))
    assert first.exact and second.exact and not third.exact
    assert place(cell(cpus_per_rank=3, mem="2G"), NODES, [first, second, third]).exact


def test_services_of_a_het_job_are_on_its_first_component() -> None:
    nodes = [Node("s", 2, 2048, 0), Node("c", 8, 8192, 1)]
    assert place(service("runner-0"), nodes, []).nodes == ("s",)
    assert place(cell("cell-0", mem="1G"), nodes, []).nodes == ("c",)
    with pytest.raises(NoRoom) as refused:
        place(service("runner-0", mem="3G"), nodes, [])
    assert "cluster.service.runner" in refused.value.fix


SIZES = st.tuples(st.integers(1, 3), st.integers(1, 2048))


@given(st.lists(SIZES, max_size=6), st.lists(SIZES, max_size=6))
def test_services_that_start_first_take_no_place_of_a_planned_cell(
    cells: list[tuple[int, int]], services: list[tuple[int, int]]
) -> None:
    specs = [cell(f"cell-{i}", cpus_per_rank=cpus, mem=f"{mem}M") for i, (cpus, mem) in enumerate(cells)]
    planned: list[Placement] = []
    with contextlib.suppress(NoRoom):
        for spec in specs:
            planned.append(place(spec, NODES, planned))
    running: list[Placement] = []
    for index, (cpus, mem) in enumerate(services):
        running.append(place(service(f"service-{index}", cpus, f"{mem}M"), NODES, running, planned))
    for node in NODES:
        here = [step for step in [*planned, *running] if step.exact and node.name in step.nodes]
        assert sum(step.cpus_per_node for step in here) <= node.cpus
        assert sum(step.mem_mb for step in here) <= (node.mem_mb or 0)


@pytest.mark.parametrize("spec", [cell(nodes=3, ranks=3), cell(cpus_per_rank=5), cell(mem="5G")])
def test_a_step_larger_than_the_job_is_refused(spec: ProcessSpec) -> None:
    with pytest.raises(NoRoom, match="cell-0"):
        place(spec, NODES, [])


names = st.frozensets(st.sampled_from(["n0", "n1", "n2"]))


@given(
    st.lists(
        st.tuples(
            st.integers(1, 2), st.integers(1, 4), st.integers(1, 4096), st.integers(0, 2), names, names
        ),
        max_size=12,
    )
)
def test_a_cell_has_all_it_asks_for_to_itself_or_does_not_start(
    shapes: list[tuple[int, int, int, int, frozenset[str], frozenset[str]]],
) -> None:
    nodes = [Node(f"n{index}", 4, 4096, gres="gpu:2") for index in range(3)]
    running: list[Placement] = []
    for count, cpus, mem, gpus, avoid, never in shapes:
        gres = f"gpu:{gpus}" if gpus else ""
        spec = cell(
            nodes=count, ranks=count, cpus_per_rank=cpus, mem=f"{mem}M", gres=gres, avoid=avoid, never=never
        )
        room = {node.name for node in nodes if fits(node, cpus, mem, gpus, running)} - never
        if len(room) < count:
            with pytest.raises(NoRoom):
                place(spec, nodes, running)
            continue
        step = place(spec, nodes, running)
        assert step.exact and set(step.nodes) <= room
        assert not set(step.nodes) & avoid or len(room - avoid) < count
        running.append(step)


def fits(node: Node, cpus: int, mem: int, gpus: int, running: list[Placement]) -> bool:
    here = [step for step in running if node.name in step.nodes]
    return (
        sum(step.cpus_per_node for step in here) + cpus <= 4
        and sum(step.mem_mb for step in here) + mem <= 4096
        and sum(int(step.gres[-1:] or 0) for step in here) + gpus <= 2
    )


@pytest.mark.parametrize(
    ("text", "mb"), [("2G", 2048), ("512M", 512), ("100", 100), ("1t", 1 << 20), ("1K", 1)]
)
def test_slurms_memory_notation(text: str, mb: int) -> None:
    assert megabytes(text) == mb


def test_memory_that_is_no_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 GB"):
        megabytes("2 GB")


def test_slurms_cpu_notation() -> None:
    assert cpus_per_node("8(x2),4", 3) == [8, 8, 4]
    with pytest.raises(ConfigError, match="8"):
        cpus_per_node("8", 2)


def test_srun_gets_every_flag() -> None:
    spec = cell(ranks=2, cpus_per_rank=3, gres="gpu:2", mem="1G")
    command = srun_command("17", "cell-0.1", spec, Placement(("n1",), 6, 1024, exact=True), ["--label"])
    assert command == [
        "srun",
        "--jobid=17",
        "--job-name=cell-0.1",
        "--nodelist=n1",
        "--nodes=1",
        "--ntasks=2",
        "--cpus-per-task=3",
        "--mem=1024M",
        "--gres=gpu:2",
        "--cpu-bind=none",
        "--mpi=none",
        "--kill-on-bad-exit=1",
        "--unbuffered",
        "--exact",
        "--label",
        "leader",
    ]


def test_a_step_beside_another_shares_its_node_and_all_the_memory_the_job_has_there() -> None:
    spec = ProcessSpec("mpi-cell-0", ["endpoint"], service=True, beside="cell-0", mpi="pmi2")
    placement = place_beside(spec, Node("n1", 8, 4096, 1))
    assert placement == Placement(("n1",), 1, 0, False, 1)
    command = srun_command("7", "mpi-cell-0.3", spec, placement, [])
    assert {"--het-group=1", "--nodelist=n1", "--ntasks=1", "--mem=0", "--mpi=pmi2", "--overlap"} <= set(
        command
    )
    assert place(cell(cpus_per_rank=8, mem="4G"), [Node("n1", 8, 4096)], [placement]).exact
