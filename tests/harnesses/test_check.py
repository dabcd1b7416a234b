"""The check passes a harness that works and names what does not; real binaries in front of a real gateway."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gyre_hpc.composition import compose
from gyre_hpc.config import RunConfig
from gyre_hpc.harnesses.check import Outcome, Trial, run
from gyre_hpc.harnesses.command import ROOM, installed
from gyre_hpc.harnesses.findings import judge
from tests.harnesses.cast import NEWEST

HARNESSES = ("claude_code", "codex", "mini_swe_agent", "opencode", "qwen_code")


def config(name: str, *overrides: str) -> RunConfig:
    return compose([f"harness={name}", *ROOM, *overrides])


def failed(outcome: Outcome, trial: Trial, given: RunConfig) -> dict[str, str]:
    found = judge(outcome, trial, given.harness.dialect)
    return {finding.what: finding.detail for finding in found if not finding.works}


async def passes(name: str, folder: Path, trial: Trial, *overrides: str) -> Outcome:
    given = config(name, *overrides)
    await asyncio.to_thread(installed, given.harness)
    folder.mkdir(exist_ok=True)
    outcome = await run(given, folder, trial)
    assert not failed(outcome, trial, given), (name, failed(outcome, trial, given), outcome.output[-2000:])
    assert not outcome.forks and not any(record.forks for record in outcome.records)
    return outcome


@pytest.mark.parametrize("dialect", ["openai-chat", "anthropic-messages"])
async def test_the_shipped_harness_passes(tmp_path: Path, dialect: str) -> None:
    given, trial = config("reference", f"harness.dialect={dialect}"), Trial(silence_s=0.5, keepalive_s=0.1)
    outcome = await run(given, tmp_path, trial)
    assert not failed(outcome, trial, given), outcome.output
    assert [record.dialect for record in outcome.records] == [dialect, dialect]
    assert not outcome.forks and not any(record.forks for record in outcome.records)


async def test_a_program_that_is_no_harness_fails_by_name(tmp_path: Path) -> None:
    given, trial = config("reference", "harness.command=[/bin/sh,-c,'exit 3']"), Trial()
    found = failed(await run(given, tmp_path, trial), trial, given)
    assert set(found) == {
        "starts", "dialect", "tool call", "file changed", "keep-alive", "answer", "recorded", "roles", "exit",
    }  # fmt: skip
    assert found["exit"].startswith("exit code 3")


async def test_a_harness_that_does_not_end_is_ended(tmp_path: Path) -> None:
    given, trial = config("reference", "harness.command=[/bin/sleep,'600']"), Trial(timeout_s=0.3)
    assert "did not end" in failed(await run(given, tmp_path, trial), trial, given)["exit"]


async def test_a_harness_without_patience_is_found_out(tmp_path: Path) -> None:
    """Half a second of silence, and a client that gives up after a tenth and asks again."""
    script = (
        "import sys, urllib.request as u\n"
        'r = u.Request(sys.argv[1] + \'/v1/chat/completions\', b\'{"messages":[{"role":"user","content":"x"}],'
        '"tools":[{"type":"function","function":{"name":"sh","parameters":{"properties":{"cmd":{"type":"string"}}}}}]}\')\n'
        "for wait in (0.1, 20):\n"
        "    try: u.urlopen(r, timeout=wait).read()\n"
        "    except OSError: pass\n"
    )
    given = config("reference")
    given.harness.command = ["/usr/bin/python3", "-c", script, "{base_url}"]
    trial = Trial(silence_s=0.5, keepalive_s=5.0)
    found = failed(await run(given, tmp_path, trial), trial, given)
    assert found["keep-alive"].endswith("1 requests repeated") and "exit" not in found


@pytest.mark.npm
async def test_claude_code_works(tmp_path: Path) -> None:
    outcome = await passes("claude_code", tmp_path, Trial(silence_s=3.0, timeout_s=120.0))
    assert outcome.requests[0].method == "HEAD"


@pytest.mark.npm
@pytest.mark.full
@pytest.mark.parametrize("name", HARNESSES)
async def test_every_harness_works(tmp_path: Path, name: str) -> None:
    await passes(name, tmp_path, Trial(silence_s=30.0, timeout_s=400.0))


@pytest.mark.npm
@pytest.mark.parametrize(
    "name",
    [
        "codex",
        *(pytest.param(name, marks=pytest.mark.full) for name in HARNESSES if name != "codex"),
    ],
)
async def test_a_harness_is_checked_in_the_mode_it_is_configured_for(tmp_path: Path, name: str) -> None:
    """All of them also take their answers in parts; only a stream can bring them so."""
    outcome = await passes(name, tmp_path, Trial(silence_s=3.0, timeout_s=250.0), "harness.deliver=blocks")
    mode = "answer" if name == "mini_swe_agent" else "blocks"
    assert {record.deliver for record in outcome.records} == {mode}


@pytest.mark.npm
@pytest.mark.full
async def test_the_newest_claude_code_works(tmp_path: Path) -> None:
    await passes("claude_code", tmp_path, Trial(silence_s=30.0, timeout_s=400.0), NEWEST)
