"""A command on every node of the job, with a stand-in for srun that tells how it was called. Not a Slurm."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from gyre_hpc.config_cluster import ClusterConfig
from gyre_hpc.launch import slurm
from gyre_hpc.launch.job.allocation import Allocation
from gyre_hpc.launch.nodes.placement import Node
from gyre_hpc.launch.slurm import SlurmLauncher

NODES = (Node("s0", 2, 2048, 0), Node("c0", 4, 4096, 1), Node("c1", 4, 4096, 1))


def stand_in(folder: Path, patch: pytest.MonkeyPatch, body: str) -> None:
    for name, words in (("srun", body), ("squeue", "exit 1"), ("sinfo", "exit 1")):
        program = folder / name
        program.write_text(f"#!/bin/bash\n{words}\n")
        program.chmod(0o755)
    patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


async def everywhere(log: Path) -> None:
    launcher = SlurmLauncher(Allocation(("7", "8"), NODES), ClusterConfig(kind="slurm", cells=1))
    await launcher.everywhere(["python", "-m", "some.module", "--run", "/run"], log)


async def test_each_component_has_one_step_over_all_its_nodes_that_shares_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, 'echo "$SLURM_TMPDIR $*"')
    monkeypatch.setenv("SLURM_TMPDIR", "/local/7")
    await everywhere(tmp_path / "log")
    first, second = (tmp_path / "log").read_text().splitlines()
    for line, words in (
        (first, ["--het-group=0", "--nodelist=s0", "--ntasks=1"]),
        (second, ["--het-group=1", "--nodelist=c0,c1", "--nodes=2", "--ntasks=2"]),
    ):
        said = line.split()
        assert said[0] == "/local/7" and {"--jobid=7", "--overlap", *words} <= set(said)
        assert said[-5:] == ["python", "-m", "some.module", "--run", "/run"]


async def test_a_step_that_does_not_end_is_given_up_and_one_that_fails_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in(tmp_path, monkeypatch, 'case "$*" in *=s0*) exec sleep 600 ;; esac; exit 3')
    monkeypatch.setattr(slurm, "EVERYWHERE_S", 1.0)
    with caplog.at_level(logging.WARNING):
        await everywhere(tmp_path / "log")
    assert "some.module on s0: exited with -9" in caplog.text
    assert "some.module on c0,c1: exited with 3" in caplog.text
