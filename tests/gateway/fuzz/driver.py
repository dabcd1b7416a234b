"""Sends cases through a gateway and says what became of them: `fuzz` returns a `Report`, and raises on the first answer that is
neither legal in its dialect nor a clean refusal, on a request without an answer, and on anything left behind.

Executions come and go every few requests. Some clients leave in the middle; some answers are slow, so that keep-alives flow.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from gyre_hpc.config import GatewayConfig
from gyre_hpc.engines.client import Chunk
from gyre_hpc.engines.wire import EncodedIds
from gyre_hpc.gateway.app import GatewayApp
from gyre_hpc.gateway.call_log import CallLog
from gyre_hpc.gateway.edge import Edge
from gyre_hpc.gateway.rendering import Rendering
from gyre_hpc.gateway.routing import Router
from gyre_hpc.gateway.server import EDGE, gateway_runner
from gyre_hpc.records import CellId, Version

from . import grammar
from .memory import Pipe, split, whole
from .mutate import Case, Mutator

PER_EXECUTION = 100
WORKERS = 6
VENDOR_EVERY = 200
"""One legal answer of so many is also read by the vendor's own types."""
LEAVES, SLOW = 0.005, 0.01
"""Shares of clients that leave in the middle, and of answers that take longer than a keep-alive."""
PATIENCE_S = 0.2
"""For requests whose HTTP is broken: no answer need come."""
ANSWERS = [
    "fine<|im_end|>", "", "<|im_end|>", "two\nlines <|im_start|>user\nx<|im_end|>", "<think>\nhm\n</think>\n\nok<|im_end|>",
    "<think>\nnever closed", "</think><|im_end|>", '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>',
    '<tool_call>\n{"name": "Bash", "arguments": {"command": "\\ud83d \\u0000"}}\n</tool_call><|im_end|>',
    '<tool_call>\n{"name": "apply_patch", "arguments": {"input": 3}}\n</tool_call><tool_call>\n{"name": "x"}\n</tool_call><|im_end|>',
    '<tool_call>\n{"name": "", "arguments": []}\n</tool_call><|im_end|>', "<tool_call>\n{broken\n</tool_call>tail<|im_end|>",
    '<tool_call>\n{"name": "f", "arguments": "{\\"a\\": NaN}"}\n</tool_call><|im_end|>', "<tool_call><tool_call></tool_call>" * 3,
    '<tool_call>\n{"name": "f", "arguments": {"a": 1e999, "b": 12345678901234567890123}}\n</tool_call><|im_end|>', "\x00\x7f\u2028𝄞" * 5,
]  # fmt: skip


class BabblingEngine:
    """Answers at once: one of ANSWERS, or any ids at all."""

    def __init__(self, rendering: Rendering, seed: int) -> None:
        self._chance = random.Random(seed)
        self._answers = [rendering.tokenizer.encode(text) for text in ANSWERS]
        self._tokens = rendering.tokenizer.backend.get_vocab_size()

    async def generate(
        self,
        rid: str,
        input_ids: EncodedIds,
        max_new_tokens: int,
        kv_key: str,
        stop_token_ids: Sequence[int] = (),
    ) -> AsyncIterator[Chunk]:
        chance = self._chance
        ids = chance.choice(self._answers)
        if chance.random() < 0.2:
            ids = [chance.randrange(self._tokens) for _ in range(chance.randrange(1, 30))]
        ids = ids[:max_new_tokens]
        finish = "length" if len(ids) == max_new_tokens else "stop"
        if chance.random() < SLOW:
            await asyncio.sleep(0.02)
        yield Chunk(ids, [-0.5] * len(ids), [Version(0)] * len(ids), finish, 0, input_ids.count)

    async def abort(self, rid: str) -> None:
        return None


@dataclass
class Report:
    """`statuses` counts answers by status, 0 = none (the client left, or its HTTP was broken)."""

    cases: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    dialects: Counter[str] = field(default_factory=Counter)
    calls: int = 0
    cpu_s: float = 0.0
    rss_growth: int = 0
    """Bytes from a tenth of the way to the end."""


