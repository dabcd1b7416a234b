"""Demonstrations are what a run would have sent: same ids, same shell, decisions as noisy as asked for."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gyre_hpc.executions.patchkit import PatchkitFamily, PatchkitTask
from gyre_hpc.executions.reference_harness import PROGRAM
from gyre_hpc.executions.reference_harness.agent import BASH, TASK, bash
from gyre_hpc.gateway.rendering import Rendering
from gyre_hpc.warmstart.demonstrator import CLEAN, CLUMSY, NOISY, Demonstrator, EmulatedShell, demonstrate
from gyre_hpc.warmstart.make import RENDERER, THINKING

MODEL = Path(__file__).parents[2] / "gyre_hpc" / "models" / "patchkit"
FAMILY = PatchkitFamily()


@pytest.fixture(scope="module")
def rendering() -> Rendering:
    return Rendering(MODEL, RENDERER, THINKING)


def _large_task() -> PatchkitTask:
    """Many unwritten modules: several sub-agents and a summary."""
    return next(t for t in map(FAMILY.task, itertools.count(700_000)) if len(t.unwritten) == 6)


class _Endpoint(BaseHTTPRequestHandler):
    """Answers as the demonstrator decides; renders every request afresh from what came over the wire."""

    protocol_version = "HTTP/1.1"
    demonstrator: Demonstrator
    prompts: list[list[int]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.prompts.append(self.demonstrator.rendering.render(body["messages"], body["tools"]))
        tools = [BASH, TASK][: len(body["tools"])]
        system, history = body["messages"][0]["content"], body["messages"][1:]
        turn = self.demonstrator.complete(self.headers["x-agent-role"], system, history, tools)
        answer = json.dumps({"choices": [{"message": turn.message}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_the_harness_program_meets_the_very_ids_of_the_demonstration(
    rendering: Rendering, tmp_path: Path
) -> None:
    task = _large_task()
    task.prepare(tmp_path)
    demonstrator = Demonstrator(task, rendering, CLUMSY, random.Random(3))
    prompts: list[list[int]] = []
    handler = type("Handler", (_Endpoint,), {"demonstrator": demonstrator, "prompts": prompts})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        command = [sys.executable, "-I", "-S", str(PROGRAM), "--base-url", url, "--workspace", str(tmp_path)]
        command += ["--instruction", task.instruction, "--max-turns", "64"]
        subprocess.run(command, check=True, timeout=120, capture_output=True)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    windows = demonstrate(task, rendering, CLUMSY, random.Random(3))
    assert len(windows) > 3
    assert [w.role for w in windows].count("main") >= 2, "the history was replaced by a summary"
    expected = [_prompts(w.ids, w.mask) for w in windows]
    assert sorted(prompts) == sorted(itertools.chain(*expected))


def _prompts(ids: list[int], mask: list[int]) -> list[list[int]]:
    """What stands before each answer of a window."""
    return [ids[:at] for at in range(1, len(ids)) if mask[at] and not mask[at - 1]]


def test_the_emulated_shell_answers_like_bash(tmp_path: Path) -> None:
    task, draw = _large_task(), random.Random(0)
    task.prepare(tmp_path)
    emulated = EmulatedShell(task)
    names = [m.name for m in task.modules]
    for _ in range(12):
        name, operator, constant = draw.choice(names), draw.choice("+-*%"), draw.randint(2, 9)
        right = draw.random() < 0.5
        module = next(m for m in task.modules if m.name == name)
        body = f"{module.operator} {module.constant}" if right else f"{operator} {constant}"
        for command in (
            f"sed -i '3s/.*/    return x {body}/' {name}.py",
            f"cat {name}.py",
            f"sh check {name}",
        ):
            assert emulated(command) == bash(str(tmp_path), command)
    assert emulated("sh check") == bash(str(tmp_path), "sh check")


def test_answers_parse_back_to_what_was_demonstrated(rendering: Rendering) -> None:
    for window in demonstrate(_large_task(), rendering, CLEAN, random.Random(0)):
        for at in range(1, len(window.ids)):
            if window.mask[at] and not window.mask[at - 1]:
                end = next((i for i in range(at, len(window.ids)) if not window.mask[i]), len(window.ids))
                answer = rendering.parse(window.ids[at:end])
                assert answer.status == "ok"
                assert bool(answer.tool_calls) != bool(answer.content)
                assert window.ids[end - 1] in rendering.stop_ids


def test_noise_shows_only_in_decisions(rendering: Rendering) -> None:
    def edits(draw: random.Random) -> str:
        return "".join(rendering.text(w.ids) for w in demonstrate(_large_task(), rendering, NOISY, draw))

    task = _large_task()
    clean = "".join(rendering.text(w.ids) for w in demonstrate(task, rendering, CLEAN, random.Random(0)))
    for module in task.unwritten:
        assert f"return x {module.operator} {module.constant}/' {module.name}.py" in clean
    assert len({edits(random.Random(seed)) for seed in range(6)}) > 1
    assert edits(random.Random(1)) == edits(random.Random(1))
