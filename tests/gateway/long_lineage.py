"""`python long_lineage.py CALLS TOKENS`: one execution whose history grows to so many tokens, through a real gateway.

The harness (a process of its own) sends the whole history with every call. Prints one JSON line: the memory by which the
gateway process grew at most, in MB, calls and prompt tokens of the last one.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path

from aiohttp import web

from gyre_hpc.bench.gateway import ANSWER, ScriptedEngine, word_tokenizer
from gyre_hpc.config import GatewayConfig
from gyre_hpc.gateway.app import GatewayApp
from gyre_hpc.gateway.call_log import CallLog
from gyre_hpc.gateway.rendering import Rendering
from gyre_hpc.gateway.routing import Router
from gyre_hpc.gateway.server import web_app
from gyre_hpc.records import CellId, Version

HARNESS = """
import http.client, json, random, sys
address, calls, length, words = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4].split()
chance = random.Random(0)
connection = http.client.HTTPConnection(address)
messages = [{"role": "user", "content": "go"}]
tool = {"name": "bash", "description": "run", "input_schema": {"type": "object"}}
for _ in range(calls):
    body = json.dumps({"model": "m", "max_tokens": 400, "tools": [tool], "messages": messages, "stream": True})
    connection.request("POST", "/x/key/v1/messages", body, {"content-type": "application/json"})
    answer = connection.getresponse().read().decode()
    handle = "toolu_" + answer.split('"id":"toolu_')[1].split('"')[0]
    use = {"type": "tool_use", "id": handle, "name": "bash", "input": {"command": "cat notes"}}
    text = " ".join(chance.choices(words, k=length))
    messages += [
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": handle, "content": text}]},
    ]
"""
SCAFFOLD = 60
"""Tokens of a turn besides the result's text, about."""


def peak_mb() -> float:
    """Most memory since `forget_peak`."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


async def measure(folder: Path, calls: int, tokens: int) -> dict[str, float]:
    words = word_tokenizer(folder)
    rendering = Rendering(folder, "qwen3", thinking=False)
    engine = ScriptedEngine(rendering.tokenizer.encode(ANSWER))
    router = Router(lambda _: engine, lambda *_: None)
    router.route(CellId(0), "scripted", 8, Version(0))
    log = CallLog(folder / "calls.log", 1)
    app = GatewayApp(rendering, router, log, GatewayConfig(max_output_tokens=400), 1 << 21)
    app.open_execution(1, 1, "key")
    runner = web.AppRunner(web_app(app), handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = f"127.0.0.1:{runner.addresses[0][1]}"
    length = tokens // calls - SCAFFOLD
    forget_peak()
    before = peak_mb()
    harness = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", "-c", HARNESS, address, str(calls), str(length), " ".join(words)
    )
    assert await harness.wait() == 0
    grown = peak_mb() - before
    await app.close()
    await runner.cleanup()
    log.close()
    return {"grown_mb": grown, "calls": len(engine.prompts), "tokens": engine.prompts[-1]}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        sys.stdout.write(
            json.dumps(asyncio.run(measure(Path(name), int(sys.argv[1]), int(sys.argv[2])))) + "\n"
        )
