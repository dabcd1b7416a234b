"""A main agent and its sub-agent in a real harness: one execution, two roots, roles and ids right."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gyre_hpc.harnesses import script
from gyre_hpc.harnesses.check import Outcome, Trial, run
from gyre_hpc.harnesses.command import ROOM, installed
from gyre_hpc.hydra_app import compose
from gyre_hpc.records import LeafRole

SUBTASK = "SUBTASK: write the file"
SUB_DONE = "the sub-agent is done"


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def claude_code(prompt: str) -> str:
    return call(
        "Agent", description="file", prompt=SUBTASK, subagent_type="general-purpose", run_in_background=False
    )


def codex(prompt: str) -> str:
    started = re.findall(r'"agent_id":\s*"([^"]+)"', prompt)
    if not started:
        return call("multi_agent_v1.spawn_agent", message=SUBTASK)
    return call("multi_agent_v1.wait_agent", targets=started, timeout_ms=20000)


async def lead(name: str, delegate: Callable[[str], str], folder: Path, monkeypatch: Any) -> Outcome:
    """Run a harness whose main agent delegates the task and answers when the sub-agent has."""

    def answer(engine: script.ScriptedEngine, prompt: str) -> tuple[str, bool]:
        tool = script.shell_tool(prompt)
        if tool is None:
            return "nothing<|im_end|>", False
        if script.INSTRUCTION not in prompt:
            if script.RESULT in prompt:
                return f"{script.THINKING}{SUB_DONE}<|im_end|>", False
            return f"{script.tool_call(tool, script.COMMAND)}<|im_end|>", False
        if SUB_DONE in prompt:
            return f"{script.ANSWER}<|im_end|>", False
        return f"{script.THINKING}{delegate(prompt)}<|im_end|>", False

    monkeypatch.setattr(script.ScriptedEngine, "_answer", answer)
    config = compose([f"harness={name}", *ROOM])
    await asyncio.to_thread(installed, config.harness)
    return await run(config, folder, Trial(timeout_s=120.0))


def judged(outcome: Outcome) -> None:
    assert outcome.exit_code == 0 and script.FINAL_WORD in outcome.output, outcome.output[-2000:]
    assert (outcome.workspace / script.FILE).read_text() == script.CONTENT
    assert not outcome.forks
    main = [r for r in outcome.records if r.role_hint is LeafRole.MAIN]
    sub = [r for r in outcome.records if r.role_hint is LeafRole.SUB_AGENT]
    assert len(main) + len(sub) == len(outcome.records) and len(sub) == 2 and len(main) >= 2
    for branch in (main, sub):
        for parent, child in itertools.pairwise(branch):
            known = [*parent.prompt_ids, *parent.output_ids]
            assert child.prompt_ids[: len(known)].tolist() == known
    assert sub[0].prompt_ids[: len(main[0].prompt_ids)].tolist() != main[0].prompt_ids.tolist()


@pytest.mark.npm
async def test_claude_code_with_a_sub_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged(await lead("claude_code", claude_code, tmp_path, monkeypatch))


@pytest.mark.npm
@pytest.mark.full
async def test_codex_with_a_sub_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged(await lead("codex", codex, tmp_path, monkeypatch))
