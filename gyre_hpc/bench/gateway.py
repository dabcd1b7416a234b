"""`gyre bench gateway`: CPU of the gateway process per model call.

Counted: HTTP, parse, canonicalise, match, render the delta, encode the engine request, log, reply. The engine is the
fake border (`ScriptedEngine`): it encodes the request exactly as `engines.client` does and answers at once. The harness
is a process of its own, so its CPU does not count. Baseline of the same run: rendering the whole history afresh for
each call, on top of which such a gateway would do all the rest.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import uvloop
from aiohttp import web
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gyre_hpc.bench.figure import Figure
from gyre_hpc.config import GatewayConfig
from gyre_hpc.engines import wire
from gyre_hpc.engines.client import Chunk
from gyre_hpc.gateway.app import GatewayApp
from gyre_hpc.gateway.call_log import CallLog
from gyre_hpc.gateway.rendering import Rendering
from gyre_hpc.gateway.routing import Router
from gyre_hpc.gateway.server import web_app
from gyre_hpc.records import CellId, Version

SPECIALS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>",
    "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
ANSWER_TOKENS_PER_CHUNK = 8
BATCHES, BATCH = 9, 3
"""Measured calls per figure; the figure is the median over the batches, for a box that is shared."""
ANSWER = (
    'I look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "cat notes"}}\n</tool_call><|im_end|>'
)

HARNESS = """
import http.client, json, sys
address, path, words = sys.argv[1], sys.argv[2], sys.argv[3].split()
batches, batch, grow, steps = map(int, sys.argv[4:])
connection = http.client.HTTPConnection(address)
tool = {"name": "bash", "description": "run", "input_schema": {"type": "object"}}
body = {"model": "m", "max_tokens": 200, "system": "be brief", "tools": [tool], "stream": True}
messages = body["messages"] = [{"role": "user", "content": "go"}]
state = 1
def text(count):
    global state
    picked = []
    for _ in range(count):
        state = state * 6364136223846793005 % 2**64
        picked.append(words[(state >> 33) % len(words)])
    return " ".join(picked)
def call():
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse().read().decode()
    handle = answer.split('"id":"toolu_')[1].split('"')[0]
    use = {"type": "tool_use", "id": "toolu_" + handle, "name": "bash", "input": {"command": "cat notes"}}
    messages.append({"role": "assistant", "content": [{"type": "text", "text": "I look."}, use]})
def result(count):
    block = {"type": "tool_result", "tool_use_id": messages[-1]["content"][1]["id"], "content": text(count)}
    messages.append({"role": "user", "content": [block]})
call()
for _ in range(steps):
    result(grow)
    call()
for _ in range(batches):
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(batch):
        result(20)
        call()
print("done", flush=True)
"""


class ScriptedEngine:
    """The fake border: the interface of EngineClient, its encoding of the request, and the same answer every time."""

    def __init__(self, answer: list[int]) -> None:
        self._answer = answer
        self.encoded = 0
        self.prompt_tokens = 0

    async def generate(
        self,
        rid: str,
        input_ids: Sequence[int],
        max_new_tokens: int,
        kv_key: str,
        stop_token_ids: Sequence[int] = (),
    ) -> AsyncIterator[Chunk]:
        sampling = wire.SamplingParams(max_new_tokens, stop_token_ids=list(stop_token_ids))
        request = wire.GenerateRequest(list(input_ids), sampling, rid, True, -1, True, kv_key)
        self.encoded += len(msgspec.json.encode(request))
        self.prompt_tokens = len(input_ids)
        for start in range(0, len(self._answer), ANSWER_TOKENS_PER_CHUNK):
            ids = self._answer[start : start + ANSWER_TOKENS_PER_CHUNK]
            finish = "stop" if start + len(ids) == len(self._answer) else None
            yield Chunk(ids, [-0.5] * len(ids), [Version(0)] * len(ids), finish, 0, len(input_ids))

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


async def _measure(
    rendering: Rendering, words: list[str], folder: Path, grow: int, steps: int
) -> tuple[float, int, float]:
    """(CPU ms per call, prompt tokens at the last call, CPU ms of one render of the last history)."""
    engine = ScriptedEngine(rendering.tokenizer.encode(ANSWER))
    router = Router(lambda _: engine, lambda *_: None)
    router.route(CellId(0), "scripted", 8, Version(0))
    log = CallLog(folder / f"calls-{steps}.log", 1)
    app = GatewayApp(rendering, router, log, GatewayConfig(max_output_tokens=200), 1 << 20)
    app.open_execution(0, 1, "key")
    runner = web.AppRunner(web_app(app), handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = f"127.0.0.1:{runner.addresses[0][1]}"
    arguments = [address, "/x/key/v1/messages", " ".join(words), *map(str, (BATCHES, BATCH, grow, steps))]
    harness = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", "-c", HARNESS, *arguments, stdin=-1, stdout=-1
    )
    assert harness.stdin is not None and harness.stdout is not None
    spent: list[float] = []
    await harness.stdout.readline()
    for _ in range(BATCHES):
        started = time.process_time()
        harness.stdin.write(b"\n")
        await harness.stdout.readline()
        spent.append((time.process_time() - started) / BATCH * 1000)
    await harness.wait()
    prompt = engine.prompt_tokens
    fresh = _render_cost(rendering, words, grow, steps)
    await app.close_execution(0, 1)
    await runner.cleanup()
    log.close()
    return statistics.median(spent), prompt, fresh


def _render_cost(rendering: Rendering, words: list[str], grow: int, steps: int) -> float:
    """CPU ms of rendering a history of this size as a whole."""
    chance = random.Random(0)
    messages = [{"role": "user", "content": "go"}]
    for _ in range(steps):
        call = {"id": "x", "function": {"name": "bash", "arguments": json.dumps({"command": "cat notes"})}}
        messages.append({"role": "assistant", "content": "I look.", "tool_calls": [call]})  # type: ignore[dict-item]
        messages.append({"role": "tool", "content": " ".join(chance.choices(words, k=grow))})
    started = time.process_time()
    rendering.render(messages)
    return (time.process_time() - started) * 1000


def run() -> dict[str, Figure]:
    """Histories of 2k and 100k tokens, one new turn each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = word_tokenizer(folder)
        rendering = Rendering(folder, "qwen3", thinking=False)
        small, small_tokens, small_fresh = uvloop.run(_measure(rendering, words, folder, 120, 2))
        large, large_tokens, large_fresh = uvloop.run(_measure(rendering, words, folder, 940, 96))
    baseline = "rendering the whole history ({} tokens) afresh for each call: {:.2f} ms for that alone"
    return {
        "cpu_ms_2k": Figure(small, "ms", "lower", 1.0, None, baseline.format(small_tokens, small_fresh)),
        "cpu_ms_100k": Figure(large, "ms", "lower", 5.0, None, baseline.format(large_tokens, large_fresh)),
        "rerender_over_gateway_100k": Figure(
            large_fresh / large,
            "ratio",
            "higher",
            None,
            None,
            "rendering the whole history afresh for each call",
        ),
    }
