"""What this machine is found to be, and what a fake machine would be told."""

from __future__ import annotations

import resource
from pathlib import Path

import msgspec
import pytest

from gyre_hpc.launch.doctor import machine, probes
from gyre_hpc.launch.doctor.ask import Answer, probe
from gyre_hpc.launch.doctor.machine import GIB
from gyre_hpc.launch.doctor.site import Finding, State

WORKS = {"fsync": "", "rename": "", "lock": "", "hdf5": ""}
MOUNTS = """\
21 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 21 0:30 / /scratch rw shared:1 master:2 - lustre 10.0.0.1@o2ib:/scratch rw
31 30 0:31 / /scratch/my\\040home rw - nfs4 home:/ rw
32 21 0:32 / /scratchy rw - tmpfs tmpfs rw
"""


def states(*findings: Finding) -> list[str]:
    assert all(finding.fix for finding in findings if finding.state is not State.OK)
    return [finding.state.value for finding in findings]


def storage(kind: str = "lustre", free: int = 100 * GIB, **steps: str) -> probes.Storage:
    return probes.Storage("/scratch", kind, free, WORKS | steps)


def judged(fake: probes.Storage | str, *, several_nodes: bool = True) -> list[str]:
    return states(*machine.judge_storage(Path("/scratch/runs"), fake, several_nodes))


def test_the_file_system_of_a_folder_is_that_of_the_nearest_mount_above_it() -> None:
    kinds = {"/scratch/runs": "lustre", "/scratch": "lustre", "/scratchy/x": "tmpfs", "/home": "ext4"}
    assert {path: probes.file_system(Path(path), MOUNTS) for path in kinds} == kinds
    assert probes.file_system(Path("/scratch/my home/runs"), MOUNTS) == "nfs4"
    assert probes.file_system(Path("/x"), "") == "unknown"
    above = MOUNTS + "40 21 0:40 / /scratch rw - beegfs b rw\n"
    assert probes.file_system(Path("/scratch/x"), above) == "beegfs", "mounted over the other"


def test_a_folder_that_does_not_exist_yet_is_tried_where_it_would_be_made_and_nothing_is_left(
    tmp_path: Path,
) -> None:
    found = machine.answered(probe("storage", str(tmp_path / "deep" / "runs")), probes.Storage)
    assert isinstance(found, probes.Storage), found
    assert found.folder == str(tmp_path.resolve()) and found.steps == WORKS and found.free > 0
    assert list(tmp_path.iterdir()) == []


def test_a_run_root_may_be_shared_or_not_where_runs_have_one_node() -> None:
    assert judged(storage()) == ["ok", "ok", "ok"]
    assert judged(storage("ext4")) == ["warning", "ok", "ok"]
    assert judged(storage("fuse.new")) == ["warning", "ok", "ok"]
    assert judged(storage("ext4"), several_nodes=False) == ["ok", "ok", "ok"]


def test_a_run_root_that_is_full_or_cannot_be_used_is_a_fault() -> None:
    assert judged(storage(free=2 * GIB)) == ["ok", "warning", "ok"]
    assert judged(storage(free=GIB - 1)) == ["ok", "fault", "ok"]
    assert judged(storage(lock="Function not implemented")) == ["ok", "ok", "warning"]
    assert judged(storage(rename="Operation not permitted")) == ["ok", "ok", "fault"]
    assert judged(storage(hdf5="unable to lock file", lock="No locks available")) == ["ok", "ok", "fault"]
    assert judged(msgspec.structs.replace(storage(), steps={"write": "Read-only file system"})) == [
        "ok",
        "ok",
        "fault",
    ]
    assert judged("killed at its deadline") == ["fault"]


def test_packages_are_compared_with_the_requirements_of_this_gyre() -> None:
    wanted = ["numpy>=1.26", "torch>=2.6", "mpi4py>=4.0; extra == 'mpi'"]
    have = {"numpy": "2.1.0", "torch": "2.7.0+cpu"}
    assert states(machine.judge_packages(wanted, lambda name: have.get(name, ""))) == ["ok"]
    old = machine.judge_packages(wanted, lambda name: {"numpy": "1.20"}.get(name, ""))
    assert states(old) == ["fault"]
    assert "numpy>=1.26 (found 1.20)" in old.found and "torch>=2.6 (found none)" in old.found
    assert states(machine.judge_packages(["anything"], lambda name: "")) == ["fault"]
    assert states(*machine.check_python()) == ["ok", "ok"]
    assert states(machine.judge_python((3, 10, 4), "/usr/bin/python3")) == ["fault"]


