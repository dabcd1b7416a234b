"""Every harness goes through a long silence in the middle of an answer, of its main agent and of a sub-agent.

All run at the same time, with the keep-alive of a run. Where a sub-agent runs in the background both are silent together;
where the main agent waits for it (opencode) the two silences are two runs.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre_hpc.composition import compose
from gyre_hpc.harnesses import script
from gyre_hpc.harnesses.check import Outcome, Trial
from gyre_hpc.harnesses.command import ROOM, installed
from gyre_hpc.harnesses.findings import GENERATIONS
from gyre_hpc.records import Delivery
from tests.harnesses.cast import EXPECTED, NEWEST, Cast, Part, cast, confusion, play

BOTH = frozenset({Part.MAIN, Part.SUB_AGENT})
RUNS = (
    ("claude_code", BOTH),
    ("claude_code", BOTH, NEWEST),
    ("codex", BOTH),
    ("mini_swe_agent", frozenset({Part.MAIN})),
    ("opencode", frozenset({Part.MAIN})),
    ("opencode", frozenset({Part.SUB_AGENT})),
    ("qwen_code", BOTH),
)
"""Harness, who is silent, what is configured otherwise."""
AFTERWARDS_S = 500.0
"""What a slow start and the rest of the task may take beside the silence."""


def faults(outcome: Outcome, engine: Cast, silent: frozenset[Part]) -> Iterator[str]:
    """What is wrong with a run."""
    if outcome.exit_code != 0 or script.FINAL_WORD not in outcome.output:
        yield f"exit code {outcome.exit_code} after {outcome.wall_s:.0f} s: {outcome.output[-800:]}"
    if engine.slept != silent:
        yield f"silent were {engine.slept}, not {silent}"
    asked = sum(seen.method == "POST" and seen.path.endswith(GENERATIONS) for seen in outcome.requests)
    if asked != len(outcome.records):
        yield f"{asked - len(outcome.records)} requests repeated"
    if any(record.delivery is not Delivery.COMPLETE for record in outcome.records):
        yield f"delivered: {[record.delivery.value for record in outcome.records]}"
    if outcome.forks:
        yield f"turns not known by their ids: {outcome.forks}"
    for own, roles in confusion(outcome).items():
        if set(roles) != {EXPECTED[own]}:
            yield f"{own}: {roles}"


async def stalled(
    folder: Path, silence_s: float, name: str, silent: frozenset[Part], *overrides: str
) -> list[str]:
    trial = Trial(silence_s=silence_s, timeout_s=silence_s + AFTERWARDS_S, keepalive_s=15.0)
    config = compose([f"harness={name}", *ROOM, *overrides])
    await asyncio.to_thread(installed, config.harness)
    engine = cast(config, name, trial, silent=silent)
    if Part.SUB_AGENT not in silent:
        engine.delegation = None
    outcome = await play(config, engine, folder, trial)
    return [f"{name} {' '.join(overrides)}: {fault}" for fault in faults(outcome, engine, silent)]


async def all_stalled(folder: Path, silence_s: float) -> None:
    found = await asyncio.gather(
        *(stalled(folder / str(number), silence_s, *run) for number, run in enumerate(RUNS))
    )
    assert not any(found), "\n".join(fault for faults in found for fault in faults)


@pytest.mark.npm
@pytest.mark.patient
@pytest.mark.timeout(1200)
async def test_all_harnesses_survive_a_stall_of_400_s(tmp_path: Path) -> None:
    await all_stalled(tmp_path, float(os.environ.get("GYRE_STALL_S", "400")))


@pytest.mark.npm
@pytest.mark.patient
@pytest.mark.full
@pytest.mark.timeout(2400)
async def test_all_harnesses_survive_a_stall_of_1300_s(tmp_path: Path) -> None:
    await all_stalled(tmp_path, 1300.0)
