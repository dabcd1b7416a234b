"""The reference harness as a black box: a real process against a scripted endpoint on loopback."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gyre_hpc.executions.reference_harness import PROGRAM

Json = dict[str, Any]
Answer = str | tuple[str, Json]
"""Plain text, or a tool call (name, arguments)."""
DIALECTS = ["openai-chat", "anthropic-messages"]


class Endpoint:
    """Answers request i with script[i]: an Answer, or a function that writes the response itself."""

    def __init__(self, script: list[Answer | Callable[[BaseHTTPRequestHandler], None]]) -> None:
        self.script = script
        self.requests: list[Json] = []
        self.roles: list[str] = []
        self.paths: list[str] = []

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        body = json.loads(request.rfile.read(int(request.headers["content-length"])))
        step = self.script[len(self.requests)]
        self.requests.append(body)
        self.roles.append(request.headers["x-agent-role"])
        self.paths.append(request.path)
        if callable(step):
            step(request)
        elif "/chat/" in request.path:
            (_chat_stream if body.get("stream") else _chat)(request, step)
        else:
            (_messages_stream if body.get("stream") else _messages)(request, step)


def _send(request: BaseHTTPRequestHandler, status: int, kind: str, data: str, **headers: str) -> None:
    request.send_response(status)
    request.send_header("content-type", kind)
    request.send_header("content-length", str(len(data.encode())))
    for key, value in headers.items():
        request.send_header(key.replace("_", "-"), value)
    request.end_headers()
    request.wfile.write(data.encode())


def _chat(request: BaseHTTPRequestHandler, answer: Answer) -> None:
    message: Json = {"role": "assistant", "content": answer if isinstance(answer, str) else None}
    if not isinstance(answer, str):
        function = {"name": answer[0], "arguments": json.dumps(answer[1])}
        message["tool_calls"] = [{"id": f"call_{answer[0]}", "type": "function", "function": function}]
    _send(request, 200, "application/json", "  \n " + json.dumps({"choices": [{"message": message}]}))


def _chat_stream(request: BaseHTTPRequestHandler, answer: Answer) -> None:
    deltas: list[Json] = [{"role": "assistant", "content": ""}]
    if isinstance(answer, str):
        deltas += [{"content": c} for c in answer]
    else:
        text = json.dumps(answer[1])
        head = {"index": 0, "id": f"call_{answer[0]}", "type": "function"}
        deltas.append({"tool_calls": [{**head, "function": {"name": answer[0], "arguments": text[:5]}}]})
        deltas.append({"tool_calls": [{"index": 0, "function": {"arguments": text[5:]}}]})
    lines = [": keep-alive\n\n"] + [f"data: {json.dumps({'choices': [{'delta': d}]})}\n\n" for d in deltas]
    usage = 'data: {"choices": [], "usage": {}}\n\n'
    _send(request, 200, "text/event-stream", "".join(lines) + usage + "data: [DONE]\n\n")


def _blocks(answer: Answer) -> list[Json]:
    if isinstance(answer, str):
        return [{"type": "text", "text": answer}]
    return [{"type": "tool_use", "id": f"toolu_{answer[0]}", "name": answer[0], "input": answer[1]}]


def _messages(request: BaseHTTPRequestHandler, answer: Answer) -> None:
    _send(request, 200, "application/json", json.dumps({"type": "message", "content": _blocks(answer)}))


def _messages_stream(request: BaseHTTPRequestHandler, answer: Answer) -> None:
    thinking = {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "thinking", "thinking": ""},
    }
    thought = {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": ""}}
    events: list[Json] = [{"type": "message_start"}, {"type": "ping"}, thinking, thought]
    events += [{"type": "content_block_stop", "index": 0}]
    block = _blocks(answer)[0]
    if block["type"] == "text":
        parts = [{"type": "text_delta", "text": c} for c in block["text"]]
        start = {"type": "text", "text": ""}
    else:
        parts = [{"type": "input_json_delta", "partial_json": c} for c in json.dumps(block["input"])]
        start = {key: block[key] for key in ("type", "id", "name")}
    events.append({"type": "content_block_start", "index": 1, "content_block": start})
    events += [{"type": "content_block_delta", "index": 1, "delta": part} for part in parts]
    events += [{"type": "content_block_stop", "index": 1}, {"type": "message_stop"}]
    text = "".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in events)
    _send(request, 200, "text/event-stream", text)


@contextmanager
def _serve(endpoint: Endpoint) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            endpoint.handle(self)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/x/key"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _run(endpoint: Endpoint, workspace: Path, *extra: str) -> subprocess.CompletedProcess[str]:
    with _serve(endpoint) as url:
        command = [sys.executable, "-I", "-S", str(PROGRAM), "--base-url", url, "--workspace", str(workspace)]
        command += ["--instruction", "Fix it.", *extra]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)


def _texts(request: Json) -> str:
    return json.dumps(request["messages"])


@pytest.mark.parametrize("stream", [[], ["--stream"]], ids=["whole", "stream"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_tools_and_delegation_in_every_dialect(tmp_path: Path, dialect: str, stream: list[str]) -> None:
    script: list[Any] = [
        ("bash", {"command": "echo one > note; cat note"}),
        ("task", {"prompt": "fix note"}),
        ("bash", {"command": "echo two > note"}),
        "done note",
        "finished",
    ]
    endpoint = Endpoint(script)
    run = _run(endpoint, tmp_path, "--dialect", dialect, *stream)
    assert (run.returncode, run.stdout) == (0, "finished\n"), run.stderr
    assert (tmp_path / "note").read_text() == "two\n"
    assert endpoint.roles == ["main", "main", "sub-agent", "sub-agent", "main"]
    assert "one" in _texts(endpoint.requests[1])
    assert "Fix it." not in _texts(endpoint.requests[2]), "a sub-agent has its own context"
    assert "fix note" in _texts(endpoint.requests[2])
    assert len(endpoint.requests[2]["tools"]) == 1, "a sub-agent has bash only"
    assert "done note" in _texts(endpoint.requests[4])
    assert {path.split("/v1/")[0] for path in endpoint.paths} == {"/x/key"}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_history_is_append_only_until_a_summary_replaces_it(tmp_path: Path, dialect: str) -> None:
    endpoint = Endpoint([*[("bash", {"command": "true"})] * 5, "left: ash", "finished"])
    assert _run(endpoint, tmp_path, "--dialect", dialect).returncode == 0
    histories = [r["messages"] for r in endpoint.requests]
    for before, after in itertools.pairwise(histories[:6]):
        assert after[: len(before)] == before
    assert endpoint.roles[5:] == ["main-summary", "main"]
    assert "Context is full" in _texts(endpoint.requests[5])
    assert histories[6][-1]["content"] == "Fix it.\nleft: ash"
    assert "bash" not in _texts(endpoint.requests[6])


def test_faults_before_an_answer_are_retried_with_the_same_body(tmp_path: Path) -> None:
    def busy(request: BaseHTTPRequestHandler) -> None:
        _send(request, 429, "application/json", "{}", retry_after="0")

    def reset(request: BaseHTTPRequestHandler) -> None:
        request.close_connection = True
        request.connection.close()

    def cut(request: BaseHTTPRequestHandler) -> None:
        _send(request, 200, "text/event-stream", 'data: {"choices": [{"delta": {"content": "par"}}]}\n\n')

    endpoint = Endpoint([busy, reset, cut, "finished"])
    run = _run(endpoint, tmp_path, "--stream")
    assert (run.returncode, run.stdout) == (0, "finished\n")
    assert all(request == endpoint.requests[0] for request in endpoint.requests)


def test_a_400_is_final_and_not_a_failure(tmp_path: Path) -> None:
    def budget(request: BaseHTTPRequestHandler) -> None:
        _send(
            request,
            400,
            "application/json",
            '{"error": {"message": "call budget of this execution is spent"}}',
        )

    endpoint = Endpoint([("task", {"prompt": "fix ash"}), budget])
    run = _run(endpoint, tmp_path)
    assert run.returncode == 0
    assert "budget" in run.stdout
    assert len(endpoint.requests) == 2


def test_unusable_tool_calls_are_told_and_then_end_the_agent(tmp_path: Path) -> None:
    endpoint = Endpoint([("fly", {"to": "moon"}), ("bash", {"prompt": 3})])
    run = _run(endpoint, tmp_path)
    assert (run.returncode, run.stdout) == (0, "gave up\n")
    assert "error: bad call of fly" in _texts(endpoint.requests[1])


def test_turn_limits_hold_for_main_and_sub_agents(tmp_path: Path) -> None:
    sub_turns = 8
    endpoint = Endpoint(
        [("task", {"prompt": "fix ash"}), *[("bash", {"command": "true"})] * sub_turns, "x", "x"]
    )
    run = _run(endpoint, tmp_path, "--max-turns", "1")
    assert (run.returncode, run.stdout) == (0, "gave up\n")
    assert len(endpoint.requests) == 1 + sub_turns


def test_long_output_is_cut_and_stdin_is_empty(tmp_path: Path) -> None:
    endpoint = Endpoint([("bash", {"command": "cat; seq 10000"}), "finished"])
    assert _run(endpoint, tmp_path).returncode == 0
    assert len(endpoint.requests[1]["messages"][-1]["content"]) == 200
