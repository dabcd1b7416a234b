"""Nodes of the acceptance job meet in a folder and over the network; what keeps them apart is named by pair."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from gyre_hpc.errors import ConfigError, MissingInput
from gyre_hpc.launch.doctor import accept, accept_node
from gyre_hpc.launch.doctor.accept_node import (
    Card,
    ClockServer,
    Met,
    Report,
    reach,
    read_reports,
    report_node,
)
from gyre_hpc.launch.doctor.ask import Answer
from gyre_hpc.launch.doctor.site import Finding, State, fault, ok
from gyre_hpc.launch.job import allocation

NAMES = ["a", "b", "c"]
ENDED = Answer(0)


def met_in(folder: Path, names: list[str], expected: list[str], meet_s: float = 60.0) -> dict[str, Report]:
    """Reports of nodes (threads here) that expect these names."""
    tasks = [
        threading.Thread(target=report_node, args=(folder, name, expected, lambda: [ok("disk", "1")], meet_s))
        for name in names
    ]
    for task in tasks:
        task.start()
    for task in tasks:
        task.join()
    return read_reports(folder)


def pairs(**met: dict[str, Met]) -> list[Finding]:
    return accept.judge_pairs(
        NAMES, {name: Report(name, "10.0.0.1", others, []) for name, others in met.items()}
    )


def verdicts(findings: list[Finding]) -> dict[str, str]:
    assert all(finding.fix for finding in findings if finding.state is not State.OK)
    return {finding.name: finding.state.value for finding in findings}


def everyone(other: Callable[[str, str], Met]) -> list[Finding]:
    return pairs(**{a: {b: other(a, b) for b in NAMES if a != b} for a in NAMES})


def test_nodes_that_share_a_folder_and_a_network_find_each_other(tmp_path: Path) -> None:
    reports = met_in(tmp_path, NAMES, NAMES)
    assert {name: set(report.met) for name, report in reports.items()} == {
        "a": {"b", "c"},
        "b": {"a", "c"},
        "c": {"a", "b"},
    }
    found = accept.judge_nodes(NAMES, reports, ENDED)
    assert {(finding.node, finding.name) for finding in found} == {
        ("every node", "disk"),
        ("", "shared folder"),
        ("", "network"),
        ("", "clocks"),
    }
    assert {finding.state for finding in found} == {State.OK}


def test_a_node_that_never_comes_is_a_fault_and_the_others_do_not_wait_for_ever(tmp_path: Path) -> None:
    reports = met_in(tmp_path, ["a", "b"], NAMES, meet_s=0.5)
    found = accept.judge_nodes(NAMES, reports, Answer(1, err="srun: error: c: task 2: Killed"))
    silent = next(finding for finding in found if finding.node == "c")
    assert silent.state is State.FAULT and "task 2: Killed" in silent.found
    shared = next(finding for finding in found if finding.name == "shared folder")
    assert shared.state is State.FAULT and "c on a: nothing appeared in time" in shared.found


def test_a_step_that_never_started_is_told_once_per_node_and_no_more() -> None:
    found = accept.judge_nodes(NAMES, {}, Answer(1, err="srun: error: Unable to create step"))
    assert [(each.node, each.name, each.state) for each in found] == [
        (name, "node", State.FAULT) for name in NAMES
    ]


@pytest.mark.parametrize(("spoil", "word"), [(Path.unlink, "before the file"), (Path.touch, "other bytes")])
def test_data_behind_a_card_must_be_there_and_whole(
    tmp_path: Path, spoil: Callable[[Path], None], word: str
) -> None:
    accept_node._publish(tmp_path, Card("b", "127.0.0.1", 1, ""))
    data = tmp_path / "data-b"
    data.write_bytes(b"old")
    spoil(data)
    assert word in accept_node._look_up(tmp_path, "b", 0.0).unseen


def test_an_address_that_leads_elsewhere_is_not_the_node() -> None:
    """As where a name resolves to 127.0.1.1 on every node."""
    with ClockServer("a", "127.0.0.1") as server:
        assert reach(Card("a", "127.0.0.1", server.port, "")).unreached == ""
        other = reach(Card("b", "127.0.0.1", server.port, ""))
    assert "answered by ['a'], not b" in other.unreached


def test_a_port_nobody_listens_on_is_told_with_its_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
    assert reach(Card("b", "127.0.0.1", port, "")).unreached == f"127.0.0.1 port {port}: Connection refused"


def test_a_listener_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept_node, "CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        assert "timed out" in reach(Card("b", "127.0.0.1", mute.getsockname()[1], "")).unreached


def test_pairs_that_do_not_reach_each_other_are_named_the_first_few() -> None:
    cut = everyone(lambda a, b: Met(unreached="10.0.0.1 port 7: timed out"))
    assert verdicts(cut) == {"shared folder": "ok", "network": "fault"}
    network = next(finding for finding in cut if finding.name == "network")
    assert network.found.startswith("a to b: 10.0.0.1 port 7: timed out") and network.found.endswith(
        "and 2 more"
    )
    assert verdicts(pairs(a={}, b={}, c={})) == {"shared folder": "fault", "network": "fault"}


def test_clocks_that_differ_are_a_warning_with_the_pair() -> None:
    assert verdicts(everyone(lambda a, b: Met(skew_s=0.01)))["clocks"] == "ok"
    assert verdicts(everyone(lambda a, b: Met(skew_s=3.0, error_s=2.5)))["clocks"] == "ok"
    found = everyone(lambda a, b: Met(skew_s=-30.0 if b == "c" else 0.0))
    assert verdicts(found)["clocks"] == "warning" and "30.000 s apart (a, c)" in found[-1].found


def test_a_job_of_one_node_says_that_it_proves_little() -> None:
    assert verdicts(accept.judge_pairs(["a"], {})) == {"network": "warning"}


@pytest.mark.parametrize(
    ("sizes", "state", "word"),
    [
        ([2, 2], "ok", "one world of 2"),
        ([1, 1], "warning", "[1, 1] instead of 2"),
        ([2], "warning", "[2] instead"),
    ],
)
def test_a_library_that_runs_as_worlds_of_one_is_found_out(sizes: list[int], state: str, word: str) -> None:
    lines = "".join(f'{{"rank": {rank}, "size": {size}}}\n' for rank, size in enumerate(sizes))
    found = accept.judge_world(Answer(0, out=f"a banner\n{lines}"), 2, "pmi2")
    assert found.state.value == state and word in found.found


def test_an_mpi_step_that_fails_or_hangs_is_a_warning() -> None:
    for step in (Answer(None), Answer(1, err="PMI2 init failed"), Answer(0, out="{oops\n"), Answer(0)):
        assert accept.judge_world(step, 2, "pmi2").state is State.WARNING


def test_it_is_refused_outside_a_job(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="inside a job"):
        accept.accept(tmp_path, {})


def test_a_heterogeneous_job_is_refused_with_what_to_submit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocation, "hostnames", lambda nodelist: [nodelist])
    env = {"SLURM_JOB_ID": "3", "SLURM_JOB_NODELIST": "a", "SLURM_HET_SIZE": "2"}
    for group, node in enumerate("ab"):
        env |= {
            f"SLURM_JOB_ID_HET_GROUP_{group}": str(3 + group),
            f"SLURM_JOB_NODELIST_HET_GROUP_{group}": node,
        }
        env[f"SLURM_JOB_CPUS_PER_NODE_HET_GROUP_{group}"] = "2"
    with pytest.raises(ConfigError, match="job 3 is heterogeneous") as refused:
        accept.accept(tmp_path, env)
    assert "-p PARTITION" in refused.value.fix and list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MissingInput, match="file/deep"):
        accept._made(tmp_path / "file" / "deep")


def test_a_report_survives_the_way_through_its_file(tmp_path: Path) -> None:
    report = Report("a", "10.0.0.1", {"b": Met(unseen="x")}, [ok("disk", "1")])
    (tmp_path / "report-a.json").write_bytes(msgspec.json.encode(report))
    assert read_reports(tmp_path) == {"a": report}


def test_what_nodes_differ_in_is_told_by_node_and_what_they_share_once() -> None:
    full = fault("disk", "0.5 GiB free", "free space")
    reports = {
        name: Report(
            name, "10.0.0.1", {}, [ok("python", "3.11"), full if name == "b" else ok("disk", "9 GiB")]
        )
        for name in NAMES
    }
    found = accept.judge_nodes(NAMES, reports, ENDED)
    assert [(each.node, each.name) for each in found if each.node] == [
        ("every node", "python"),
        ("a,c", "disk"),
        ("b", "disk"),
    ]
