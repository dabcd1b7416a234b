"""`gyre bench gateway`: CPU of the gateway process per model call.

Counted: HTTP, parse, canonicalise, match, render the delta, encode the engine request, log, reply. The engine is the
fake border (`ScriptedEngine`): it encodes the request exactly as `engines.client` does and answers at once. The harness
is a process of its own, so its CPU does not count. A new turn brings 20 words: encoding a longer one comes on top.
Baseline of the same run: rendering the whole history afresh for
each call, on top of which such a gateway would do all the rest. Yardstick of the machine, measured in turns with the
gateway: a web handler that reads the same request body and answers as many bytes, and does nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop
from aiohttp import web
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gyre_hpc.bench.figure import Figure
from gyre_hpc.config import GatewayConfig
from gyre_hpc.engines.client import Chunk, generate_options
from gyre_hpc.engines.wire import EncodedIds, encode_generate
from gyre_hpc.gateway.app import GatewayApp
from gyre_hpc.gateway.call_log import CallLog
from gyre_hpc.gateway.rendering import Rendering
from gyre_hpc.gateway.routing import Router
from gyre_hpc.gateway.server import EDGE, gateway_runner
from gyre_hpc.records import CellId, Version

SPECIALS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>",
    "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
TOKENS_PER_CHUNK = 8
BATCHES, BATCH = 9, 3
"""Measured calls per figure; the figure is the median over the batches, for a box that is shared."""


@dataclass(frozen=True)
class History:
    """How the harness gets to the histories that are measured: `turns` tool results of `words` words each.

    `conversations` of them, each of its own execution; the batches are shared out among them.
    """

    conversations: int
    turns: int
    words: int


SMALL, LARGE, HUGE = History(9, 3, 341), History(1, 94, 945), History(1, 150, 6_557)
"""Histories whose measured calls have a median of 2,000, of 100,000 and of a million prompt tokens (5 MB of JSON)."""
ANSWER = (
    'I look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "cat notes"}}\n</tool_call><|im_end|>'
)

HARNESS = """
import http.client, json, sys
gateway, empty, words = sys.argv[1], sys.argv[2], sys.argv[3].split()
conversations, turns, long, batches, batch = map(int, sys.argv[4:])
connection, yardstick = http.client.HTTPConnection(gateway), http.client.HTTPConnection(empty)
tool = {"name": "bash", "description": "run", "input_schema": {"type": "object"}}
body = {"model": "m", "max_tokens": 200, "system": "be brief", "tools": [tool], "stream": True}
state = 1
def text(count):
    global state
    picked = []
    for _ in range(count):
        state = state * 6364136223846793005 % 2**64
        picked.append(words[(state >> 33) % len(words)])
    return " ".join(picked)
def post(connection, path):
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    return connection.getresponse().read().decode()
def call():
    answer = post(connection, f"/x/key{conversation}/v1/messages")
    handle = answer.split('"id":"toolu_')[1].split('"')[0]
    use = {"type": "tool_use", "id": "toolu_" + handle, "name": "bash", "input": {"command": "cat notes"}}
    messages.append({"role": "assistant", "content": [{"type": "text", "text": "I look."}, use]})
    return len(answer)
def result(count):
    block = {"type": "tool_result", "tool_use_id": messages[-1]["content"][1]["id"], "content": text(count)}
    messages.append({"role": "user", "content": [block]})
def ready():
    print("ready", flush=True)
    sys.stdin.readline()