def test_torch_is_told_with_its_devices() -> None:
    cpu = machine.judge_torch(probes.Torch("2.7.0+cpu", "", [], False))
    assert states(cpu) == ["ok"] and "cells compute on CPUs" in cpu.found
    gpus = machine.judge_torch(probes.Torch("2.7.0", "CUDA 12.8", ["H200", "H200"], True))
    assert states(gpus) == ["ok"] and "2 x H200" in gpus.found
    assert states(machine.judge_torch(probes.Torch("2.7.0+cpu", "", [], True))) == ["warning"]
    assert states(machine.judge_torch(probes.Torch("2.7.0", "CUDA 12.8", [], True))) == ["warning"]
    broken = machine.judge_torch("ImportError: libcudart.so.12 (exit code 1)")
    assert states(broken) == ["fault"] and "libcudart" in broken.found


def test_a_sandbox_that_is_forbidden_is_a_warning_with_the_command_that_allows_it() -> None:
    assert states(machine.judge_sandbox(probes.Sandbox("", "sysctl x=1"))) == ["ok"]
    forbidden = machine.judge_sandbox(probes.Sandbox("Operation not permitted", "sysctl x=1"))
    assert (
        states(forbidden) == ["warning"]
        and "sysctl x=1" in forbidden.fix
        and "trust_tasks=true" in forbidden.fix
    )
    assert states(machine.judge_sandbox("killed at its deadline")) == ["warning"]


def test_open_files() -> None:
    endless = resource.RLIM_INFINITY
    assert states(machine.judge_files(endless, endless), machine.judge_files(4096, 4096)) == ["ok", "ok"]
    for hard in (4096, endless):
        assert "ulimit -n 4096" in machine.judge_files(1024, hard).fix
    assert "hard limit" in machine.judge_files(1024, 1024).fix


def test_shared_memory() -> None:
    assert states(machine.judge_shm((8 * GIB, 4 * GIB)), *machine.check_shm())[0] == "ok"
    assert states(machine.judge_shm((64 << 20, 64 << 20)), machine.judge_shm(None)) == ["warning", "warning"]


def test_what_a_job_left_in_the_environment_is_named_but_for_the_configuration() -> None:
    assert states(machine.judge_environment({"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf"})) == ["ok"]
    left = machine.judge_environment(
        {"SBATCH_QOS": "x", "SLURM_NTASKS": "9", "PMIX_RANK": "0", "SLURM_CONF": "y"}
    )
    assert states(left) == ["warning"]
    assert left.fix.endswith("unset PMIX_RANK SBATCH_QOS SLURM_NTASKS")
    assert states(machine.judge_environment({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "9"})) == ["ok"]


@pytest.mark.parametrize(
    "answer", [Answer(None), Answer(-11, err="Segmentation fault"), Answer(0, out="hello\n"), Answer(0)]
)
def test_a_probe_that_dies_hangs_or_babbles_is_an_answer(answer: Answer) -> None:
    assert isinstance(machine.answered(answer, probes.Torch), str)


def test_a_probe_that_fails_tells_its_last_line() -> None:
    why = machine.answered(probe("no-such-probe"), probes.Torch)
    assert isinstance(why, str) and "KeyError: 'no-such-probe'" in why


def test_container_programs_are_told_with_their_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (none,) = machine.check_containers()
    assert "cells run on the host" in none.found
    (tmp_path / "apptainer").write_text("#!/bin/sh\necho apptainer version 1.3.4\n")
    (tmp_path / "enroot").write_text("#!/bin/sh\nexit 3\n")
    for name in ("apptainer", "enroot"):
        (tmp_path / name).chmod(0o755)
    (found,) = machine.check_containers()
    assert found.found == "apptainer 1.3.4; enroot: exit code 3"
