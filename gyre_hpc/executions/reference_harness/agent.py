"""A small coding agent for any endpoint that speaks OpenAI Chat Completions or Anthropic Messages.

    python3 -I -S agent.py --base-url URL --workspace DIR --instruction TEXT
        [--max-turns N] [--seed S] [--dialect openai-chat|anthropic-messages] [--stream]

Standard library only, cheap to start. The main agent has the tools `bash` and `task`; `task` hands a prompt to a
sub-agent with its own context and only `bash`. After COMPACT_AFTER tool results the model is asked for a summary, which
replaces the history. Transport errors, 429 and 5xx are retried with back-off; a 400 (budget spent, context full) ends the
run. Each request says in `x-agent-role` who asks: main, main-summary or sub-agent.

Exit codes: 0 done, or ended by a limit or a 400; 3 the endpoint kept failing. The last word of the agent goes to stdout.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol

MAIN_SYSTEM = "You lead. Give each failing module to a task."
SUB_SYSTEM = "You fix one module."
COMPACT = "Context is full. List the modules left."
COMPACT_AFTER = 5
"""Tool results of the main agent between two summaries."""
SUB_TURNS = 8
TOOL_ERRORS = 2
"""Unusable tool calls after which an agent gives up."""
BASH_SECONDS = 30
OUTPUT_CHARS = 200
ATTEMPTS = 10
BACK_OFF_S, BACK_OFF_CAP_S = 0.5, 30.0
READ_TIMEOUT_S = 600

Json = dict[str, Any]


class Tool(NamedTuple):
    """A tool as the model sees it: one string argument."""

    name: str
    description: str
    argument: str

    def schema(self) -> Json:
        return {
            "type": "object",
            "properties": {self.argument: {"type": "string"}},
            "required": [self.argument],
        }


BASH = Tool("bash", "Run a command.", "command")
TASK = Tool("task", "Start a sub-agent.", "prompt")


class Call(NamedTuple):
    """A tool call the model asked for; `arguments` is None if they were not JSON."""

    id: str
    name: str
    arguments: Any


class Turn(NamedTuple):
    """One answer: the message to echo in the history, its text, its tool calls."""

    message: Json
    text: str
    calls: list[Call]


class Refused(Exception):
    """The endpoint answered 400: final."""


class Unavailable(Exception):
    """The endpoint failed ATTEMPTS times."""


class Transient(Exception):
    """Worth another attempt, after `wait` seconds at least."""

    def __init__(self, cause: str, wait: float = 0.0) -> None:
        super().__init__(cause)
        self.wait = wait


class ChatCompletions:
    """The OpenAI Chat Completions dialect."""

    path = "/v1/chat/completions"

    def body(self, system: str, history: list[Json], tools: list[Tool]) -> Json:
        functions = [
            {
                "type": "function",
                "function": {"name": t.name, "description": t.description, "parameters": t.schema()},
            }
            for t in tools
        ]
        return {"messages": [{"role": "system", "content": system}, *history], "tools": functions}

    def results(self, results: list[tuple[str, str]]) -> list[Json]:
        return [{"role": "tool", "tool_call_id": call, "content": text} for call, text in results]

    def turn(self, answer: Json) -> Turn:
        message = answer["choices"][0]["message"]
        calls = [
            Call(c["id"], c["function"]["name"], _parse(c["function"]["arguments"]))
            for c in message.get("tool_calls") or []
        ]
        return Turn(message, message.get("content") or "", calls)

    def assemble(self, events: Iterator[str]) -> Json:
        text = ""
        calls: dict[int, Json] = {}
        for data in events:
            if data == "[DONE]":
                message: Json = {"role": "assistant", "content": text}
                if calls:
                    message["tool_calls"] = [calls[i] for i in sorted(calls)]
                return {"choices": [{"message": message}]}
            for choice in json.loads(data).get("choices", []):
                delta = choice.get("delta", {})
                text += delta.get("content") or ""
                for part in delta.get("tool_calls") or []:
                    empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
                    call = calls.setdefault(part["index"], empty)
                    call["id"] = part.get("id") or call["id"]
                    for key, value in part.get("function", {}).items():
                        call["function"][key] += value or ""
        raise Transient("stream ended before [DONE]")


class Messages:
    """The Anthropic Messages dialect."""

    path = "/v1/messages"

    def body(self, system: str, history: list[Json], tools: list[Tool]) -> Json:
        definitions = [
            {"name": t.name, "description": t.description, "input_schema": t.schema()} for t in tools
        ]
        return {"system": system, "messages": history, "tools": definitions}

    def results(self, results: list[tuple[str, str]]) -> list[Json]:
        blocks = [{"type": "tool_result", "tool_use_id": call, "content": text} for call, text in results]
        return [{"role": "user", "content": blocks}]

    def turn(self, answer: Json) -> Turn:
        blocks = answer["content"]
        text = "".join(b["text"] for b in blocks if b["type"] == "text")
        calls = [Call(b["id"], b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"]
        return Turn({"role": "assistant", "content": blocks}, text, calls)

    def assemble(self, events: Iterator[str]) -> Json:
        blocks: list[Json] = []
        for data in events:
            event = json.loads(data)
            kind, delta = event["type"], event.get("delta", {})
            if kind == "message_stop":
                return {"content": blocks}
            if kind == "content_block_start":
                blocks.append({**event["content_block"]})
            elif kind == "content_block_delta":
                for key, field in (("text", "text"), ("thinking", "thinking"), ("signature", "signature")):
                    if key in delta:
                        blocks[-1][field] = blocks[-1].get(field, "") + delta[key]
                if "partial_json" in delta:
                    blocks[-1]["json"] = blocks[-1].get("json", "") + delta["partial_json"]
            elif kind == "content_block_stop" and blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = _parse(blocks[-1].pop("json", "") or "{}")
        raise Transient("stream ended before message_stop")


DIALECTS: dict[str, type[ChatCompletions] | type[Messages]] = {
    "openai-chat": ChatCompletions,
    "anthropic-messages": Messages,
}


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


class Model(Protocol):
    """Whoever answers: the endpoint, or a demonstrator."""

    @property
    def dialect(self) -> ChatCompletions | Messages: ...

    def complete(self, role: str, system: str, history: list[Json], tools: list[Tool]) -> Turn: ...


class Client:
    """Sends requests over one kept-alive connection and retries what is worth it."""

    def __init__(self, base_url: str, dialect: str, stream: bool, seed: int) -> None:
        address, _, prefix = base_url.rstrip("/").removeprefix("http://").partition("/")
        self.dialect = DIALECTS[dialect]()
        self.url = (f"/{prefix}" if prefix else "") + self.dialect.path
        self.stream = stream
        self.jitter = 1.0 + (seed * 2654435761 % 1000) / 2000
        self.connection = http.client.HTTPConnection(address, timeout=READ_TIMEOUT_S)

    def complete(self, role: str, system: str, history: list[Json], tools: list[Tool]) -> Turn:
        """The model's next turn. Raises Refused (400) or Unavailable (retries spent)."""
        body = {"model": "policy", "max_tokens": 1024, **self.dialect.body(system, history, tools)}
        if self.stream:
            body["stream"] = True
        data = json.dumps(body).encode()
        cause = ""
        for attempt in range(ATTEMPTS):
            try:
                return self.dialect.turn(self._post(data, role))
            except (Transient, OSError, http.client.HTTPException, ValueError) as error:
                self.connection.close()
                cause = str(error)
                wait = min(BACK_OFF_CAP_S, BACK_OFF_S * 2**attempt) * self.jitter
                time.sleep(max(wait, error.wait) if isinstance(error, Transient) else wait)
        raise Unavailable(f"{self.url}: {cause}")

    def _post(self, data: bytes, role: str) -> Json:
        headers = {
            "content-type": "application/json",
            "x-agent-role": role,
            "anthropic-version": "2023-06-01",
        }
        self.connection.request("POST", self.url, data, headers)
        response = self.connection.getresponse()
        if response.status == 200:
            if not self.stream:
                return dict(json.loads(response.read()))
            answer = self.dialect.assemble(_events(response))
            response.read()
            return answer
        text = response.read().decode("utf-8", "replace")[:500]
        if response.status in (408, 409, 429) or response.status >= 500:
            after = response.getheader("retry-after") or "0"
            raise Transient(f"{response.status} {text}", float(after) if after.isdigit() else 0.0)
        raise Refused(f"{response.status} {text}")


