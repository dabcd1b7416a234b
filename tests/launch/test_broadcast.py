"""Steps from the node's own disk: what is packed, how it gets there, and which steps run from it."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre_hpc.config_cluster import ClusterConfig
from gyre_hpc.errors import ConfigError, StorageFull
from gyre_hpc.launch.job import broadcast, unpack
from gyre_hpc.launch.job.allocation import Allocation
from gyre_hpc.launch.job.broadcast import Part, pack, parts, sbcast_command
from gyre_hpc.launch.job.node_copy import NodeCopy, read_outcomes
from gyre_hpc.launch.nodes import scratch
from gyre_hpc.launch.nodes.placement import Node
from gyre_hpc.launch.plan import ProcessSpec
from gyre_hpc.launch.slurm import SlurmLauncher
from gyre_hpc.layout import RunLayout
from tests.launch.cluster import PATIENCE_S, running_cluster, squeue

SLURM = ClusterConfig(kind="slurm")
PYTHON, PACKAGE = Path("/tmp/gyre-7/environment-1/bin/python"), Path("/tmp/gyre-7/package-1")
COPY = NodeCopy(frozenset({"n0", "n1"}), PACKAGE, Path("/runs/r/package"), PYTHON)
CELL = ProcessSpec("cell-0", [sys.executable, "-m", "gyre_hpc.cells.leader", "--run", "/runs/r"], {"A": "1"})


def test_a_step_whose_nodes_all_have_the_copy_runs_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/runs/r/package:/home/me:/opt/tools")
    copied = COPY.applied(CELL, ("n0", "n1"), SLURM)
    assert copied.argv == [str(PYTHON), "-m", "gyre_hpc.cells.leader", "--run", "/runs/r"]
    assert copied.env == {"A": "1", "PYTHONPATH": f"{PACKAGE}:/home/me:/opt/tools"}
    assert COPY.applied(CELL, ("n0", "n2"), SLURM) == CELL


def test_with_the_package_alone_the_python_stays() -> None:
    copied = NodeCopy(frozenset({"n0"}), PACKAGE, Path("/runs/r/package")).applied(CELL, ("n0",), SLURM)
    assert copied.argv == CELL.argv and copied.env["PYTHONPATH"].split(":")[0] == str(PACKAGE)


def test_a_cell_in_a_container_keeps_what_the_container_has_and_a_service_does_not() -> None:
    boxed = ClusterConfig(
        kind="slurm", container=["apptainer", "exec", "x.sif"], container_python="/opt/python"
    )
    service = ProcessSpec("runner-0", CELL.argv, service=True)
    assert COPY.applied(CELL, ("n0",), boxed) == CELL
    assert COPY.applied(service, ("n0",), boxed).argv[0] == str(PYTHON)


def test_what_nodes_say_is_read_and_a_fault_counts_more_than_a_success() -> None:
    said = "srun: warning: x\nunpacked n0 ok\nunpacked n1 /tmp/x: No space left on device\nunpacked n1 ok\nunpacked\n"
    assert read_outcomes(said) == {"n0": "", "n1": "/tmp/x: No space left on device"}


def test_each_component_is_sent_to_by_its_own_id() -> None:
    command = sbcast_command("12", Path("/runs/r/broadcast/a.tar"), Path("/tmp/a.tar"))
    assert command == ["sbcast", "--jobid=12", "--force", "/runs/r/broadcast/a.tar", "/tmp/a.tar"]


@pytest.fixture
def source(tmp_path: Path) -> Part:
    (tmp_path / "source" / "a").mkdir(parents=True)
    (tmp_path / "source" / "a" / "module.py").write_text("x = 1")
    return Part("package", tmp_path / "source", "a")


def test_what_has_not_changed_is_packed_once_and_what_has_replaces_it(source: Part, tmp_path: Path) -> None:
    folder = tmp_path / "broadcast"
    first = pack(source, folder)
    written = first.stat().st_mtime_ns
    (source.source / "a" / "__pycache__").mkdir()
    (source.source / "a" / "__pycache__" / "module.pyc").write_text("compiled since")
    assert pack(source, folder) == first and first.stat().st_mtime_ns == written
    (source.source / "a" / "module.py").write_text("x = 22")
    second = pack(source, folder)
    assert second != first and list(folder.iterdir()) == [second]


def test_packing_that_fails_leaves_nothing_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = Part("package", tmp_path, "absent")
    monkeypatch.setattr(broadcast, "digest", lambda part: "0")
    with pytest.raises(StorageFull, match="absent"):
        pack(part, tmp_path / "broadcast")
    assert list((tmp_path / "broadcast").iterdir()) == []


def test_a_python_in_no_environment_of_its_own_is_refused_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    assert [part.name for part in parts("package")] == ["package"]
    with pytest.raises(
        ConfigError, match=r"no virtual or conda environment[\s\S]*cluster\.broadcast=package"
    ):
        parts("environment")


def unpacked(source: Part, tmp_path: Path, sent: Path) -> Path:
    home = tmp_path / "node"
    home.mkdir(exist_ok=True)
    target = home / "package-1"
    assert unpack.unpack(pack(source, tmp_path / "broadcast"), sent, target) == ""
    assert (target / "a" / "module.py").read_text() == "x = 1" and not sent.exists()
    assert [file.name for file in home.iterdir()] == ["package-1"]
    return target


def test_a_file_that_arrived_whole_is_unpacked_without_the_one_in_the_run_folder(
    source: Part, tmp_path: Path
) -> None:
    archive, sent = pack(source, tmp_path / "broadcast"), tmp_path / "sent.tar"
    sent.write_bytes(archive.read_bytes())
    archive.write_bytes(bytes(archive.stat().st_size))
    unpacked(source, tmp_path, sent)


@pytest.mark.parametrize("arrived", [None, b"half"])
def test_what_did_not_arrive_whole_is_read_from_the_run_folder(
    source: Part, tmp_path: Path, arrived: bytes | None
) -> None:
    sent = tmp_path / "sent.tar"
    if arrived is not None:
        sent.write_bytes(arrived)
    target = unpacked(source, tmp_path, sent)
    (target / "a" / "module.py").write_text("y = 1")
    assert unpack.unpack(tmp_path / "gone", sent, target) == ""  # it is there: left as it is


def test_a_node_that_cannot_unpack_says_why_and_ends_well(
    source: Part, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n3")
    broken = tmp_path / "broken.tar"
    broken.write_text("no tar")
    (tmp_path / "node").mkdir()
    for archive, home in (
        (broken, tmp_path / "node"),
        (pack(source, tmp_path / "broadcast"), tmp_path / "none"),
    ):
        assert unpack.main([str(archive), str(tmp_path / "sent"), str(home / "package-1")]) == 0
        assert capsys.readouterr().out.startswith(f"unpacked n3 {home}")
    assert list((tmp_path / "node").iterdir()) == []


def small_environment(folder: Path) -> Path:
    """A virtual environment with one module of its own; its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "only_here.py").write_text("")
    return folder / "bin" / "python"


