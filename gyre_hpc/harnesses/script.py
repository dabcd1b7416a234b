"""The scripted agent: the engine of a harness check, and the only fake in it.

It reads the prompt it is given, as a model would: a prompt with a shell tool is answered by thinking, a text and two calls
of that tool, one of which writes a file; once the result stands in the prompt, by the final answer; any other prompt
(titles and the like) by a word. Its first answer to the task comes after a silence, in which the gateway must keep the harness alive.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from gyre_hpc.engines.client import Chunk
from gyre_hpc.engines.wire import EncodedIds
from gyre_hpc.gateway.rendering import Rendering
from gyre_hpc.records import Version

FILE, CONTENT = "made-by-check.txt", "made by the agent"
COMMAND = f"printf '{CONTENT}' > {FILE} && echo result-$((6 * 7))-of-the-check"
BESIDE = "pwd"
"""A second call in the same answer."""
THINKING = "<think>\nOne command does it.\n</think>\n\n"
RESULT = "result-42-of-the-check"
"""In a prompt only if the command was really carried out."""
ANSWER = "The file is written: final-answer-of-the-check."
FINAL_WORD = "final-answer-of-the-check"
MOST_CALLS = 6
"""After so many calls whose result never came the agent gives its answer anyway."""
INSTRUCTION = (
    f"Write the text '{CONTENT}' to the file {FILE} with one shell command, then say that you are done."
)
SHELL_ARGUMENTS = ("command", "cmd", "script")
SHELL_NAMES = re.compile("shell|bash|exec", re.IGNORECASE)
_TOOLS = re.compile(r"<tools>\n(.*?)\n</tools>", re.DOTALL)
_FILLING: dict[str, Any] = {"boolean": False, "integer": 1, "number": 1, "array": [], "object": {}}


@dataclass
class ScriptedEngine:
    """`silence_s` is how long the first answer to the task takes. Serves `routing.Engine`."""

    rendering: Rendering
    silence_s: float
    done_command: str = ""
    task_calls: int = 0
    side_calls: int = 0
    results_seen: int = 0
    tool: str = ""
    """Name of the shell tool found in the prompt."""
    aborted: set[str] = field(default_factory=set)

    async def generate(
        self,
        rid: str,
        input_ids: EncodedIds,
        max_new_tokens: int,
        kv_key: str,
        stop_token_ids: Sequence[int] = (),
    ) -> AsyncIterator[Chunk]:
        text, silent = self.answer(self.rendering.text(input_ids.ids()))
        ids = self.rendering.tokenizer.encode(text)[:max_new_tokens]
        half = len(ids) // 2
        yield _chunk(ids[:half], input_ids.count, None)
        if silent:
            await asyncio.sleep(self.silence_s)
        yield _chunk(ids[half:], input_ids.count, "stop")

    async def abort(self, rid: str) -> None:
        self.aborted.add(rid)

    def answer(self, prompt: str) -> tuple[str, bool]:
        """(the answer to a prompt, whether a silence comes in the middle of it)."""
        tool = shell_tool(prompt)
        if tool is None:
            self.side_calls += 1
            return "Nothing to add.<|im_end|>", False
        self.task_calls += 1
        self.tool = str(tool["name"])
        if RESULT not in prompt and self.task_calls <= MOST_CALLS:
            calls = f"{tool_call(tool, COMMAND)}\n{tool_call(tool, BESIDE)}"
            return f"{THINKING}I write the file.\n{calls}<|im_end|>", self.task_calls == 1
        self.results_seen += RESULT in prompt
        if self.done_command:
            return f"{ANSWER}\n{tool_call(tool, self.done_command)}<|im_end|>", False
        return f"{ANSWER}<|im_end|>", False


def shell_tool(prompt: str) -> dict[str, Any] | None:
    """The tool in a prompt that takes a shell command as text; among several, one that is named after a shell."""
    found = _TOOLS.search(prompt)
    offered = [json.loads(line)["function"] for line in found.group(1).splitlines()] if found else []
    fitting: list[dict[str, Any]] = [tool for tool in offered if _takes_command(tool)]
    named = (tool for tool in fitting if SHELL_NAMES.search(tool["name"]))
    return next(named, fitting[0] if fitting else None)


def _takes_command(tool: dict[str, Any]) -> bool:
    properties = tool.get("parameters", {}).get("properties", {})
    return any(properties.get(name, {}).get("type") == "string" for name in SHELL_ARGUMENTS)


def tool_call(tool: dict[str, Any], command: str) -> str:
    """A call of the tool with this command and something fitting in every other required argument."""
    parameters = tool["parameters"]
    properties = parameters["properties"]
    arguments = {
        name: _FILLING.get(str(properties.get(name, {}).get("type")), "check")
        for name in parameters.get("required", ())
    }
    arguments[next(name for name in SHELL_ARGUMENTS if name in properties)] = command
    return f"<tool_call>\n{json.dumps({'name': tool['name'], 'arguments': arguments})}\n</tool_call>"


def _chunk(ids: list[int], prompt: int, finish: str | None) -> Chunk:
    return Chunk(ids, [0.0] * len(ids), [Version(0)] * len(ids), finish, 0, prompt)
