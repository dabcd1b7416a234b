"""A scripted model that plays every part of a harness, and so knows the true part of every call.

The main agent hands work to a sub-agent, goes on beside it where the harness lets it, fills its context until the harness
compacts, and answers. Parts are told by words of the conversation alone (the task, the sub-task, what a harness asks when it
compacts or wants a title); the rules under test look at headers, tools and system turns.
"""

from __future__ import annotations

import enum
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyre_hpc import models
from gyre_hpc.config import RunConfig
from gyre_hpc.gateway.rendering import Rendering
from gyre_hpc.harnesses import check, script
from gyre_hpc.harnesses.check import Outcome, Trial
from gyre_hpc.harnesses.stand import MODEL
from gyre_hpc.records import LeafRole

NEWEST = 'harness.packages=["npm:@anthropic-ai/claude-code@2.1.332"]'
"""Claude Code beside the version of conf/harness/claude_code.yaml."""
SUBTASK = "SUBTASK: look around with a shell command and report"
SUB_DONE = "report-of-the-sub-agent"
SUMMARY = {False: "summary-of-the-main-agent", True: "summary-of-the-sub-agent"}
FILL = 1500
"""Lines of a command's output: about 7,000 tokens."""
LOOK = f"{{ env; echo; cat /proc/net/dev; echo; ls -A {Path.home()}; }} > seen.txt 2>&1; "
"""What an agent can see of the machine, written into its workspace."""
WAIT = "seq 1 3 && sleep 3"
MOST = 40
"""Calls of one agent after which it ends, whatever it waits for."""


class Part(enum.StrEnum):
    """Who sends a call, as the script knows it."""

    MAIN = "main"
    SUB_AGENT = "sub-agent"
    COMPACTION = "compaction"
    SUB_COMPACTION = "compaction of a sub-agent"
    TITLE = "title"
    OTHER = "other"


EXPECTED = {
    Part.MAIN: LeafRole.MAIN,
    Part.SUB_AGENT: LeafRole.SUB_AGENT,
    Part.COMPACTION: LeafRole.MAIN_SUMMARY,
    Part.SUB_COMPACTION: LeafRole.SUB_AGENT_SUMMARY,
    Part.TITLE: LeafRole.UNKNOWN,
    Part.OTHER: LeafRole.UNKNOWN,
}
COMPACTS = re.compile(
    "Your task is to create a detailed summary|CONTEXT CHECKPOINT COMPACTION|reason in your <analysis> block|anchored summary"
)
"""What Claude Code, Codex, Qwen Code and opencode ask for when they compact."""
TITLES = re.compile(r"(generate|create|write)[^.]{0,60} title|title generator", re.IGNORECASE)


def part(prompt: str) -> Part:
    """The part of a call, by its conversation."""
    turns = prompt.split("<|im_start|>")
    last = next((turn for turn in reversed(turns) if turn.startswith("user")), "")
    of_main = any(mark in prompt for mark in (script.INSTRUCTION, SUMMARY[False]))
    if script.shell_tool(prompt) is None and TITLES.search(prompt):
        return Part.TITLE
    if COMPACTS.search(last):
        return Part.COMPACTION if of_main else Part.SUB_COMPACTION
    if of_main and script.shell_tool(prompt):
        return Part.MAIN
    if any(mark in prompt for mark in (SUBTASK, SUMMARY[True])) and script.shell_tool(prompt):
        return Part.SUB_AGENT
    return Part.OTHER


