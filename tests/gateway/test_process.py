"""The gateway as a process: its socket outlives its worker, its calls outlive both, and it obeys one controller."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gyre_hpc.config import RunConfig, save_run_config
from gyre_hpc.gateway.call_log import CallLogReader, ExecutionEnd, call_logs
from gyre_hpc.gateway.rendering import Rendering
from gyre_hpc.layout import RunLayout
from gyre_hpc.records import CallRecord, CellId, ExecutionId, Version
from gyre_hpc.transport.links import LinkServer, PeerLink, read_secret, write_rendezvous, write_secret
from gyre_hpc.transport.messages import (
    CloseExecution,
    EngineFault,
    ExecutionSealed,
    GatewayStatus,
    Goodbye,
    HeldBack,
    Holding,
    Message,
    OpenExecution,
    Route,
    Serial,
    Shutdown,
    Unroute,
    Unrouted,
)
from gyre_hpc.transport.rendezvous import engine_token

KEY = "key"
PATIENCE_S = 60.0


@dataclass
class HttpEngine:
    """An engine's /generate over HTTP: answers `tokens`, pausing once after `pause_after` of them."""

    tokens: list[int]
    pause_after: int = 0
    prompts: list[list[int]] = field(default_factory=list)
    credentials: set[str | None] = field(default_factory=set)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        self.credentials.add(request.headers.get("Authorization"))
        body = await request.json()
        self.prompts.append(body["input_ids"])
        known = len(self.prompts[0])
        response = web.StreamResponse()
        await response.prepare(request)
        start = len(body["input_ids"]) - known
        for index in range(start, len(self.tokens)):
            if self.pause_after and index == self.pause_after:
                self.pause_after = 0
                await asyncio.Event().wait()
            meta = {
                "completion_tokens": index + 1 - start,
                "output_token_logprobs": [[-0.5, token, None] for token in self.tokens[start : index + 1]],
                "weight_version": "4",
                "finish_reason": {"type": "stop"} if index == len(self.tokens) - 1 else None,
            }
            event = {"output_ids": self.tokens[start : index + 1], "meta_info": meta}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def serve(self) -> tuple[web.AppRunner, str]:
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


@pytest.fixture
async def run(tmp_path: Path, model_dir: Path) -> AsyncIterator[tuple[RunLayout, LinkServer]]:
    layout = RunLayout(tmp_path)
    layout.create()
    shutil.copytree(model_dir, layout.model)
    config = RunConfig()
    config.model.path = "x"
    save_run_config(config, tmp_path)
    server = LinkServer(write_secret(layout), 1, "127.0.0.1")
    write_rendezvous(layout, *await server.start(), 1)
    yield layout, server
    await server.close()


async def message(link: PeerLink, kind: type[Message]) -> Any:
    """The next message of this kind."""
    async with asyncio.timeout(PATIENCE_S):
        while not isinstance(received := await link.receive(), kind):
            assert received is not None
    return received


async def ask(address: str) -> dict[str, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"{address}/x/{KEY}/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "hi"}]},
        ) as response,
    ):
        return dict(await response.json())


def order(link: PeerLink, engine: str) -> None:
    """What a controller tells a gateway that has just said hello."""
    link.send(OpenExecution(ExecutionId(3), 1, KEY, False))
    link.send(Route(CellId(0), engine, 2, Version(4), Serial(6)))


async def test_a_killed_worker_comes_back_on_the_same_port_with_its_calls(
    run: tuple[RunLayout, LinkServer], rendering: Rendering
) -> None:
    layout, server = run
    engine = HttpEngine(rendering.tokenizer.encode("an answer in pieces<|im_end|>"), pause_after=3)
    runner, engine_url = await engine.serve()
    command = [
        sys.executable,
        "-m",
        "gyre_hpc.gateway.process",
        "--run",
        str(layout.root),
        "--incarnation",
        "1000",
    ]
    process = await asyncio.create_subprocess_exec(*command)
    async with asyncio.timeout(3 * PATIENCE_S):
        link = await server.accept()
        assert link.incarnation == 1000
        order(link, engine_url)
        status = await message(link, GatewayStatus)
        assert (status.running, status.waiting) == ({0: 0}, 0)
        cut = asyncio.create_task(ask(link.hello.address))
        while (await message(link, GatewayStatus)).tokens < 3:
            pass
        os.kill(link.hello.pid, signal.SIGKILL)
        with pytest.raises(aiohttp.ClientConnectionError):
            await cut
        repeat = asyncio.create_task(ask(link.hello.address))
        second = await server.accept()
        assert second.incarnation > 1000 and second.hello.address == link.hello.address
        order(second, engine_url)
        answer = await repeat
        assert answer["choices"][0]["message"]["content"] == "an answer in pieces"
        assert engine.prompts[1] == engine.prompts[0] + engine.tokens[:3]
        assert engine.credentials == {f"Bearer {engine_token(read_secret(layout))}"}

        await second.close()
        third = await server.accept()
        assert third.incarnation > second.incarnation and third.hello.pid == second.hello.pid
        second = third
        second.send(Unroute(CellId(0), 0.0, "test", Serial(7)))
        assert await message(second, Unrouted) == Unrouted(CellId(0), 0, Serial(7))
        second.send(CloseExecution(ExecutionId(3), 1))
        sealed = await message(second, ExecutionSealed)
        assert (sealed.calls, sealed.calls_lost, sealed.incomplete) == (1, 0, False)
        assert sealed.tokens_sampled == len(engine.tokens)
        second.send(Shutdown("test"))
        assert (await message(second, Goodbye)).error == ""
        assert await process.wait() == 0
    (path,) = call_logs(layout)
    record, end = CallLogReader(path).poll()
    assert isinstance(record, CallRecord) and isinstance(end, ExecutionEnd) and end.calls == 1
    assert record.output_ids.tolist() == engine.tokens and record.versions.tolist() == [4] * len(
        engine.tokens
    )
    await runner.cleanup()


