"""What Slurm's own words are taken for: recorded answers of a real Slurm 22.05, and fake sites made of them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from gyre_hpc.launch.doctor import ask as doctor_ask
from gyre_hpc.launch.doctor import slurm
from gyre_hpc.launch.doctor.ask import Answer
from gyre_hpc.launch.doctor.probes import Mpi
from gyre_hpc.launch.doctor.site import Finding, State

RECORDED = Path(__file__).parent / "data" / "slurm_22_05"
MPICH, OPEN_MPI = Mpi("MPICH Version: 5.0.2"), Mpi("Open MPI v5.0.11, package: Open MPI")


def recorded(name: str) -> str:
    return (RECORDED / f"{name}.txt").read_text()


def fake_settings(**changed: str) -> dict[str, str]:
    return slurm.settings_of(recorded("scontrol_show_config")) | changed


def partitions(
    sinfo: str = recorded("sinfo"), scontrol: str = recorded("scontrol_show_partition")
) -> list[Finding]:
    return slurm.judge_partitions(slurm.partitions_of(sinfo, scontrol))


def states(*findings: Finding) -> list[str]:
    assert all(finding.fix for finding in findings if finding.state is not State.OK)
    return [finding.state.value for finding in findings]


def test_the_recorded_site_is_all_right_but_for_what_it_does_without() -> None:
    settings = fake_settings()
    found = {judge(settings).name: judge(settings) for judge in slurm.SETTINGS}
    assert {name: finding.state.value for name, finding in found.items()} == {
        "slurm": "ok",
        "requeue": "ok",
        "preemption": "ok",
        "process tracking": "warning",
        "heterogeneous jobs": "ok",
    }
    assert found["slurm"].found == "22.05.8, cluster gyre"
    assert "exit codes that requeue: 75" in found["requeue"].found
    assert "preempt/partition_prio, PreemptMode=REQUEUE" in found["preemption"].found


def test_partitions_are_told_with_nodes_limit_and_preemption() -> None:
    debug, preempt = partitions()
    assert states(debug, preempt) == ["ok", "ok"]
    assert debug.found == "4 nodes x 8 CPUs, 4096 MiB, gpu:4; limit infinite (default)"
    assert preempt.found.endswith("; PreemptMode=REQUEUE, GraceTime=5 s")


def test_a_partition_of_two_kinds_of_nodes_is_one_finding() -> None:
    (found,) = partitions("gpu|up|1-00:00:00|2|64|500000|gpu:8\ngpu|up|1-00:00:00|3|32|250000|(null)\n", "")
    assert (
        found.found == "2 nodes x 64 CPUs, 500000 MiB, gpu:8; 3 nodes x 32 CPUs, 250000 MiB; limit 1-00:00:00"
    )


def test_a_partition_that_cancels_what_it_preempts_or_is_down_is_a_warning() -> None:
    fake = recorded("scontrol_show_partition").replace("PreemptMode=REQUEUE", "PreemptMode=CANCEL")
    assert states(*partitions(scontrol=fake)) == ["ok", "warning"]
    assert states(*partitions(recorded("sinfo").replace("preempt|up", "preempt|down"))) == ["ok", "warning"]


@pytest.mark.parametrize(
    "rows", [recorded("sinfo").replace("|up|", "|down|"), "", "Welcome to the cluster\n"]
)
def test_no_partition_that_is_up_is_a_fault(rows: str) -> None:
    assert states(*partitions(rows)) == ["fault"]


@pytest.mark.parametrize(
    ("judge", "changed", "state", "word"),
    [
        (slurm.judge_version, {"SLURM_VERSION": "20.02.6"}, "fault", "20.02.6"),
        (slurm.judge_version, {"SLURM_VERSION": "24.11.0-rc1"}, "ok", "24.11.0"),
        (slurm.judge_requeue, {"JobRequeue": "0"}, "warning", "JobRequeue=0"),
        (slurm.judge_requeue, {"RequeueExit": ""}, "ok", "none"),
        (slurm.judge_preemption, {"PreemptType": "preempt/none"}, "ok", "none"),
        (slurm.judge_tracking, {"ProctrackType": "proctrack/cgroup"}, "ok", "cgroup"),
        (slurm.judge_het, {"SchedulerType": "sched/builtin"}, "warning", "sched/builtin"),
        (slurm.judge_het, {"SchedulerParameters": "a=1,disable_hetjob_steps"}, "ok", "disable_hetjob_steps"),
    ],
)
def test_settings_of_fake_sites(judge, changed: dict[str, str], state: str, word: str) -> None:  # type: ignore[no-untyped-def]
    finding = judge(fake_settings(**changed))
    assert states(finding) == [state] and word in finding.found


def test_accounting_is_missing_present_or_broken() -> None:
    refused = Answer(1, err=recorded("sacct_stderr"))
    none = slurm.judge_accounting(fake_settings(), refused)
    assert states(none) == ["warning"] and "600 sec" in none.found
    dbd = fake_settings(AccountingStorageType="accounting_storage/slurmdbd")
    assert states(slurm.judge_accounting(dbd, Answer(0))) == ["ok"]
    broken = slurm.judge_accounting(dbd, Answer(1, err="Connection refused"))
    assert states(broken) == ["warning"] and "Connection refused" in broken.found


def test_commands_of_slurm_that_are_missing_are_a_fault_and_no_slurm_is_none() -> None:
    assert states(slurm.judge_commands(slurm.NEEDED)) == ["ok"]
    partly = slurm.judge_commands(["sbatch", "squeue"])
    assert states(partly) == ["fault"] and "no srun, scancel, scontrol, sinfo" in partly.found
    assert states(slurm.judge_commands([])) == ["warning"]


def test_an_mpi_library_fits_a_plugin_of_srun_or_is_named() -> None:
    listed = Answer(0, recorded("srun_mpi_list"))
    assert slurm.plugins_of(listed) == ["pmix", "none", "cray_shasta", "pmi2"]
    for library, plugin in (
        (MPICH, "pmi2"),
        (OPEN_MPI, "pmix"),
        (Mpi("MPI VERSION : CRAY MPICH 8.1"), "cray_shasta"),
    ):
        plugins, fits = slurm.judge_mpi(listed, library)
        assert states(plugins, fits) == ["ok", "ok"] and fits.found.endswith(f"srun --mpi={plugin}")
    fake = Answer(0, err="srun: MPI types are...\nsrun: none\nsrun: pmi2\n")
    assert slurm.plugins_of(fake) == ["none", "pmi2"]
    assert states(*slurm.judge_mpi(fake, OPEN_MPI)) == ["ok", "warning"]
    assert states(*slurm.judge_mpi(fake, Mpi("HomeMade MPI"))) == ["ok", "warning"]
    assert states(*slurm.judge_mpi(fake, "mpi4py is not installed")) == ["ok", "ok"]
    assert states(*slurm.judge_mpi(Answer(1, err="fatal"), "mpi4py is not installed")) == ["warning", "ok"]


def fake_commands(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    """Programs of these names first on PATH."""
    for name, script in scripts.items():
        path = folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_a_controller_that_does_not_answer_is_one_finding_within_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_commands(tmp_path, monkeypatch, scontrol="echo trying; sleep 600 & wait")
    monkeypatch.setattr(doctor_ask, "ASK_S", 2.0)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    (finding,) = slurm.check_slurm()
    assert states(finding) == ["warning"] and "runs are local" in finding.fix
    assert "no cluster answers them: trying (killed at its deadline without an answer)" in finding.found


def test_a_controller_that_refuses_is_told_in_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_commands(tmp_path, monkeypatch, scontrol="echo 'slurm_load_ctl_conf error: no route' >&2; exit 1")
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # inside a job there is a cluster for sure
    (finding,) = slurm.check_slurm()
    assert states(finding) == ["fault"] and "slurm_load_ctl_conf error: no route" in finding.found


def test_a_controller_lost_between_two_questions_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RECORDED / "scontrol_show_config.txt"
    lost = "echo 'Unable to contact slurm controller' >&2; exit 1"
    fake_commands(tmp_path, monkeypatch, scontrol=f"cat {config}", sinfo=lost, sacct=lost, srun=lost)
    monkeypatch.setattr(slurm, "mpi_library", lambda: MPICH)
    found = {finding.name: finding for finding in slurm.check_slurm()}
    assert states(found["partitions"], found["mpi plugins"], found["mpi library"]) == [
        "fault",
        "warning",
        "warning",
    ]
    assert "Unable to contact" in found["partitions"].found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_command_is_killed_with_what_it_started(tmp_path: Path) -> None:
    script = f"sleep 600 & echo $! > {tmp_path}/pid; wait"
    assert doctor_ask.ask("sh", "-c", script, deadline_s=2.0).code is None
    patience = time.monotonic() + 30
    while alive(int((tmp_path / "pid").read_text())):
        assert time.monotonic() < patience
        time.sleep(0.01)


def test_what_escapes_being_killed_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_ask, "LAST_WORDS_S", 0.1)
    script = f"setsid sleep 600 & echo $! > {tmp_path}/pid; wait"
    assert doctor_ask.ask("sh", "-c", script, deadline_s=2.0).code is None
    escaped = int((tmp_path / "pid").read_text())
    assert alive(escaped)
    os.kill(escaped, signal.SIGKILL)


def test_a_missing_program_is_an_answer() -> None:
    missing = doctor_ask.ask("no-such-program-of-slurm")
    assert missing.missing and not missing.good and "No such file" in missing.why