def call(name: str, **arguments: Any) -> str:
    """A tool call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@dataclass(frozen=True)
class Delegation:
    """How a harness starts a sub-agent; `waits(prompt)` is the call that waits for one that runs beside the main agent."""

    starts: Callable[[], str]
    waits: Callable[[str], str] | None = None
    background: bool = True


@dataclass
class Cast(script.ScriptedEngine):
    """`delegation` None: no sub-agents. `fills`: agents that go on until their context has been compacted."""

    delegation: Delegation | None = None
    fills: frozenset[Part] = frozenset()
    side: str = ""
    """A tool call that makes the harness ask the model on the side."""
    silent: frozenset[Part] = frozenset()
    """Parts whose first answer (of the main agent: the first after the delegation) takes `silence_s`."""
    played: Counter[Part] = field(default_factory=Counter)
    slept: set[Part] = field(default_factory=set)

    def answer(self, prompt: str) -> tuple[str, bool]:
        own = part(prompt)
        self.played[own] += 1
        text = self._text(own, prompt)
        delegated = own is not Part.MAIN or self.delegation is None or self.played[own] > 1
        silent = own in self.silent and own not in self.slept and delegated
        if silent:
            self.slept.add(own)
        return f"{text}<|im_end|>", silent

    def _text(self, own: Part, prompt: str) -> str:
        match own:
            case Part.COMPACTION | Part.SUB_COMPACTION:
                words = SUMMARY[True] if own is Part.SUB_COMPACTION else f"{SUMMARY[False]} {SUB_DONE}"
                return f"<analysis>none</analysis><summary>{words}</summary><state_snapshot>{words}</state_snapshot>"
            case Part.MAIN:
                return self._main(prompt)
            case Part.SUB_AGENT:
                return self._sub_agent(prompt)
        return "Nothing to add."

    def _main(self, prompt: str) -> str:
        tool = script.shell_tool(prompt)
        assert tool is not None
        turn = self.played[Part.MAIN]
        if turn > MOST:
            return self._end(tool)
        if self.delegation is not None and turn == 1:
            return f"{script.THINKING}I delegate.\n{self.delegation.starts()}"
        if script.RESULT not in prompt and SUMMARY[False] not in prompt:
            return f"{script.THINKING}I write the file.\n{script.tool_call(tool, LOOK + script.COMMAND)}{self.side}"
        if self.delegation is not None and SUB_DONE not in prompt:
            wait = self.delegation.waits
            return wait(prompt) if wait else script.tool_call(tool, WAIT)
        if Part.MAIN in self.fills and not self.played[Part.COMPACTION]:
            return self._fill(tool, turn)
        return self._end(tool)

    def _fill(self, tool: dict[str, Any], turn: int) -> str:
        return f"On.\n{script.tool_call(tool, f'seq {turn} {turn + FILL}')}"

    def _end(self, tool: dict[str, Any]) -> str:
        if self.done_command:
            return f"{script.ANSWER}\n{script.tool_call(tool, self.done_command)}"
        return script.ANSWER

    def _sub_agent(self, prompt: str) -> str:
        tool = script.shell_tool(prompt)
        assert tool is not None
        if "<tool_response>" not in prompt and SUMMARY[True] not in prompt:
            return f"{script.THINKING}{script.tool_call(tool, 'pwd && date')}"
        turn = self.played[Part.SUB_AGENT]
        if Part.SUB_AGENT in self.fills and not self.played[Part.SUB_COMPACTION] and turn <= MOST:
            return self._fill(tool, turn)
        return SUB_DONE


def _claude_code(background: bool) -> Delegation:
    return Delegation(
        lambda: call(
            "Agent",
            description="look",
            prompt=SUBTASK,
            subagent_type="general-purpose",
            run_in_background=background,
        )
    )


def _codex_waits(prompt: str) -> str:
    started = re.findall(r'"agent_id":\s*"([^"]+)"', prompt)
    return call("multi_agent_v1.wait_agent", targets=started, timeout_ms=30_000)


DELEGATIONS = {
    "claude_code": _claude_code(True),
    "codex": Delegation(lambda: call("multi_agent_v1.spawn_agent", message=SUBTASK), _codex_waits),
    "qwen_code": Delegation(
        lambda: call(
            "agent",
            description="look",
            prompt=SUBTASK,
            subagent_type="general-purpose",
            run_in_background=True,
        ),
        lambda prompt: "I wait for the sub-agent.",
    ),
    "opencode": Delegation(
        lambda: call("task", description="look", prompt=SUBTASK, subagent_type="general"), background=False
    ),
}


def cast(config: RunConfig, name: str, trial: Trial, **settings: Any) -> Cast:
    """The script for a harness of conf/harness/."""
    rendering = Rendering(models.resolve(MODEL), "qwen3", thinking=False)
    return Cast(
        rendering, trial.silence_s, config.harness.done_command, delegation=DELEGATIONS.get(name), **settings
    )


async def play(config: RunConfig, engine: Cast, folder: Path, trial: Trial) -> Outcome:
    """One run of the harness in front of the script."""
    folder.mkdir(exist_ok=True)
    return await check.run(config, folder, trial, engine)


def confusion(outcome: Outcome) -> dict[Part, Counter[LeafRole]]:
    """Calls by true part and by the role that the gateway gave them."""
    table: dict[Part, Counter[LeafRole]] = {}
    for record in outcome.records:
        own = part(outcome.engine.rendering.text(record.prompt_ids.tolist()))
        table.setdefault(own, Counter())[record.role_hint] += 1
    return table
