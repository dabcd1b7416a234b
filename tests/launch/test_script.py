"""Rendered scripts, compared with tests/launch/snapshots (GYRE_SNAPSHOTS=write makes them anew), and what they refuse."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gyre_hpc.composition import compose
from gyre_hpc.config import RunConfig
from gyre_hpc.config_cluster import CellConfig, ClusterConfig
from gyre_hpc.config_job import JobConfig
from gyre_hpc.errors import ConfigError
from gyre_hpc.launch.job.profiles import site_overrides
from gyre_hpc.launch.job.request import request_for
from gyre_hpc.launch.job.script import Names, render
from gyre_hpc.launch.nodes.placement import Placement
from gyre_hpc.launch.plan import ProcessSpec
from gyre_hpc.launch.slurm import contained, srun_command

SNAPSHOTS = Path(__file__).parent / "snapshots"
SITE = Path(__file__).parents[2] / "slurm" / "sites" / "example.yaml"
RUN = Path("/scratch/runs/trial-20260101-120000")
NAMES = Names(
    "trial", RUN, RUN / "jobs/%j.log", RUN / "package", Path("/opt/gyre/bin/python"), Path("/home/me")
)
APPTAINER = ["apptainer", "exec", "--nv", "/images/gyre.sif"]
PYXIS = ["--container-image=/images/gyre.sqsh"]
CELL = ProcessSpec("cell-0", [sys.executable, "-m", "gyre_hpc.cells.leader"], mem="2G", gres="gpu:2")


def rendered(config: RunConfig, names: Names = NAMES) -> str:
    return render(request_for(config.cluster), config.cluster.job, names)


def agrees(name: str, text: str) -> None:
    path = SNAPSHOTS / name
    if os.environ.get("GYRE_SNAPSHOTS") == "write":
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} differs; if that is meant: GYRE_SNAPSHOTS=write"


def test_the_flat_script() -> None:
    agrees("flat.sbatch", rendered(compose(["cluster=devcluster"])))


def test_the_het_script() -> None:
    agrees("het.sbatch", rendered(compose(["cluster=devcluster", "cluster.layout=het"])))


def test_the_script_of_cells_with_devices_that_share_a_node() -> None:
    keys = ["cluster.cells=6", "cluster.cell.gres=gpu:2", "cluster.job.cells_per_node=4"]
    agrees("gres.sbatch", rendered(compose(["cluster=devcluster", *keys])))


@pytest.mark.parametrize("layout", ["flat", "het"])
def test_the_script_of_the_example_site(layout: str) -> None:
    keys = [
        *site_overrides(SITE),
        "cluster=slurm",
        f"cluster.layout={layout}",
        "cluster.job.exclude='n[3,7-9]'",
    ]
    agrees(f"site_{layout}.sbatch", rendered(compose(keys)))


def test_the_steps_of_contained_cells() -> None:
    placement = Placement(("n1",), 1, 2048, exact=True, group=1)
    lines = []
    for words, python in ((APPTAINER, "/opt/python"), (PYXIS, "")):
        cluster = ClusterConfig(container=words, container_python=python)
        command = srun_command("17", "cell-0.1", contained(CELL, cluster), placement, ["--label"])
        lines.append(" \\\n  ".join(word.replace(sys.executable, "PYTHON") for word in command))
    agrees("container.srun", "\n".join(lines) + "\n")


def test_only_cells_are_contained() -> None:
    service = ProcessSpec("runner-0", [sys.executable, "-m", "runner"], mem="2G", service=True)
    assert contained(service, ClusterConfig(container=APPTAINER)) == service


@pytest.mark.parametrize("path", sorted(SNAPSHOTS.glob("*.sbatch")), ids=lambda path: path.stem)
def test_every_script_is_a_bash_script_that_becomes_the_controller(path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True)
    assert path.read_text().splitlines()[-1].startswith("exec ")


def test_values_with_spaces_and_quotes_reach_the_controller_whole(tmp_path: Path) -> None:
    """The script is run with a stand-in for Python that tells what it was given."""
    python = tmp_path / "a python"
    python.write_text('#!/bin/bash\nprintf "%s|" "$@" "$SAID" "$PYTHONPATH" "$LEFT"\n')
    python.chmod(0o755)
    run = tmp_path / "runs of me" / "it's"
    names = Names("trial", run, run / "%j.log", run / "package", python, tmp_path)
    job = JobConfig(env={"SAID": """it's "$HOME" """}, setup=["LEFT=over"])
    job.setup.append("export LEFT")
    script = render(request_for(ClusterConfig(kind="slurm", job=job)), job, names)
    done = subprocess.run(
        ["bash", "-c", script], check=True, capture_output=True, text=True, env={"PATH": os.defpath}
    )
    assert done.stdout.split("|")[:-1] == [
        *("-u", "-m", "gyre_hpc.cli", "controller", f"resume={run}"),
        """it's "$HOME" """,
        f"{run}/package:{tmp_path}",
        "over",
    ]


def test_a_setup_line_that_fails_ends_the_job_before_the_controller(tmp_path: Path) -> None:
    job = JobConfig(setup=["false"])
    script = render(request_for(ClusterConfig(kind="slurm", job=job)), job, NAMES)
    assert subprocess.run(["bash", "-c", script], check=False).returncode == 1


@pytest.mark.parametrize(
    ("job", "named"),
    [
        (JobConfig(sbatch=["qos=long"]), "qos=long"),
        (JobConfig(env={"A B": "c"}), "A B"),
        (JobConfig(account="me\n#SBATCH --qos=mine"), "me"),
    ],
)
def test_what_a_script_cannot_carry_is_refused(job: JobConfig, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        render(request_for(ClusterConfig(kind="slurm", job=job)), job, NAMES)


def test_a_path_that_slurm_would_expand_is_refused() -> None:
    run = Path("/scratch/100%job")
    with pytest.raises(ConfigError, match="100%job"):
        rendered(
            RunConfig(cluster=ClusterConfig(kind="slurm", cell=CellConfig())),
            Names("trial", run, run / "%j.log", run / "package", Path("/p"), Path("/")),
        )


def test_the_overrides_that_the_page_on_slurm_shows_compose() -> None:
    text = (SITE.parents[2] / "docs" / "slurm.md").read_text()
    shown = re.findall(r'"(cluster\.\w+=.*?)"', text)
    assert [compose([words]).cluster.container[0] for words in shown] == [
        "apptainer",
        "--container-image=/scratch/gyre.sqsh",
    ]
