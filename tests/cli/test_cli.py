"""The `gyre` command: help with examples, and errors that name what is wrong without leaving anything behind."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gyre_hpc import models
from gyre_hpc.cli import VERBS, main
from gyre_hpc.errors import MissingInput
from gyre_hpc.layout import RunLayout
from tests.report import runs

GYRE = (sys.executable, "-m", "gyre_hpc.cli")


class Said:
    """Exit code and what went to both streams."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


def say(capsys: pytest.CaptureFixture[str], *arguments: str) -> Said:
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return Said(code, out, err)


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_lists_every_verb_with_an_example(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    said = say(capsys, *arguments)
    assert said.code == 0
    for name, verb in VERBS.items():
        assert f"  {name} " in said.out and verb.help in said.out and verb.example in said.out


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    said = say(capsys, verb, "--help")
    assert said.code == 0
    examples = [line for line in said.out.splitlines() if f" gyre {verb} " in f" {line}"]
    assert any("usage" not in line for line in examples), "no example"


def test_every_example_starts_with_its_verb() -> None:
    assert all(verb.example.startswith(f"gyre {name} ") for name, verb in VERBS.items())


def test_help_of_train_shows_experiments_and_keys(capsys: pytest.CaptureFixture[str]) -> None:
    said = say(capsys, "train", "--help")
    assert "gyre train experiment=quickstart" in said.out and "gyre train resume=" in said.out
    assert re.search(r"experiment: .*quickstart", said.out)
    assert "schedule.steps = 30\n      Optimizer steps of the run." in said.out


def test_an_unknown_verb_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    said = say(capsys, "trian")
    assert said.code == 2 and said.out == ""
    assert "gyre trian: no such verb" in said.err and "did you mean gyre train?" in said.err
    assert "shards" in say(capsys, "frobnicate").err


def test_a_missing_model_folder_is_named_and_nothing_is_left_behind(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    command = [*GYRE, "train", "experiment=quickstart", "model.path=/nonexistent", f"root={root}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: model.path=/nonexistent: /nonexistent: no such folder\n")
    assert "fix: " in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == "" and list(tmp_path.iterdir()) == []


def test_a_model_folder_that_lacks_files_names_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(MissingInput, match=r"lacks model\*\.safetensors, tokenizer\.json") as caught:
        models.resolve(str(tmp_path))
    assert "package:patchkit" in caught.value.fix


def test_a_shipped_policy_is_found_by_name() -> None:
    assert (models.resolve("package:patchkit") / "config.json").is_file()
    with pytest.raises(MissingInput, match="package:nothing"):
        models.resolve("package:nothing")


def test_a_wrong_key_ends_train_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    said = say(capsys, "train", "schedule.polcy=gyre", f"root={tmp_path / 'runs'}")
    assert said.code == 2 and "did you mean 'schedule.policy'?" in said.err
    assert list(tmp_path.iterdir()) == []


def test_resume_of_a_missing_folder_names_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    said = say(capsys, "train", f"resume={gone}")
    assert said.code == 2 and f"{gone}/config.yaml" in said.err and "fix: " in said.err
    assert not gone.exists()


@pytest.mark.parametrize("flags", [(), ("--multirun",)])
def test_an_override_beside_resume_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: tuple[str, ...]
) -> None:
    said = say(capsys, "train", *flags, f"resume={tmp_path}", "schedule.steps=60", "schedule=async", "seed=3")
    assert said.code == 2 and "schedule.steps=60, schedule=async, seed=3 would count for nothing" in said.err
    assert f"{tmp_path}/config.yaml" in said.err and f"fix: gyre train resume={tmp_path}\n" in said.err


def test_resume_takes_what_the_batch_script_gives(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = say(capsys, "train", "cluster.kind=slurm", f"resume={tmp_path}", "resume_force=true")
    assert said.code == 2 and f"{tmp_path}/config.yaml: no such file" in said.err


def test_an_error_inside_a_sweep_keeps_its_words_and_exit_code(tmp_path: Path) -> None:
    command = [*GYRE, "train", "--multirun", "schedule=gyre,async", "model.path=/nonexistent"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "error: model.path=/nonexistent" in done.stderr and "Traceback" not in done.stderr
    assert [path.name[:6] for path in (tmp_path / "runs").iterdir()] == ["sweep-"]


@pytest.mark.parametrize("arguments", [("report",), ("shards", "verify"), ("shards", "stats")])
def test_what_is_not_a_run_folder_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    said = say(capsys, *arguments, str(tmp_path))
    assert said.code == 2 and said.out == ""
    assert said.err.startswith(f"error: {tmp_path}: not a run folder\n  fix: ")


def test_a_missing_argument_shows_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    said = say(capsys, "report")
    assert said.code == 2 and said.err.startswith("usage: gyre report")


def test_report_makes_summary_and_page_of_a_run_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    layout = RunLayout(tmp_path)
    layout.config.write_text("model: {path: package:patchkit}\n")
    runs.write(layout.metrics, runs.counted())
    said = say(capsys, "report", str(tmp_path))
    assert said.code == 0 and str(layout.report) in said.out
    assert layout.summary.is_file() and layout.report.is_file()


def test_a_corrupt_metrics_file_names_file_and_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    layout = RunLayout(tmp_path)
    layout.config.write_text("model: {path: package:patchkit}\n")
    layout.metrics.write_text('{"kind":"opened","t":0.0}\nnonsense\n')
    said = say(capsys, "report", str(tmp_path))
    assert said.code == 4 and f"{layout.metrics}:2: " in said.err


def test_an_error_of_the_taxonomy_reaches_stderr_in_full_on_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    folder = tmp_path / ("long-" * 20) / "[bold]name"
    assert f"error: {folder}: not a run folder\n" in say(capsys, "report", str(folder)).err


def test_ctrl_c_is_no_error_of_ours(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(arguments: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(VERBS, "report", type(VERBS["report"])(interrupted, "", ""))
    assert say(capsys, "report").code == 130
