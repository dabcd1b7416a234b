"""Two jobs for one run: gateway and runner in one, the rest in another that starts no earlier."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gyre_hpc.cli import main
from gyre_hpc.config import RunConfig
from gyre_hpc.config_checks import validate
from gyre_hpc.config_cluster import ClusterConfig
from gyre_hpc.errors import ConfigError
from gyre_hpc.launch.elsewhere.service_job import request_for_services
from gyre_hpc.launch.job.request import request_for

RUN = ["experiment=quickstart", "cluster=slurm_external", "trust_tasks=true"]


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an sbatch that keeps each script and numbers jobs from 1, and a squeue that says what `state` holds."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    submit = f'n=$(ls {folder}/script.* 2>/dev/null | wc -l); n=$((n+1)); cp "$1" {folder}/script.$n'
    programs = {
        "srun": "",
        "sacct": "exit 1",
        "sbatch": f'{submit}; echo "Submitted batch job $n"',
        "squeue": f'for last; do :; done; echo "$last|$(cat {folder}/state)"',
    }
    for name, body in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def test_the_runs_job_waits_for_the_start_of_its_services(
    sbatch: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", *RUN, f"root={tmp_path / 'runs'}"]) == 0, capsys.readouterr()
    told = capsys.readouterr().out
    (run,) = (tmp_path / "runs").iterdir()
    services, own = (sbatch / "script.1").read_text(), (sbatch / "script.2").read_text()
    assert services.rstrip().endswith(f"-m gyre_hpc.cli services {run}")
    assert "--time=3-00:00:00" in services and "--nodes=1" in services and "--signal" not in services
    assert "--dependency=after:1" in own and f"controller resume={run}" in own
    assert (run / "services" / "job").read_text() == "1" and "job     2" in told
    assert "gateway, runner" in told and "controller, processor; 3 cells" in told
    for state, jobs in (("RUNNING", 3), ("FAILED", 5)):
        (sbatch / "state").write_text(state)
        assert main(["submit", f"resume={run}"]) == 0
        assert len(list(sbatch.glob("script.*"))) == jobs
    assert "--dependency=after:4" in (sbatch / "script.5").read_text()


def test_the_room_of_both_lies_in_their_own_job_alone() -> None:
    cluster = ClusterConfig(kind="slurm", cells=1)
    cluster.service.runner.cpus, cluster.service.runner.mem = 6, "12G"
    together = request_for(cluster).components[0]
    cluster.runners = "external"
    apart, services = request_for(cluster).components[0], request_for_services(cluster).components[0]
    assert together.cpus - apart.cpus == services.cpus == 7
    assert together.mem_mb - apart.mem_mb == 13 * 1024 <= services.mem_mb


def test_services_that_would_end_before_the_runs_job_are_refused() -> None:
    run = RunConfig()
    run.model.path, run.cluster.runners = "x", "external"
    validate(run)
    run.cluster.job.service_time = run.cluster.job.time
    with pytest.raises(ConfigError, match="service_time"):
        validate(run)
