"""One real harness in front of a real gateway process, whose parts die under it, each in the middle of an answer.

The gateway serves on the one socket that the harness can reach; the test is its parent, starts it again when it was killed, and
stands in for the controller. Two cells are two addresses of a scripted engine that speaks HTTP. Its agent takes one step per
fault, `rounds` times all of them; each of the answers breaks off half-way, once, in a way of its own, and goes on token by token from what was received.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from gyre_hpc import models
from gyre_hpc.config import RunConfig, save_run_config
from gyre_hpc.engines.wire import AbortRequest, FinishInfo, GenerateEvent, GenerateRequest, MetaInfo
from gyre_hpc.executions.launcher import LaunchFailed
from gyre_hpc.gateway.delivery import reset
from gyre_hpc.gateway.rendering import Rendering
from gyre_hpc.harnesses import check, script
from gyre_hpc.harnesses.stand import MODEL
from gyre_hpc.layout import RunLayout
from gyre_hpc.records import CallRecord
from gyre_hpc.transport.links import write_secret
from gyre_hpc.transport.messages import ExecutionSealed
from tests.gateway.faults.rig import StandIn, recorded

KEEPALIVE_S = 0.5
SILENT_S = 1.6
"""Of an answer before it breaks off: three keep-alives have gone out."""
EXECUTION, KEY = 1, "key"


class Fault(enum.StrEnum):
    """What breaks an answer off."""

    ENGINE_RESET = "engine reset"
    ENGINE_ABORTS = "engine aborts"
    SWITCH = "role switch"
    GATEWAY_KILLED_EARLY = "gateway killed before a byte was sent"
    GATEWAY_KILLED = "gateway killed behind keep-alives"
    CONTROLLER_KILLED = "controller killed"


@dataclass
class Answer:
    """What the model says to a prompt, and what happens half-way, once."""

    prompt: list[int]
    output: list[int]
    fault: Fault | None


@dataclass
class Agent(script.ScriptedEngine):
    """One shell command per fault, then the answer. What it says depends on the prompt alone."""

    rounds: int = 1
    answers: list[Answer] = field(default_factory=list)

    def known(self, prompt: list[int]) -> tuple[Answer, list[int]]:
        """The answer that this prompt begins or continues, and what of it is still to come."""
        for answer in self.answers:
            received = prompt[len(answer.prompt) :]
            if answer.prompt == prompt[: len(answer.prompt)] and answer.output[: len(received)] == received:
                return answer, answer.output[len(received) :]
        text, fault = self.say(self.rendering.text(prompt))
        self.answers.append(Answer(prompt, self.rendering.tokenizer.encode(text), fault))
        return self.answers[-1], self.answers[-1].output

    def say(self, prompt: str) -> tuple[str, Fault | None]:
        """The answer, and the fault that meets it."""
        tool = script.shell_tool(prompt)
        if tool is None:
            return "Nothing to add.<|im_end|>", None
        planned = self.rounds * list(Fault)
        steps = sum(f"step-{100 + step}-done" in prompt for step in range(len(planned)))
        if steps < len(planned):
            call = script.tool_call(tool, f"echo step-$(({steps} + 100))-done")
            return f"{script.THINKING}I take step {steps}.\n{call}<|im_end|>", planned[steps]
        if self.done_command:
            return f"{script.ANSWER}\n{script.tool_call(tool, self.done_command)}<|im_end|>", None
        return f"{script.ANSWER}<|im_end|>", None


@dataclass
class Outcome:
    """What is left when the harness has ended."""

    exit_code: int | None
    output: str
    struck: list[Fault]
    records: list[CallRecord]
    sealed: ExecutionSealed
    answers: list[Answer]


class Ordeal:
    """One harness and everything behind it."""

    def __init__(self, config: RunConfig, folder: Path, rounds: int = 1) -> None:
        self.rounds, self.config, self.folder, self.layout = rounds, config, folder, RunLayout(folder / "run")
        self.struck: list[Fault] = []
        self._cell, self._epoch, self._incarnation = 0, 1, 1000
        self._cut: dict[str, asyncio.Event] = {}
        self._urls: list[str] = []
        self._worker: asyncio.subprocess.Process | None = None

    async def run(self, timeout_s: float) -> Outcome:
        self._lay_out()
        rendering = Rendering(self.layout.model, "qwen3", thinking=False)
        self.agent = Agent(rendering, 0.0, self.config.harness.done_command, rounds=self.rounds)
        async with check.launching() as (launcher, listening, network), self._serving():
            if listening is None:
                raise LaunchFailed(network, fix="gyre doctor")
            self._listening = listening
            await self._controller()
            parent = asyncio.create_task(self._keep_a_worker())
            await self.controller.linked()
            url = f"http://127.0.0.1:{listening.getsockname()[1]}/x/{KEY}"
            spec, _ = await check.prepared(self.config, self.folder, launcher, url)
            log = self.folder / "harness.log"
            try:
                code, _ = await check.ended(launcher, spec, log, timeout_s)
                async with asyncio.timeout(60):
                    sealed = await self.controller.close_execution(EXECUTION)
            finally:
                parent.cancel()
                await asyncio.wait([parent])
                self._kill_worker()
                self.controller.die()
        records = recorded(self.layout, EXECUTION)
        output = log.read_text(errors="replace")
        return Outcome(code, output, self.struck, records, sealed, self.agent.answers)

    def _lay_out(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.layout.root.mkdir()
        self.layout.create()
        self.layout.model.mkdir(exist_ok=True)
        shutil.copy(models.resolve(MODEL) / "tokenizer.json", self.layout.model)
        self.config.gateway.keepalive_s = KEEPALIVE_S
        save_run_config(self.config, self.layout.root)
        write_secret(self.layout)

    # ---- the gateway and its controller ---------------------------------------------------------------------------

    async def _controller(self) -> None:
        self.controller = StandIn(self.layout, self._epoch)
        self.controller.keys = {EXECUTION: KEY}
        self.controller.routes = {self._cell: (self._urls[self._cell], self._cell)}
        await self.controller.start()

    async def _keep_a_worker(self) -> None:
        while True:
            command = [sys.executable, "-m", "gyre_hpc.gateway.process", "--run", str(self.layout.root)]
            command += ["--launch", "1000", "--incarnation", str(self._incarnation)]
            command += ["--socket", str(self._listening.fileno()), "--parent", str(os.getpid())]
            with (self.folder / "gateway.log").open("ab") as log:
                self._worker = await asyncio.create_subprocess_exec(
                    *command, stderr=log, pass_fds=[self._listening.fileno()]
                )
            await self._worker.wait()
            self._incarnation += 20

    def _kill_worker(self) -> None:
        if self._worker is not None and self._worker.returncode is None:
            self.controller.link = None
            self._worker.send_signal(signal.SIGKILL)

    def _move(self) -> None:
        """The other cell serves from here on."""
        before, self._cell = self._cell, 1 - self._cell
        self.controller.unroute(before)
        self.controller.route(self._cell, self._urls[self._cell], self._cell)

    async def _strike(self, fault: Fault, request: web.Request) -> None:
        if fault is not Fault.GATEWAY_KILLED_EARLY:
            await asyncio.sleep(SILENT_S)
        self.struck.append(fault)
        match fault:
            case Fault.ENGINE_RESET:
                reset(request)
            case Fault.SWITCH:
                self._move()
            case Fault.GATEWAY_KILLED | Fault.GATEWAY_KILLED_EARLY:
                self._kill_worker()
            case Fault.CONTROLLER_KILLED:
                self.controller.die()
                self._epoch += 1
                self._cell = 1 - self._cell
                await self._controller()

    # ---- the engine ------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        for _ in range(2):
            listening = socket.create_server(("127.0.0.1", 0))
            await web.SockSite(runner, listening).start()
            self._urls.append(f"http://127.0.0.1:{listening.getsockname()[1]}")
        try:
            yield
        finally:
            await runner.cleanup()

    async def _abort(self, request: web.Request) -> web.Response:
        asked = msgspec.json.decode(await request.read(), type=AbortRequest)
        self._cut[asked.rid].set()
        return web.json_response({})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        asked = msgspec.json.decode(await request.read(), type=GenerateRequest)
        if asked.rid in self._cut:  # as SGLang does
            return web.Response(status=400, text=f"Duplicate request ID detected: {asked.rid}")
        answer, rest = self.agent.known(asked.input_ids)
        cut = self._cut[asked.rid] = asyncio.Event()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        half = len(rest) // 2
        fault, answer.fault = answer.fault, None
        await response.write(_event(rest[:half], half, None))
        if fault is not None:
            await self._strike(fault, request)
            if fault is not Fault.ENGINE_ABORTS:
                await cut.wait()
            await response.write(_event([], half, "abort"))
        else:
            await response.write(_event(rest[half:], len(rest), "stop"))
        await response.write(b"data: [DONE]\n\n")
        return response


def _event(ids: list[int], count: int, finish: Any) -> bytes:
    """Some tokens, `count` in all."""
    meta = MetaInfo(
        "", FinishInfo(finish) if finish else None, 0, count, 0, "0", [], [(-0.5, i, None) for i in ids]
    )
    return b"data: " + msgspec.json.encode(GenerateEvent(ids, meta)) + b"\n\n"