def _events(response: http.client.HTTPResponse) -> Iterator[str]:
    """The data of server-sent events; comments and event names carry nothing this program needs."""
    for line in response:
        if line.startswith(b"data:"):
            yield line[5:].decode().strip()


class Agent:
    """One context: a system prompt, a history, tools and limits."""

    def __init__(
        self, model: Model, shell: Callable[[str], str], role: str, system: str, tools: list[Tool], turns: int
    ) -> None:
        self.model, self.shell = model, shell
        self.role, self.system, self.tools = role, system, tools
        self.turns, self.errors, self.since_compact = turns, 0, 0
        self.history: list[Json] = []

    def run(self, instruction: str) -> str:
        """Work until the model answers without a tool call or a limit is reached; the last text."""
        self.history = [{"role": "user", "content": instruction}]
        for _ in range(self.turns):
            turn = self.model.complete(self.role, self.system, self.history, self.tools)
            self.history.append(turn.message)
            if not turn.calls:
                return turn.text
            self.history += self.model.dialect.results([(call.id, self._use(call)) for call in turn.calls])
            if self.errors >= TOOL_ERRORS:
                break
            self.since_compact += len(turn.calls)
            if self.role == "main" and self.since_compact >= COMPACT_AFTER:
                self._compact(instruction)
        return "gave up"

    def _use(self, call: Call) -> str:
        """Carry out one tool call; what the model is told."""
        tool = next((t for t in self.tools if t.name == call.name), None)
        value = call.arguments.get(tool.argument) if tool and isinstance(call.arguments, dict) else None
        if tool is None or not isinstance(value, str):
            self.errors += 1
            return f"error: bad call of {call.name}"[:OUTPUT_CHARS]
        if tool is BASH:
            return self.shell(value)
        helper = Agent(self.model, self.shell, "sub-agent", SUB_SYSTEM, [BASH], SUB_TURNS)
        return helper.run(value[:OUTPUT_CHARS])[:OUTPUT_CHARS]

    def _compact(self, instruction: str) -> None:
        """Replace the history by the instruction and the model's own summary of what is left."""
        question = {"role": "user", "content": COMPACT}
        turn = self.model.complete("main-summary", self.system, [*self.history, question], self.tools)
        self.history = [{"role": "user", "content": f"{instruction}\n{turn.text[:OUTPUT_CHARS]}"}]
        self.since_compact = 0


