"""The harness's command line: placeholders, the shipped program, and a program that is not there."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from gyre_hpc.config import HarnessConfig
from gyre_hpc.errors import ConfigError, MissingInput
from gyre_hpc.executions.harness import find_harness, program_folders

VALUES = {"base_url": "http://127.0.0.1:9/x/k", "workspace": Path("/w"), "seed": 7}


def test_placeholders_are_filled_once_and_an_instruction_stays_as_it_is() -> None:
    config = HarnessConfig(
        command=["/bin/sh", "-p", "{instruction}", "{workspace}", '{"seed": {seed}}', "{max_turns}"],
        env={"ANTHROPIC_BASE_URL": "{base_url}"},
        max_turns=9,
    )
    call = find_harness(config).fill(instruction="use {seed} and {base_url}", **VALUES)  # type: ignore[arg-type]
    assert call.argv == ["/bin/sh", "-p", "use {seed} and {base_url}", "/w", '{"seed": 7}', "9"]
    assert call.env["ANTHROPIC_BASE_URL"] == VALUES["base_url"]


def test_no_command_means_the_reference_harness() -> None:
    harness = find_harness(HarnessConfig(dialect="anthropic-messages"))
    argv = harness.fill(instruction="do", **VALUES).argv  # type: ignore[arg-type]
    assert argv[1:3] == ["-I", "-S"]
    assert argv[3].endswith("reference_harness/agent.py")
    assert argv[-2:] == ["--dialect", "anthropic-messages"]
    assert Path(argv[3]).parent in harness.readonly


def test_a_missing_program_is_named() -> None:
    with pytest.raises(MissingInput, match="no-such-harness"):
        find_harness(HarnessConfig(command=["no-such-harness", "{instruction}"]))


def test_a_program_is_found_on_the_path_and_brings_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "claude"
    program.write_text("#!/bin/sh\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    harness = find_harness(HarnessConfig(command=["claude"]))
    assert harness.command == (str(program),)
    assert tmp_path in harness.readonly
    assert harness.env["PATH"].split(":")[0] == str(tmp_path)


def test_a_program_of_a_virtual_environment_brings_the_environment_and_its_python() -> None:
    folders = program_folders(sys.executable)
    assert Path(sys.prefix) in folders or sys.prefix == sys.base_prefix
    assert any(Path(sys.base_prefix).is_relative_to(folder) for folder in folders)


def test_a_dialect_that_the_reference_harness_does_not_speak_is_refused() -> None:
    with pytest.raises(ConfigError, match="openai-responses"):
        find_harness(HarnessConfig(dialect="openai-responses"))
