"""Real harnesses notice nothing when what is behind them dies in the middle of an answer, and every token is recorded once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre_hpc.composition import compose
from gyre_hpc.harnesses import script
from gyre_hpc.harnesses.command import ROOM, installed
from gyre_hpc.records import Delivery
from tests.harnesses.accidents import Fault, Ordeal, Outcome
from tests.harnesses.cast import NEWEST


def faults(outcome: Outcome, rounds: int) -> Iterator[str]:
    """What is wrong with a run."""
    if outcome.exit_code != 0 or script.FINAL_WORD not in outcome.output:
        yield f"exit code {outcome.exit_code}: {outcome.output[-1500:]}"
    if outcome.struck != rounds * list(Fault):
        yield f"struck: {outcome.struck}"
    if outcome.sealed.calls_lost or outcome.sealed.incomplete or outcome.sealed.law_breaks:
        yield f"account: {outcome.sealed}"
    said = sorted((answer.prompt, answer.output) for answer in outcome.answers)
    recorded = sorted((r.prompt_ids.tolist(), r.output_ids.tolist()) for r in outcome.records)
    if said != recorded:
        yield f"{len(said)} answers were given, {len(recorded)} are recorded: {len([s for s in said if s in recorded])} agree"
    if undelivered := [record.call for record in outcome.records if record.delivery is not Delivery.COMPLETE]:
        yield f"not delivered: {undelivered}"
    if forked := [(record.call, record.forks) for record in outcome.records if record.forks]:
        yield f"turns not known by their ids: {forked}"


async def survives(name: str, folder: Path, *overrides: str, rounds: int = 1) -> list[str]:
    config = compose([f"harness={name}", *ROOM, *overrides])
    await asyncio.to_thread(installed, config.harness)
    outcome = await Ordeal(config, folder, rounds).run(timeout_s=400.0 * rounds)
    return [f"{name} {' '.join(overrides)}: {fault}" for fault in faults(outcome, rounds)]


@pytest.mark.npm
@pytest.mark.userns
@pytest.mark.timeout(500)
async def test_claude_code_survives_every_death_behind_it(tmp_path: Path) -> None:
    assert not await survives("claude_code", tmp_path)


@pytest.mark.npm
@pytest.mark.userns
@pytest.mark.full
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "run",
    [["codex"], ["mini_swe_agent"], ["opencode"], ["qwen_code"], ["claude_code", NEWEST]],
    ids=["codex", "mini_swe_agent", "opencode", "qwen_code", "newest_claude_code"],
)
async def test_every_harness_survives_every_death_behind_it(tmp_path: Path, run: list[str]) -> None:
    assert not await survives(run[0], tmp_path, *run[1:])


@pytest.mark.npm
@pytest.mark.userns
@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["claude_code", "codex"])
async def test_sixty_deaths_in_one_session(tmp_path: Path, name: str) -> None:
    assert not await survives(name, tmp_path, rounds=10)
