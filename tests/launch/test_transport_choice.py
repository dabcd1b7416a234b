"""transport=auto takes what the acceptance job measured, says so, and means the same to every process of the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre_hpc.config import ModelConfig, RunConfig, TransportConfig, load_run_config, save_run_config
from gyre_hpc.errors import ConfigError
from gyre_hpc.launch.doctor.site import FILE_NAME, site_of, write_site
from gyre_hpc.launch.doctor.transport_choice import check_transport, choose_transport
from gyre_hpc.layout import RunLayout
from gyre_hpc.transport import nixl_agent


def new_run(root: Path, kind: str = "auto") -> tuple[RunConfig, RunLayout]:
    config = RunConfig(model=ModelConfig(path="unused"), transport=TransportConfig(kind=kind))
    layout = RunLayout(root / "run-1")
    layout.root.mkdir()
    save_run_config(config, layout.root)
    return config, layout


@pytest.mark.parametrize("kind", ["sockets", "mpi", "nixl"])
def test_auto_is_what_the_site_passed_for_all_processes_and_resumes(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_agent, "installed", lambda: True)
    site = write_site(site_of([], kind), tmp_path)
    config, layout = new_run(tmp_path)
    said = choose_transport(config, layout)
    assert said.startswith(f"transport: {kind} (auto: {site}") and config.transport.kind == kind
    write_site(site_of([], "sockets"), tmp_path)
    resumed = load_run_config(layout.root)
    assert resumed.transport.kind == kind
    assert choose_transport(resumed, layout) == f"transport: {kind} (chosen by auto)"


def test_a_site_nobody_looked_at_means_tcp_and_the_command_that_finds_more(tmp_path: Path) -> None:
    config, layout = new_run(tmp_path)
    said = choose_transport(config, layout)
    assert said.startswith("transport: sockets") and "sbatch -N2 slurm/accept.sbatch" in said
    assert str(tmp_path) in said and "\n" not in said
    assert load_run_config(layout.root).transport.kind == "sockets"


def test_a_broken_site_file_is_named_and_tcp_taken(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text("{")
    config, layout = new_run(tmp_path)
    said = choose_transport(config, layout)
    assert said.startswith("transport: sockets") and str(tmp_path / FILE_NAME) in said


def test_what_is_not_installed_is_not_taken_by_auto_and_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_agent, "installed", lambda: False)
    write_site(site_of([], "nixl"), tmp_path)
    config, layout = new_run(tmp_path)
    check_transport(config)
    said = choose_transport(config, layout)
    assert said.startswith("transport: sockets") and "pip install" in said
    with pytest.raises(ConfigError, match=r"transport\.kind=nixl.*\n.*pip install"):
        check_transport(RunConfig(transport=TransportConfig(kind="nixl")))


def test_what_was_asked_for_by_name_is_taken_whatever_the_site_says(tmp_path: Path) -> None:
    write_site(site_of([], "nixl"), tmp_path)
    config, layout = new_run(tmp_path, "sockets")
    assert choose_transport(config, layout) == "transport: sockets"
    assert load_run_config(layout.root).transport.kind == "sockets" and not layout.transport.exists()