SHOW = r"""
import sys, only_here, gyre_hpc
sys.stdout.write(f"from {sys.prefix} {only_here.__file__} {gyre_hpc.__file__}\n")  # one write: two tasks share the log
"""


def test_a_copied_environment_works_without_the_old_one(tmp_path: Path) -> None:
    small_environment(tmp_path / "old")
    archive = pack(Part("environment", tmp_path / "old"), tmp_path / "broadcast")
    (tmp_path / "node").mkdir()
    target = tmp_path / "node" / "environment-1"
    assert unpack.unpack(archive, tmp_path / "none", target) == ""
    (tmp_path / "old").rename(tmp_path / "away")
    said = subprocess.check_output([target / "bin" / "python", "-c", SHOW], text=True, env=os.environ)
    assert said.split()[1] == str(target) and said.split()[2].startswith(str(target))


NODES = (Node("n0", 2, 2048), Node("n1", 2, 2048), Node("n2", 2, 2048))


async def test_nodes_without_their_copy_are_named_and_the_others_use_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Stand-ins for Slurm's commands: sbcast refuses, one node has no room, another says nothing. Not a Slurm."""
    said = "unpacked n0 ok\\nunpacked n1 /tmp/x: No space left on device\\n"
    bodies = {"srun": f"printf '{said}'", "sbcast": "exit 1", "squeue": "exit 1", "sinfo": "exit 1"}
    for name, body in bodies.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    cluster = ClusterConfig(kind="slurm", cells=1, broadcast="package")
    launcher = SlurmLauncher(Allocation(("7",), NODES), cluster)
    (tmp_path / "run").mkdir()
    with caplog.at_level(logging.INFO):
        await broadcast.broadcast(launcher, cluster, RunLayout(tmp_path / "run"))
    assert launcher.copy is not None and launcher.copy.nodes == {"n0"}
    assert "sbcast to job 7 exited with 1" in caplog.text and "to 1 of 3 nodes" in caplog.text
    assert "steps on n1 run from shared folders: /tmp/x: No space left" in caplog.text
    assert "steps on n2 run from shared folders: it did not say" in caplog.text


