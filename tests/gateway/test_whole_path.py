"""A separate harness program through the gateway, and the gateway with a full disk."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from pathlib import Path

import pytest

from gyre_hpc.executions import reference_harness
from gyre_hpc.gateway.rendering import Rendering
from gyre_hpc.records import Delivery, FinishReason, LeafRole

from .fakes import RunningGateway

BASH = '<tool_call>\n{"name": "bash", "arguments": {"command": "echo hi > made; cat made"}}\n</tool_call><|im_end|>'
TASK = '<tool_call>\n{"name": "task", "arguments": {"prompt": "help"}}\n</tool_call><|im_end|>'
AGENT = Path(reference_harness.__file__).parent / "agent.py"


@pytest.mark.parametrize("dialect", ["openai-chat", "anthropic-messages"])
@pytest.mark.parametrize("flags", [[], ["--stream"]])
async def test_the_reference_harness_lives_on_recorded_ids(
    gateway: RunningGateway, tmp_path: Path, dialect: str, flags: list[str]
) -> None:
    gateway.engine()
    gateway.script.answers = [BASH, TASK, BASH, "helped<|im_end|>", "all done<|im_end|>"]
    arguments = [
        "--base-url",
        gateway.url,
        "--workspace",
        str(tmp_path),
        "--instruction",
        "go",
        "--dialect",
        dialect,
    ]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", str(AGENT), *arguments, *flags, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert (
        process.returncode == 0
        and output.strip() == b"all done"
        and (tmp_path / "made").read_text() == "hi\n"
    )
    records = await gateway.records()
    assert [r.role_hint for r in records] == [
        LeafRole.MAIN, LeafRole.MAIN, LeafRole.SUB_AGENT, LeafRole.SUB_AGENT, LeafRole.MAIN,
    ]  # fmt: skip
    assert all(r.accepted and r.delivery is Delivery.COMPLETE and r.dialect == dialect for r in records)
    assert [r.finish for r in records] == [FinishReason.TOOL_CALLS] * 3 + [FinishReason.STOP] * 2
    for parent, child in ((0, 1), (2, 3), (1, 4)):
        known = [*records[parent].prompt_ids, *records[parent].output_ids]
        assert records[child].prompt_ids[: len(known)].tolist() == known
    assert not gateway.app.executions[7, 1].lineage.mismatches


async def test_a_full_disk_holds_answers_and_refuses_calls_until_there_is_room(
    gateway: RunningGateway,
) -> None:
    full = [False]

    def write(handle: int, data: bytes) -> int:
        if full[0]:
            raise OSError(errno.ENOSPC, "full")
        return os.write(handle, data)

    gateway.app.log._write = write
    gateway.script.answers = ["first<|im_end|>", "second<|im_end|>"]
    engine = gateway.engine(pause_after=2)
    running = asyncio.create_task(gateway.chat([{"role": "user", "content": "one"}]))
    await engine.waiting.wait()
    full[0] = True
    engine.go.set()
    (call,) = gateway.app.executions[7, 1].calls.values()
    await call.done.wait()
    refused = await gateway.chat([{"role": "user", "content": "two"}])
    assert refused["status"] == 503 and str(gateway.path) in refused["error"]["message"]
    assert not running.done()
    full[0] = False
    gateway.app.log.check()
    assert (await running)["choices"][0]["message"]["content"] == "first"
    assert (await gateway.chat([{"role": "user", "content": "two"}]))["status"] == 200
    first, second = await gateway.records()
    assert gateway.app.rendering.text(first.output_ids.tolist()) == "first<|im_end|>" and second.ordinal == 1


async def test_executions_do_not_see_each_other(gateway: RunningGateway, rendering: Rendering) -> None:
    gateway.engine()
    gateway.app.open_execution(8, 1, "other")
    gateway.script.answers = [BASH, "x<|im_end|>"]
    answer = await gateway.chat([{"role": "user", "content": "go"}])
    history = [{"role": "user", "content": "go"}, answer["choices"][0]["message"]]
    history.append({"role": "tool", "tool_call_id": history[1]["tool_calls"][0]["id"], "content": "ok"})
    gateway.url = gateway.url.rsplit("/", 1)[0] + "/other"
    await gateway.chat(history)
    reasons = gateway.app.executions[8, 1].lineage.mismatches
    assert list(reasons) == ["unknown_handle"]
