"""`gyre doctor` as a person meets it: findings in order, an exit code, one JSON object, and the last acceptance job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from gyre_hpc import cli, cli_doctor
from gyre_hpc.errors import CorruptRecord
from gyre_hpc.launch.doctor import checks as doctor
from gyre_hpc.launch.doctor.site import (
    Finding,
    Site,
    State,
    fault,
    ok,
    read_site,
    site_of,
    warning,
    write_site,
)

FINE, POOR = ok("disk", "72 GiB"), warning("sandbox", "forbidden", "sysctl x=1")
BROKEN = fault("network", "a to b: timed out", "open its ports")


def found(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> None:
    monkeypatch.setattr(doctor, "examine", lambda root, accepted: list(findings))


def test_only_a_fault_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found(monkeypatch, FINE, POOR)
    assert cli.main(["doctor"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["ok", "disk", "72", "GiB"],
        ["warning", "sandbox", "forbidden"],
        ["->", "sysctl", "x=1"],
    ]
    found(monkeypatch, FINE, BROKEN)
    assert cli.main(["doctor"]) == 1
    assert "1 faults: network" in capsys.readouterr().err


def test_json_is_the_site_on_stdout_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found(monkeypatch, POOR, BROKEN)
    assert cli.main(["doctor", "--json"]) == 1
    site = msgspec.json.decode(capsys.readouterr().out, type=Site)
    assert site.findings == [POOR, BROKEN] and site.transport == "sockets" and site.version == 1


def test_site_json_is_read_as_it_was_written_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    assert read_site(tmp_path) is None
    site = site_of([FINE, msgspec.structs.replace(BROKEN, node="cell1")])
    path = write_site(site, tmp_path)
    assert read_site(tmp_path) == site and [file.name for file in tmp_path.iterdir()] == ["site.json"]
    for damage in (b"{", b"\xff\xfe", path.read_bytes().replace(b'"version": 1', b'"version": 7')):
        path.write_bytes(damage)
        with pytest.raises(CorruptRecord, match=r"site\.json"):
            read_site(tmp_path)
        assert doctor.check_accepted(tmp_path, True)[0].state is State.FAULT


def test_the_last_acceptance_job_is_shown_with_its_troubles_alone(tmp_path: Path) -> None:
    (absent,) = doctor.check_accepted(tmp_path, True)
    assert absent.state is State.WARNING and "accept.sbatch" in absent.fix
    assert doctor.check_accepted(tmp_path, False) == []
    write_site(site_of([FINE, BROKEN]), tmp_path)
    told, trouble = doctor.check_accepted(tmp_path, True)
    assert told.state is State.OK and "2 findings, transport sockets" in told.found and trouble == BROKEN


def test_a_laptop_without_slurm_gets_findings_and_no_traceback(tmp_path: Path) -> None:
    """A whole `gyre doctor` with no program of Slurm on PATH."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    command = [sys.executable, "-m", "gyre_hpc.cli", "doctor", "--json", "--root", str(tmp_path / "runs")]
    env |= {"PATH": str(tmp_path), "PYTHONPATH": str(Path(cli_doctor.__file__).parents[1])}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    site = msgspec.json.decode(done.stdout, type=Site)
    by_name = {finding.name: finding for finding in site.findings}
    assert list(by_name)[:4] == ["python", "packages", "torch", "run root"]
    assert by_name["slurm commands"].state is State.WARNING and "slurm" not in by_name
    assert by_name["run root"].state is State.OK and by_name["torch"].state is State.OK
    assert done.returncode == (1 if doctor.faults(site.findings) else 0)
