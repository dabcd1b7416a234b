"""Claude Code and Codex under the tiny policy, from the command line to verified shards.

It shows that the machinery holds around an unmodified program: recorded, scored, trained, sealed. It shows nothing about
learning to use it: the policy has never seen such a prompt and writes nonsense, so prompts are kept short by the programs' own
options, and the score is a property of the text alone.
"""

from __future__ import annotations

import pytest

from gyre_hpc.composition import compose
from gyre_hpc.gateway.call_log import read_call_log
from gyre_hpc.harnesses.command import installed
from gyre_hpc.layout import RunLayout
from gyre_hpc.records import CallRecord, LeafRole
from gyre_hpc.shards.stats import show, stats
from gyre_hpc.shards.verify import verify
from tests.end_to_end.conftest import Start

ROOM = (
    "tasks.family=tests.end_to_end.words/Words",
    "tasks.sandbox=userns",
    "trust_tasks=false",
    "schedule.executions_per_group=3",
    "engine.capacity=3",
    "model.max_context=8192",
    "trainer.tokens_per_micro_step=8192",
    "engine.pool_tokens=24576",
    "gateway.max_calls=3",
    "schedule.max_void_bursts=20",
)
CLAUDE_CODE = (
    "harness.command=[/bin/sh,-c,'\"$@\" > answer',sh,claude,--print,'{instruction}',--model,policy,--tools,Bash,"
    "--system-prompt,Talk.,--dangerously-skip-permissions]",
    "gateway.max_output_tokens=24",
)
"""One tool and a system prompt of one word: 2,000 tokens instead of 54,000."""
CODEX = (
    "harness.command=[codex,exec,--skip-git-repo-check,--dangerously-bypass-approvals-and-sandbox,-o,answer,"
    "-c,'model_instructions_file=\"/home/agent/.codex/short.md\"',-c,'features.multi_agent=false',"
    "-c,'include_permissions_instructions=false',-c,'include_environment_context=false','{instruction}']",
    "+harness.files={.codex/short.md: Talk.}",
    "gateway.max_output_tokens=64",
)
"""Its own instructions left out: 5,000 tokens instead of 23,000."""


@pytest.mark.npm
@pytest.mark.userns
@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("name", "short"), [("claude_code", CLAUDE_CODE), ("codex", CODEX)])
def test_a_real_harness_with_a_policy_that_writes_nonsense_is_trained(
    name: str, short: tuple[str, ...], start: Start
) -> None:
    installed(compose([f"harness={name}"]).harness)
    run = start(f"harness={name}", *ROOM, *short)
    run.finish()
    summary = run.summary()
    assert summary["steps"] == 2 and summary["calls_lost"] == 0 and summary["calls_unknown"] == 0
    assert verify(run.folder).ok
    found = stats(run.folder)
    assert found.executions == len(run.outcomes()) >= 12 and found.target_tokens > 0
    assert set(found.calls_by_role) == {LeafRole.MAIN.value}
    for execution in run.outcomes():
        calls = show(run.folder, execution).calls
        assert calls and all(call.delivery == "complete" for call in calls)
    assert not forked(run.layout)


def forked(layout: RunLayout) -> list[CallRecord]:
    """Calls that do not extend the call before them; each execution is one conversation."""
    last: dict[tuple[int, int], CallRecord] = {}
    found = []
    records = (record for path in sorted(layout.calls.glob("*.log")) for record in read_call_log(path))
    for record in sorted(records, key=lambda record: record.ordinal):
        before = last.get((record.execution, record.attempt))
        known = [] if before is None else [*before.prompt_ids.tolist(), *before.output_ids.tolist()]
        if record.prompt_ids[: len(known)].tolist() != known:
            found.append(record)
        last[record.execution, record.attempt] = record
    return found
