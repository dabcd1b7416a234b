"""Real harnesses whose every call has a part that the script knows: the role rules name all of them right.

Their agents also look around: they run in the sandbox of the main job, with an environment made from nothing, a HOME of their
own, and no network but the gateway (where the machine has user namespaces).

One run of each shows whatever the harness has: main agent, sub-agent, compaction of both, title, side call of a server tool.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre_hpc.composition import compose
from gyre_hpc.gateway.lineage import Mismatch
from gyre_hpc.harnesses import script
from gyre_hpc.harnesses.check import Outcome, Trial
from gyre_hpc.harnesses.command import ROOM, installed
from gyre_hpc.records import CallRecord, Delivery
from tests.harnesses.cast import EXPECTED, NEWEST, Part, call, cast, confusion, part, play

log = logging.getLogger(__name__)

AGENTS = frozenset({Part.MAIN, Part.SUB_AGENT})
COMPACTIONS = frozenset({Part.COMPACTION, Part.SUB_COMPACTION})
FULL_AT = {
    "claude_code": 75_000,
    "codex": 40_000,
    "opencode": 44_000,
    "qwen_code": 100_000,
    "mini_swe_agent": 200_000,
}
"""Context at which both agents of a harness have to compact after some calls, by the size of its first prompt."""
SHOWN = {
    "claude_code": AGENTS | COMPACTIONS | {Part.TITLE, Part.OTHER},
    "codex": AGENTS | COMPACTIONS,
    "opencode": AGENTS | COMPACTIONS | {Part.TITLE},
    "qwen_code": AGENTS | COMPACTIONS,
    "mini_swe_agent": frozenset({Part.MAIN}),
}
MADE_UP = {
    "opencode": {Mismatch.FOREIGN_TURN},
    "qwen_code": {Mismatch.FOREIGN_TURN, Mismatch.EDITED_TEXT},
}
"""Harnesses that write an assistant turn of their own into the history when they compact, Qwen Code also in front of a tool call
of ours ("Got it. Thanks for the additional context!"): forks that are none of ours, one at most for each compaction."""
WITH_SIDE_CALLS = [
    "harness.env.CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=''",
    'harness.command=[claude,--print,"{instruction}",--model,policy,--output-format,stream-json,--verbose,--dangerously-skip-permissions]',
]
"""Titles and web search, which conf/harness/claude_code.yaml switches off."""


def lost_continuity(outcome: Outcome) -> Iterator[str]:
    """Calls that do not extend the call before them of the same agent in the same window of its context."""
    last: dict[Part, CallRecord] = {}
    for record in sorted(outcome.records, key=lambda record: record.ordinal):
        own = part(outcome.engine.rendering.text(record.prompt_ids.tolist()))
        if own in COMPACTIONS:
            last.pop(Part.MAIN if own is Part.COMPACTION else Part.SUB_AGENT, None)
        elif own in AGENTS:
            if own in last:
                known = [*last[own].prompt_ids.tolist(), *last[own].output_ids.tolist()]
                if record.prompt_ids[: len(known)].tolist() != known:
                    yield f"call {record.ordinal} ({own})"
            last[own] = record


SECRET = "a-secret-of-the-user"


def leaks(outcome: Outcome) -> Iterator[str]:
    """What an agent saw that it must not see."""
    environment, devices, home = (outcome.workspace / "seen.txt").read_text().split("\n\n", 2)
    if SECRET in environment:
        yield "the environment"
    if "HOME=/home/agent" not in environment.splitlines():
        yield "HOME"
    if [line.split(":")[0].strip() for line in devices.splitlines() if ":" in line] != ["lo"]:
        yield f"network devices: {devices}"
    interpreter = Path(sys.base_prefix).resolve()
    mounted = {".local"} | {
        place.relative_to(Path.home()).parts[0]
        for place in [interpreter]
        if place.is_relative_to(Path.home())
    }
    if not set(home.split()) <= mounted and "cannot access" not in home:
        yield f"the user's own folder: {home}"


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "ANTHROPIC_AUTH_TOKEN", "AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN", "A_NAME"):
        monkeypatch.setenv(name, SECRET)


async def shows_its_parts(
    name: str, folder: Path, *overrides: str, but: frozenset[Part] = frozenset()
) -> None:
    limit = FULL_AT[name]
    config = compose(
        [
            f"harness={name}",
            *ROOM,
            f"model.max_context={limit}",
            *(WITH_SIDE_CALLS if name == "claude_code" else ()),
            *overrides,
        ]
    )
    await asyncio.to_thread(installed, config.harness)
    trial = Trial(silence_s=0.0, timeout_s=280.0, max_context=limit)
    side = f"\n{call('WebSearch', query='something')}" if name == "claude_code" else ""
    fills = AGENTS if len(SHOWN[name]) > 1 else frozenset[Part]()
    outcome = await play(config, cast(config, name, trial, fills=fills, side=side), folder, trial)
    assert outcome.exit_code == 0 and script.FINAL_WORD in outcome.output, (name, outcome.output[-2000:])
    assert not list(leaks(outcome)), (name, list(leaks(outcome)))
    table = confusion(outcome)
    log.info("%s: %s", name, {own.value: dict(roles) for own, roles in table.items()})
    assert set(table) == SHOWN[name] - but, (name, table)
    wrong = {own: roles for own, roles in table.items() if set(roles) != {EXPECTED[own]}}
    assert not wrong, (name, wrong)
    assert all(record.delivery is Delivery.COMPLETE for record in outcome.records)
    assert not list(lost_continuity(outcome)), (name, list(lost_continuity(outcome)))
    forks = Counter(reason for record in outcome.records for reason in record.forks)
    log.info("%s: forks %s", name, dict(forks))
    assert set(forks) <= MADE_UP.get(name, set()), (name, forks)
    assert forks.total() <= sum(table[own].total() for own in COMPACTIONS if own in table), (name, forks)


@pytest.mark.npm
@pytest.mark.userns
async def test_claude_code_and_codex_have_no_call_in_a_wrong_role(tmp_path: Path) -> None:
    await asyncio.gather(*(shows_its_parts(name, tmp_path / name) for name in ("claude_code", "codex")))


@pytest.mark.npm
@pytest.mark.userns
@pytest.mark.full
async def test_the_other_harnesses_have_no_call_in_a_wrong_role(tmp_path: Path) -> None:
    names = ("mini_swe_agent", "opencode", "qwen_code")
    await asyncio.gather(*(shows_its_parts(name, tmp_path / name) for name in names))


@pytest.mark.npm
@pytest.mark.userns
@pytest.mark.full
async def test_the_newest_claude_code_has_no_call_in_a_wrong_role(tmp_path: Path) -> None:
    """It asks for no title in print mode."""
    await shows_its_parts("claude_code", tmp_path, NEWEST, but=frozenset({Part.TITLE}))