for conversation in range(conversations):
    messages = body["messages"] = [{"role": "user", "content": "go"}]
    call()
    for _ in range(turns):
        result(long)
        call()
    for _ in range(batches // conversations):
        ready()
        for _ in range(batch):
            result(20)
            size = call()
        ready()
        for _ in range(batch):
            post(yardstick, f"/?size={size}")
        ready()
"""


class ScriptedEngine:
    """The fake border: the interface of EngineClient, its encoding of the request, and the same answer every time."""

    def __init__(self, answer: list[int]) -> None:
        pieces = [answer[at : at + TOKENS_PER_CHUNK] for at in range(0, len(answer), TOKENS_PER_CHUNK)]
        self._chunks = [
            Chunk(
                ids, [-0.5] * len(ids), [Version(0)] * len(ids), "stop" if ids is pieces[-1] else None, 0, 0
            )
            for ids in pieces
        ]
        self.encoded = 0
        self.prompts: list[int] = []
        """Prompt tokens of all calls."""

    async def generate(
        self,
        rid: str,
        input_ids: EncodedIds,
        max_new_tokens: int,
        kv_key: str,
        stop_token_ids: Sequence[int] = (),
    ) -> AsyncIterator[Chunk]:
        options = generate_options(rid, max_new_tokens, kv_key, stop_token_ids)
        self.encoded += len(encode_generate(input_ids, options))
        self.prompts.append(input_ids.count)
        for chunk in self._chunks:
            yield chunk

    async def abort(self, rid: str) -> None:
        return None


def word_tokenizer(folder: Path) -> list[str]:
    """A tokenizer in which each of 800 words of four letters is one token (5 bytes a token, as in real text)."""
    chance = random.Random(0)
    words = sorted({"".join(chance.choice("abcdefghijklmnop") for _ in range(4)) for _ in range(800)})
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: index for index, text in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in words:
        left = "Ġ"
        for letter in word:
            if left + letter not in vocab:
                vocab[left + letter] = len(vocab)
                merges.append((left, letter))
            left += letter
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    return words


@dataclass(frozen=True)
class Measured:
    """Medians of one history's measured calls: CPU ms of the gateway and of the empty handler, prompt tokens."""

    gateway_ms: float
    empty_ms: float
    tokens: int
    render_ms: float
    """CPU ms of rendering such a history once."""


async def _empty(request: web.Request) -> web.Response:
    await request.read()
    return web.Response(body=b" " * int(request.query["size"]))


@contextlib.asynccontextmanager
async def _serving(runner: web.AppRunner) -> AsyncIterator[str]:
    """The application on a free port; its host:port."""
    await runner.setup()
    listening = socket.create_server(("127.0.0.1", 0))
    host, port = listening.getsockname()
    edge = runner.app.get(EDGE)
    if edge is not None:
        server = await edge.serve(runner, listening)
    else:
        await web.SockSite(runner, listening).start()
    yield f"{host}:{port}"
    if edge is not None:
        server.close()
    await runner.cleanup()


async def _measure(rendering: Rendering, words: list[str], folder: Path, history: History) -> Measured:
    engine = ScriptedEngine(rendering.tokenizer.encode(ANSWER))
    router = Router(lambda _: engine, lambda *_: None)
    router.route(CellId(0), "scripted", 8, Version(0))
    log = CallLog(folder / f"calls-{history.turns}.log", 1)
    app = GatewayApp(rendering, router, log, GatewayConfig(max_output_tokens=200), 1 << 20)
    for execution in range(history.conversations):
        app.open_execution(execution, 1, f"key{execution}")
    empty = web.Application(client_max_size=1 << 30)
    empty.router.add_post("/", _empty)
    plain = web.AppRunner(empty, handler_cancellation=True, access_log=None)
    async with _serving(gateway_runner(app, 1.0)) as gateway_address, _serving(plain) as empty_address:
        gateway_ms, empty_ms, tokens = await _drive(
            engine, [gateway_address, empty_address, " ".join(words)], history
        )
        await app.close()
    log.close()
    return Measured(gateway_ms, empty_ms, tokens, _render_cost(rendering, words, history))


async def _drive(engine: ScriptedEngine, borders: list[str], history: History) -> tuple[float, float, int]:
    """Run the harness: medians of the gateway's and the empty handler's CPU ms per call, and of the prompt tokens."""
    numbers = [history.conversations, history.turns, history.words, BATCHES, BATCH]
    harness = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", "-c", HARNESS, *borders, *map(str, numbers), stdin=-1, stdout=-1
    )
    assert harness.stdin is not None and harness.stdout is not None
    gateway: list[float] = []
    empty: list[float] = []
    tokens: list[int] = []
    while await harness.stdout.readline():
        for spent in (gateway, empty):
            started = time.process_time()
            harness.stdin.write(b"\n")
            await harness.stdout.readline()
            spent.append((time.process_time() - started) / BATCH * 1000)
        tokens += engine.prompts[-BATCH:]
        harness.stdin.write(b"\n")
    await harness.wait()
    return statistics.median(gateway), statistics.median(empty), int(statistics.median(tokens))


def _render_cost(rendering: Rendering, words: list[str], history: History) -> float:
    """CPU ms of rendering a history of this size as a whole."""
    chance = random.Random(0)
    messages = [{"role": "user", "content": "go"}]
    for _ in range(history.turns):
        call = {"id": "x", "function": {"name": "bash", "arguments": json.dumps({"command": "cat notes"})}}
        messages.append({"role": "assistant", "content": "I look.", "tool_calls": [call]})  # type: ignore[dict-item]
        messages.append({"role": "tool", "content": " ".join(chance.choices(words, k=history.words))})
    started = time.process_time()
    rendering.render(messages)
    return (time.process_time() - started) * 1000


def run() -> dict[str, Figure]:
    """Histories of 2k, 100k and 1M tokens, one new turn each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = word_tokenizer(folder)
        rendering = Rendering(folder, "qwen3", thinking=False)
        small = uvloop.run(_measure(rendering, words, folder, SMALL))
        large = uvloop.run(_measure(rendering, words, folder, LARGE))
        huge = uvloop.run(_measure(rendering, words, folder, HUGE))
    again = "rendering the whole history afresh for each call"
    return {
        "cpu_ms_2k": _figure(small, 1.0),
        "cpu_ms_100k": _figure(large, 5.0),
        "cpu_ms_1m": _figure(huge, 30.0),
        "empty_cpu_ms_2k": _yardstick(small),
        "empty_cpu_ms_100k": _yardstick(large),
        "empty_cpu_ms_1m": _yardstick(huge),
        "gateway_over_empty_2k": _ratio(small),
        "gateway_over_empty_100k": _ratio(large),
        "gateway_over_empty_1m": _ratio(huge),
        "rerender_over_gateway_100k": Figure(
            large.render_ms / large.gateway_ms, "ratio", "higher", None, None, again
        ),
    }


def _figure(measured: Measured, aim: float) -> Figure:
    against = (
        f"histories with a median of {measured.tokens} tokens; rendering one afresh for each call:"
        f" {measured.render_ms:.2f} ms for that alone; an empty handler of the same bytes: {measured.empty_ms:.2f} ms"
    )
    return Figure(measured.gateway_ms, "ms", "lower", aim, None, against)


def _ratio(measured: Measured) -> Figure:
    against = f"an empty handler of the same bytes, in turns with the gateway: {measured.empty_ms:.2f} ms"
    return Figure(measured.gateway_ms / measured.empty_ms, "ratio", "lower", None, 1.0, against)


def _yardstick(measured: Measured) -> Figure:
    against = "the machine: an empty handler that reads the same body and answers as many bytes, in turns with the gateway"
    return Figure(measured.empty_ms, "ms", "lower", None, None, against)
