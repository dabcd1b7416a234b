"""How points stand and what they came to: Slurm's word first, the run folder's proof second, else unknown."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_hpc.cli import main
from gyre_hpc.composition import compose
from gyre_hpc.config import save_run_config
from gyre_hpc.report.summary import Summary
from gyre_hpc.sweep.manifest import Manifest
from gyre_hpc.sweep.results import FINISHED, NOT_SUBMITTED, UNKNOWN, Progress, results, standings, state_of
from tests.sweep.fake_slurm import FakeSlurm
from tests.sweep.sweeps import FIRST, NOON, SECOND, THIRD, a_run


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm(tmp_path / "slurm", tmp_path / "none", monkeypatch)


def summary(steps: int) -> Summary:
    return Summary(0.25, 0.5, 0.01, steps, 2, 4, 2, {}, 9, 0, 0, 100, 0, 0.5, {}, 61.0)


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    """A point with all its steps, one without a summary, one that could not be submitted."""
    made = Manifest.opened(tmp_path / "sweep")
    for number, point in enumerate((FIRST, SECOND), start=1):
        run = a_run(tmp_path, f"run-{number}")
        save_run_config(compose(["schedule.steps=3"]), run.root)
        made.record(point, run=run, job=str(76 + number), time=NOON)
    (tmp_path / "run-1" / "summary.json").write_bytes(msgspec.json.encode(summary(3)))
    made.record(THIRD, error="model.path=/x: no such folder\n  fix: name one", time=NOON)
    return made


@given(st.integers(0, 5), st.booleans())
def test_a_job_that_slurm_forgot_has_finished_only_if_its_summary_has_all_steps(
    steps: int, summarised: bool
) -> None:
    found = state_of("77", {"78": "COMPLETED"}, Progress(steps, 3, None, summarised))
    assert found == (FINISHED if summarised and steps >= 3 else UNKNOWN)
    assert state_of("77", {"77": "RUNNING"}, Progress(steps, 3, None, summarised)) == "RUNNING"
    assert state_of("77", {}, None) == UNKNOWN and state_of(None, {}, None) == NOT_SUBMITTED


def test_status_has_a_line_per_point(
    manifest: Manifest, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.say(squeue="78|TIMEOUT")
    assert main(["sweep", "status", str(manifest.folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "schedule=gyre      job 77  finished       step 3/3  score 0.500",
        "schedule=colocate  job 78  TIMEOUT        step 0/3  score -",
        "schedule=async     -       not submitted  -         score -      error: model.path=/x: no such folder",
    ]


def test_status_for_programs_is_one_json_line_per_point(
    manifest: Manifest, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.say(squeue="78|TIMEOUT")
    assert main(["sweep", "status", str(manifest.folder), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["state"] for line in lines] == [FINISHED, "TIMEOUT", NOT_SUBMITTED]
    assert lines[0]["progress"] == {"steps": 3, "asked": 3, "score": 0.5, "summarised": True}


def test_a_run_under_way_shows_the_steps_in_its_metrics(
    manifest: Manifest, slurm: FakeSlurm, tmp_path: Path
) -> None:
    line = {
        "kind": "evaluated",
        "t": 1.0,
        "version": 0,
        "score": 0.25,
        "score_se": 0.1,
        "executions": 4,
        "invalid": 0,
    }
    (tmp_path / "run-2" / "metrics.jsonl").write_text(json.dumps(line) + '\n{"kind": "st')
    progress = standings(manifest)[1].progress
    assert progress == Progress(0, 3, 0.25, summarised=False)


def test_collect_shows_the_summaries_and_names_the_missing(
    manifest: Manifest, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["sweep", "collect", str(manifest.folder)]) == 0
    out = capsys.readouterr().out
    (row,) = [line for line in out.splitlines() if "schedule=gyre" in line]
    assert row.replace("│", " ").split() == ["schedule=gyre", "0.250", "0.500", "3/3", "61", "s", "0.50"]
    assert "missing  schedule=colocate: ../run-2: no summary.json\n" in out
    assert "missing  schedule=async: model.path=/x: no such folder\n" in out


def test_collect_for_programs_is_one_json_line_per_point(
    manifest: Manifest, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", "collect", str(manifest.folder), "--json"]) == 0
    first, second, third = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["overrides"] == list(FIRST.overrides) and first["summary"]["score_after"] == 0.5
    assert first["missing"] is None and first["steps_asked"] == 3
    assert second["summary"] is None and third["missing"].startswith("model.path=/x")


def test_a_damaged_summary_is_missing_and_named(manifest: Manifest, tmp_path: Path) -> None:
    (tmp_path / "run-1" / "summary.json").write_text("{")
    found = results(manifest)[0]
    assert found.summary is None and found.missing is not None and "run-1" in found.missing
    assert state_of("77", {}, standings(manifest)[0].progress) == UNKNOWN


@pytest.mark.parametrize("what", ["status", "collect"])
def test_a_folder_of_no_sweep_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    assert main(["sweep", what, str(tmp_path)]) == 2
    assert f"{tmp_path}: no manifest.jsonl" in capsys.readouterr().err