def main_agent(model: Model, shell: Callable[[str], str], turns: int) -> Agent:
    """The agent that gets the user's instruction."""
    return Agent(model, shell, "main", MAIN_SYSTEM, [BASH, TASK], turns)


def bash(workspace: str, command: str) -> str:
    """Output of `bash -c COMMAND` in the workspace, cut to OUTPUT_CHARS; the whole process group ends with it."""
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=workspace,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output = process.communicate(timeout=BASH_SECONDS)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return f"timeout after {BASH_SECONDS} s"
    return output.decode("utf-8", "replace").strip()[:OUTPUT_CHARS]


def main(arguments: list[str]) -> int:
    """Run the agent; the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--workspace", required=True)
    parser.add_argument("--instruction", required=True)
    parser.add_argument("--max-turns", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dialect", choices=sorted(DIALECTS), default="openai-chat")
    parser.add_argument("--stream", action="store_true")
    options = parser.parse_args(arguments)
    client = Client(options.base_url, options.dialect, options.stream, options.seed)
    agent = main_agent(client, partial(bash, options.workspace), options.max_turns)
    try:
        last = agent.run(options.instruction)
    except Refused as refusal:
        last = f"refused: {refusal}"
    except Unavailable as error:
        sys.stderr.write(f"endpoint unavailable: {error}\n")
        return 3
    sys.stdout.write(last + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
