"""A context that fills up: real harnesses compact, Claude Code at our overflow error, Codex by the usage we report."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gyre_hpc.harnesses import script, stand
from gyre_hpc.harnesses.check import Trial, run
from gyre_hpc.harnesses.command import ROOM, installed
from gyre_hpc.hydra_app import compose
from gyre_hpc.records import LeafRole

SUMMARY = "<analysis>none</analysis><summary>everything-so-far</summary>"
CLAUDE_CODE_ASKS = "Respond with TEXT ONLY"
"""In the last turn, when it compacts; Codex offers no tools then."""


@pytest.mark.npm
@pytest.mark.full
@pytest.mark.parametrize(("name", "limit"), [("claude_code", 65_000), ("codex", 36_000)])
async def test_a_full_context_is_compacted_and_the_run_goes_on(
    name: str, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(engine: script.ScriptedEngine, prompt: str) -> tuple[str, bool]:
        last = prompt.rsplit("<|im_start|>user", 1)[-1]
        tool = script.shell_tool(prompt)
        if tool is None or CLAUDE_CODE_ASKS in last:
            return f"{SUMMARY}<|im_end|>", False
        if "everything-so-far" in prompt:
            return f"{script.ANSWER}<|im_end|>", False
        return f"on\n{script.tool_call(tool, 'seq 1 900')}<|im_end|>", False

    monkeypatch.setattr(script.ScriptedEngine, "_answer", answer)
    monkeypatch.setattr(stand, "MAX_CONTEXT", limit)
    told = [f"model.max_context={limit}"] if name == "codex" else []
    config = compose([f"harness={name}", *ROOM, *told])
    await asyncio.to_thread(installed, config.harness)
    outcome = await run(config, tmp_path, Trial(silence_s=0.0, timeout_s=200.0))
    assert outcome.exit_code == 0 and script.FINAL_WORD in outcome.output, outcome.output[-2000:]
    assert not outcome.forks
    refused = [seen.status for seen in outcome.requests if seen.status >= 400]
    assert bool(refused) is (name == "claude_code") and set(refused) <= {400}
    roles = [record.role_hint for record in sorted(outcome.records, key=lambda record: record.ordinal)]
    at = roles.index(LeafRole.MAIN_SUMMARY)
    assert at >= 3 and set(roles) == {LeafRole.MAIN, LeafRole.MAIN_SUMMARY} and roles[-1] is LeafRole.MAIN
    assert roles.count(LeafRole.MAIN_SUMMARY) == 1
