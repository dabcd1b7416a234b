"""A whole execution: patchkit workspace, reference harness in the sandbox, a model on loopback, hidden tests."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from gyre_hpc.config import RunConfig
from gyre_hpc.executions.attempts import Attempts
from gyre_hpc.executions.launcher import Launcher
from gyre_hpc.executions.patchkit.family import PatchkitFamily
from gyre_hpc.executions.runner import prepare
from gyre_hpc.layout import RunLayout
from gyre_hpc.records import ClosingReason, ExecutionId
from gyre_hpc.transport.messages import ExecutionAssessed, ExecutionClosed, Message, StartExecution

SEED = 1_000_003


def solution() -> str:
    """A command that writes every missing body."""
    edits = [
        f"sed -i 's/return None/return x {module.operator} {module.constant}/' {module.name}.py"
        for module in PatchkitFamily().task(SEED).unwritten
    ]
    return "; ".join(edits)


class Model(BaseHTTPRequestHandler):
    """Calls bash once with the solution, then says that it is done."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        message: dict[str, object] = {"role": "assistant", "content": "done"}
        if not any(turn["role"] == "tool" for turn in request["messages"]):
            function = {"name": "bash", "arguments": json.dumps({"command": solution()})}
            message["tool_calls"] = [{"id": "call_1", "type": "function", "function": function}]
        body = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""


@pytest.fixture
def model() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/x/key"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("policy", ["none", pytest.param("userns", marks=pytest.mark.userns)])
async def test_a_solved_task_scores_one(launcher: Launcher, model: str, tmp_path: Path, policy: str) -> None:
    config = RunConfig(trust_tasks=policy == "none")
    config.tasks.sandbox = policy
    reports: asyncio.Queue[Message] = asyncio.Queue()
    attempts = Attempts(await prepare(config, RunLayout(tmp_path), launcher), reports.put_nowait)
    attempts.start(StartExecution(ExecutionId(0), 0, f"patchkit:{SEED}", model, 1, False))
    _, closed, assessed = [await reports.get() for _ in range(3)]
    await attempts.close()
    assert isinstance(closed, ExecutionClosed) and isinstance(assessed, ExecutionAssessed)
    assert (closed.reason, closed.detail) == (ClosingReason.COMPLETED, "")
    assert assessed.assessment.score == 1.0