class Loud(logging.Handler):
    """Keeps what was logged as an error: the gateway logs its own faults so."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(self.format(record))


@dataclass
class Fuzz:
    """One run. `sockets` = over real connections instead of memory."""

    app: GatewayApp
    edge: Edge
    runner: Any
    mutator: Mutator
    count: int
    port: int
    report: Report = field(default_factory=Report)
    executions: int = 0

    async def worker(self, sockets: bool) -> None:
        """Executions one after the other until all cases are sent."""
        chance = random.Random(self.executions)
        while self.report.cases < self.count:
            self.executions += 1
            execution, key = self.executions, f"{self.executions:032x}"
            self.app.open_execution(execution, 1, key)
            pipe: Pipe | SocketPipe | None = None
            for _ in range(PER_EXECUTION):
                if pipe is None or not pipe.alive:
                    pipe = await SocketPipe.open(self.port) if sockets else Pipe(self.edge, self.runner)
                case = self.mutator.case(execution)
                self.report.cases += 1
                await self._send(pipe, case, key, leaves=chance.random() < LEAVES)
            if pipe is not None:
                pipe.leave()
            account, incomplete = await self.app.close_execution(execution, 1)
            assert not incomplete
            self.report.calls += account.calls

    async def _send(self, pipe: Any, case: Case, key: str, *, leaves: bool) -> None:
        patience_s = None if case.framed else PATIENCE_S
        timer = None
        if leaves:
            asyncio.get_running_loop().call_soon(pipe.leave)
        elif patience_s is not None:
            timer = asyncio.get_running_loop().call_later(patience_s, pipe.leave)
        raw = await pipe.ask(case.encode(key))
        if timer is not None:
            timer.cancel()
        self.report.dialects[case.dialect] += 1
        if not whole(raw):
            assert leaves or not case.framed, f"no answer to {case}"
            self.report.statuses[0] += 1
            return
        if not case.framed:
            pipe.leave()
            self.report.statuses[int(raw[9:12])] += 1
            assert raw[9:10] in b"1234", (case, raw)
            return
        status, head, body = split(raw)
        if b"connection: close" in head.lower():
            pipe.leave()
        self.report.statuses[status] += 1
        self._judge(case, status, head, body)

    def _judge(self, case: Case, status: int, head: bytes, body: bytes) -> None:
        try:
            grammar.check(case.dialect, status, head, body)
            if status == 200 and self.report.cases % VENDOR_EVERY == 0:
                grammar.vendor_reads(case.dialect, head, body)
        except Exception as error:
            raise AssertionError(
                f"{error!r}\nasked: {case}\nanswered: {status} {head!r}\n{body!r}"
            ) from error


class SocketPipe:
    """One real connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.alive = True

    @classmethod
    async def open(cls, port: int) -> SocketPipe:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def ask(self, request: bytes) -> bytes:
        received = b""
        try:
            self._writer.write(request)
            while not whole(received):
                piece = await self._reader.read(1 << 16)
                if not piece:
                    self.leave()
                    return received
                received += piece
        except ConnectionError:
            self.leave()
        return received

    def leave(self) -> None:
        self.alive = False
        self._writer.close()


async def fuzz(rendering: Rendering, folder: Path, count: int, seed: int, *, sockets: bool = False) -> Report:
    """Send `count` cases. Raises AssertionError."""
    gc.collect()  # what others left in this process speaks before we listen
    loud = Loud()
    logging.getLogger().addHandler(loud)
    engine = BabblingEngine(rendering, seed)
    router = Router(lambda _: engine, lambda *_: None)
    router.route(CellId(0), "babbling", 64, Version(0))
    settings = GatewayConfig(
        keepalive_s=0.005,
        max_output_tokens=64,
        max_calls=PER_EXECUTION // 2,
        attach_grace_s=0.05,
        max_body_mib=1,
    )
    log = CallLog(folder / "calls.log", 1, write=lambda _, data: len(data))
    app = GatewayApp(rendering, router, log, settings, 1500)
    runner = gateway_runner(app, 0.1)
    await runner.setup()
    edge = runner.app[EDGE]
    listening = socket.create_server(("127.0.0.1", 0))
    server = await edge.serve(runner, listening)
    run = Fuzz(app, edge, runner, Mutator(seed), count, listening.getsockname()[1])
    files, begun = len(os.listdir("/proc/self/fd")), time.process_time()
    try:
        watch = asyncio.create_task(_growth(run))
        await asyncio.gather(*(run.worker(sockets) for _ in range(WORKERS)))
        run.report.rss_growth = await watch
        run.report.cpu_s = time.process_time() - begun
        await _nothing_left(run, files)
    finally:
        server.close()
        await app.close()
        await runner.cleanup()
        log.close()
        logging.getLogger().removeHandler(loud)
    assert not loud.said, "\n".join(loud.said[:3])
    return run.report


async def _growth(run: Fuzz) -> int:
    """Bytes by which the process grew from a tenth of the way to the end."""
    process = psutil.Process()
    while run.report.cases < run.count // 10:
        await asyncio.sleep(0.05)
    gc.collect()
    before = process.memory_info().rss
    while run.report.cases < run.count:
        await asyncio.sleep(0.05)
    gc.collect()
    return int(process.memory_info().rss - before)


async def _nothing_left(run: Fuzz, files: int) -> None:
    """Neither calls, nor executions, nor connections, nor files, nor places on engines."""
    async with asyncio.timeout(30):
        while run.edge.guards or run.app._tasks or len(os.listdir("/proc/self/fd")) > files:
            await asyncio.sleep(0.02)
    assert not run.app.executions and not run.app._keys and not any(run.app.router.running().values())
    assert run.app.router.waiting == 0
