"""The scripted agent finds the shell tool of a harness in its prompt and calls it as its schema asks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gyre_hpc import models
from gyre_hpc.engines.wire import EncodedIds
from gyre_hpc.gateway.rendering import Rendering
from gyre_hpc.harnesses import script
from gyre_hpc.harnesses.stand import MODEL


@pytest.fixture(scope="module")
def rendering() -> Rendering:
    return Rendering(models.resolve(MODEL), "qwen3", thinking=False)


def tool(name: str, required: list[str], **kinds: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in kinds.items()}
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


OTHERS = [tool("read", ["path"], path="string"), tool("plan", ["command"], command="array")]


@pytest.mark.parametrize(
    ("shell", "arguments"),
    [
        (tool("Bash", ["command"], command="string", timeout="number"), {"command": "go"}),
        (tool("exec_command", ["cmd"], cmd="string"), {"cmd": "go"}),
        (
            tool("run", ["command", "description", "is_background"], command="string", description="string", is_background="boolean"),
            {"command": "go", "description": "check", "is_background": False},
        ),
    ],
)  # fmt: skip
def test_the_shell_tool_is_called_as_its_schema_asks(
    rendering: Rendering, shell: dict[str, Any], arguments: dict[str, Any]
) -> None:
    prompt = rendering.text(rendering.render([{"role": "user", "content": "x"}], [*OTHERS, shell]))
    found = script.shell_tool(prompt)
    assert found is not None and found["name"] == shell["function"]["name"]
    call = json.loads(script.tool_call(found, "go").split("\n")[1])
    assert call == {"name": found["name"], "arguments": arguments}


async def test_the_agent_acts_once_reads_its_result_and_answers(rendering: Rendering) -> None:
    engine = script.ScriptedEngine(rendering, silence_s=0.0)
    tools = [tool("bash", ["command"], command="string")]
    said = []
    for content in ("task", f"task\n{script.COMMAND}", f"task\n{script.RESULT}"):
        ids = rendering.render([{"role": "user", "content": content}], tools)
        chunks = [chunk async for chunk in engine.generate("r", EncodedIds.of(ids), 400, "w0")]
        said.append(rendering.parse([token for chunk in chunks for token in chunk.ids]))
    assert [len(answer.tool_calls) for answer in said] == [2, 2, 0] and script.FINAL_WORD in said[2].content
    side = rendering.render([{"role": "user", "content": "title"}])
    chunks = [chunk async for chunk in engine.generate("r", EncodedIds.of(side), 400, "w0")]
    assert chunks[-1].finish == "stop" and (engine.task_calls, engine.side_calls) == (3, 1)