async def test_a_broadcast_that_fails_whole_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = ClusterConfig(kind="slurm", cells=1, broadcast="environment")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    launcher = SlurmLauncher.__new__(SlurmLauncher)
    launcher.copy = None
    await broadcast.broadcast(launcher, cluster, RunLayout(tmp_path))
    assert launcher.copy is None and "all steps run from shared folders" in caplog.text


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with running_cluster("broadcast", nodes=2, cpus=4, gpus=0, port=18240):
        yield


@pytest.mark.slurm
@pytest.mark.root
async def test_steps_run_from_the_copy_that_sbcast_sent(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small environment stands in for that of the run."""
    command = ["sbatch", "--parsable", "-N2", "--exclusive", "--mem=2048", "--no-kill", "-o", "/dev/null"]
    job = subprocess.check_output([*command, "--wrap=sleep 600"], text=True).strip()
    async with asyncio.timeout(PATIENCE_S):
        while (nodes := squeue(job, "%t %N")).split()[:1] != ["R"]:
            await asyncio.sleep(0.1)
    python = small_environment(tmp_path / "environment")
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "environment"))
    monkeypatch.setenv("PYTHONPATH", str(broadcast.PACKAGE_ROOT))
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # as the job script does: the working folder is this checkout
    env = {"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": nodes.split()[1], "SLURM_JOB_CPUS_PER_NODE": "4(x2)"}
    monkeypatch.setenv("SLURM_JOB_ID", job)
    (base := tmp_path / "node").mkdir()
    config = ClusterConfig(kind="slurm", cells=1, broadcast="environment", scratch=str(base))
    layout = RunLayout(tmp_path / "run")
    layout.root.mkdir()
    launcher = SlurmLauncher.from_environment(config, layout, env | {"SLURM_MEM_PER_NODE": "2048"})
    await broadcast.broadcast(launcher, config, layout)
    said = (layout.broadcast / "log").read_text()
    assert launcher.copy is not None and len(launcher.copy.nodes) == 2, said
    assert (layout.broadcast / "sbcast.log").read_text() == ""
    spec = ProcessSpec(
        "cell-0", [str(python), "-c", SHOW], nodes=2, ranks=2, mem="256M", log=tmp_path / "step.log"
    )
    step = await launcher.start(spec)
    async with asyncio.timeout(PATIENCE_S):
        assert await step.wait() == 0, spec.log.read_text()
    lines = [line for line in spec.log.read_text().splitlines() if line.startswith("from ")]
    home = scratch.job_folder(config.scratch, layout)
    assert len(lines) == 2 and all(path.startswith(str(home)) for line in lines for path in line.split()[1:])
    assert sorted(path.name.partition("-")[0] for path in home.iterdir()) == ["environment", "package"]
    subprocess.run(["scancel", job], check=True)
