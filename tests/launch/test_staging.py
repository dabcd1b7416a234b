"""What a job needs is looked for before it is queued, and everything missing is named at once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gyre_hpc import models
from gyre_hpc.composition import compose
from gyre_hpc.config import RunConfig
from gyre_hpc.errors import MissingInput
from gyre_hpc.launch.job import staging
from gyre_hpc.layout import RunLayout


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return compose(["experiment=quickstart", "cluster=devcluster", f"root={tmp_path}/deep/runs"])


def test_all_that_the_quickstart_needs_is_there_and_nothing_is_written(
    config: RunConfig, tmp_path: Path
) -> None:
    needs = staging.needs(config)
    assert [need.what for need in needs] == ["model", "harness", "tasks", "python", "run folder"]
    assert all(need.found for need in needs)
    staging.check_staged(config)
    assert list(tmp_path.iterdir()) == []


def test_everything_that_is_missing_is_named_with_what_to_do(config: RunConfig, tmp_path: Path) -> None:
    config.model.path = "/nowhere/policy"
    config.harness.command = ["no-such-agent"]
    config.cluster.container = ["no-such-container", "exec", f"{tmp_path}/image.sif"]
    with pytest.raises(MissingInput) as missing:
        staging.check_staged(config)
    for word in ("/nowhere/policy", "no-such-agent", "no-such-container", "image.sif"):
        assert word in missing.value.message
    assert "gyre warmstart" in missing.value.fix and "build or copy the image" in missing.value.fix


def test_demonstrations_are_needed_only_where_they_are_replayed(config: RunConfig, tmp_path: Path) -> None:
    model = tmp_path / "policy"
    model.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (model / name).touch()
    config.model.path = str(model)
    with pytest.raises(MissingInput, match="demonstrations"):
        staging.check_staged(config)
    config.objective.replay_weight = 0.0
    staging.check_staged(config)


def test_a_run_that_goes_on_needs_only_its_own_copy_of_the_model(config: RunConfig, tmp_path: Path) -> None:
    run = RunLayout(tmp_path / "run")
    shutil.copytree(models.resolve(config.model.path), run.model)
    config.model.path = "/nowhere/policy"
    staging.check_staged(config, run)
    (run.model / "tokenizer.json").unlink()
    with pytest.raises(MissingInput, match=r"lacks tokenizer\.json"):
        staging.check_staged(config, run)


def test_a_package_that_is_not_installed_is_named(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["msgspec>=0.19", "no-such-package>=1; python_version>'3'", "pytest; extra == 'test'"]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: wanted)
    with pytest.raises(MissingInput, match="no package no-such-package"):
        staging.check_staged(config)


def test_a_run_folder_that_cannot_be_made_is_named(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config.root = f"{tmp_path}/file/runs"
    with pytest.raises(MissingInput, match="file is not a folder"):
        staging.check_staged(config)


def test_an_image_that_pyxis_reads_from_disk_must_be_there(config: RunConfig, tmp_path: Path) -> None:
    config.cluster.container = [f"--container-image={tmp_path}/gyre.sqsh"]
    with pytest.raises(MissingInput, match=r"gyre\.sqsh"):
        staging.check_staged(config)
    (tmp_path / "gyre.sqsh").touch()
    staging.check_staged(config)


def test_harness_packages_are_installed_by_staging_and_else_named_before_the_job(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An npm of ours stands in for the registry: it makes the program that a package would bring."""
    npm = tmp_path / "bin" / "npm"
    npm.parent.mkdir()
    made = '"$3/node_modules/.bin"'
    npm.write_text(
        f"#!/bin/sh\nmkdir -p {made}; printf '#!/bin/sh\\n' >{made}/agent; chmod 755 {made}/agent\n"
    )
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{npm.parent}:/usr/bin:/bin")
    harness = config.harness
    harness.command, harness.packages, harness.prefix = (
        ["agent"],
        ["npm:agent@1.2.3"],
        str(tmp_path / "prefix"),
    )
    with pytest.raises(MissingInput, match=r"agent@1\.2\.3 are not installed") as missing:
        staging.check_staged(config)
    assert "gyre stage" in missing.value.fix
    (line,) = staging.fetch(config)
    assert line.startswith("installed npm:agent@1.2.3 in ") and staging.fetch(config) == []
    staging.check_staged(config)