async def test_seconds_for_which_a_call_is_held_are_told_as_they_grow(
    run: tuple[RunLayout, LinkServer],
) -> None:
    layout, server = run
    command = [sys.executable, "-m", "gyre_hpc.gateway.process", "--run", str(layout.root)]
    process = await asyncio.create_subprocess_exec(*command, "--incarnation", "1000")
    async with asyncio.timeout(2 * PATIENCE_S):
        link = await server.accept()
        link.send(OpenExecution(ExecutionId(3), 1, KEY, False))
        waiting = asyncio.create_task(ask(link.hello.address))
        first, second = await message(link, HeldBack), await message(link, HeldBack)
        assert (first.execution, first.attempt) == (3, 1)
        assert second.seconds >= first.seconds + 1.0 >= 2.0
        link.send(Route(CellId(0), "http://127.0.0.1:9", 2, Version(4), Serial(8)))
        fault = await message(link, EngineFault)
        assert (fault.cell, fault.serial) == (0, 8)
        link.send(Shutdown("test"))
        await message(link, Goodbye)
        assert await process.wait() == 0
        with pytest.raises(aiohttp.ClientError):
            await waiting


async def test_an_incurable_fault_ends_the_gateway_with_its_exit_code(
    run: tuple[RunLayout, LinkServer],
) -> None:
    layout, _ = run
    (layout.model / "tokenizer.json").unlink()
    command = [
        sys.executable,
        "-m",
        "gyre_hpc.gateway.process",
        "--run",
        str(layout.root),
        "--incarnation",
        "1000",
    ]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    async with asyncio.timeout(PATIENCE_S):
        _, errors = await process.communicate()
    assert process.returncode == 2 and b"tokenizer.json: no such file" in errors


async def test_a_worker_whose_parent_died_before_it_could_look_ends_at_once(tmp_path: Path) -> None:
    gone = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await gone.wait()
    command = [sys.executable, "-m", "gyre_hpc.gateway.process", "--run", str(tmp_path), "--incarnation", "1"]
    process = await asyncio.create_subprocess_exec(
        *command, "--launch", "1", "--socket", "0", "--parent", str(gone.pid)
    )
    async with asyncio.timeout(PATIENCE_S):
        assert await process.wait() == -signal.SIGKILL


async def test_a_gateway_goes_over_to_the_next_controller_with_all_it_holds(
    run: tuple[RunLayout, LinkServer], rendering: Rendering
) -> None:
    """The first controller is not even dead: the run folder names another one."""
    layout, first_server = run
    engine = HttpEngine(rendering.tokenizer.encode("an answer<|im_end|>"))
    runner, engine_url = await engine.serve()
    command = [sys.executable, "-m", "gyre_hpc.gateway.process", "--run", str(layout.root)]
    process = await asyncio.create_subprocess_exec(*command, "--incarnation", "1000")
    async with asyncio.timeout(3 * PATIENCE_S):
        link = await first_server.accept()
        assert (await message(link, Holding)).attempts == ()
        order(link, engine_url)
        await ask(link.hello.address)
        link.send(OpenExecution(ExecutionId(4), 2, "other", False))
        link.send(CloseExecution(ExecutionId(4), 2))
        await message(link, ExecutionSealed)
        second_server = LinkServer(read_secret(layout), 2, "127.0.0.1")
        write_rendezvous(layout, *await second_server.start(), 2)
        second = await second_server.accept()
        assert second.hello.pid == link.hello.pid and second.hello.address == link.hello.address
        first_word = await second.receive()
        assert isinstance(first_word, Holding) and set(first_word.attempts) == {(3, 1), (4, 2)}
        waiting = asyncio.create_task(ask(link.hello.address))
        assert (await message(second, HeldBack)).execution == 3, "the routes of before are void"
        second.send(Route(CellId(0), engine_url, 2, Version(5), Serial(1)))
        assert (await waiting)["choices"][0]["message"]["content"] == "an answer"
        for execution, attempt, calls in ((3, 1, 2), (4, 2, 0)):
            second.send(CloseExecution(ExecutionId(execution), attempt))
            sealed = await message(second, ExecutionSealed)
            assert (sealed.execution, sealed.calls, sealed.incomplete) == (execution, calls, False)
        second.send(Shutdown("test"))
        assert await process.wait() == 0
        await second_server.close()
    await runner.cleanup()
