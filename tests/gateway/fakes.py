"""A gateway on a real port over scripted engines (the fake border: what EngineClient would talk to)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from gyre_hpc.config import GatewayConfig
from gyre_hpc.engines.client import Chunk, EngineAbsent, EngineRefused, EngineUnreachable
from gyre_hpc.engines.wire import EncodedIds
from gyre_hpc.gateway.app import GatewayApp
from gyre_hpc.gateway.call_log import CallLog, read_call_log
from gyre_hpc.gateway.edge import Edge
from gyre_hpc.gateway.pages import PageMover
from gyre_hpc.gateway.rendering import Rendering
from gyre_hpc.gateway.restore import read_for_restore, restore
from gyre_hpc.gateway.routing import Router
from gyre_hpc.gateway.server import EDGE, gateway_runner
from gyre_hpc.records import CallRecord, CellId, Version

KEY = "k" * 32


@dataclass
class Script:
    """The 'model': answers in the order new prompts arrive; a continued prompt gets the rest of its answer."""

    rendering: Rendering
    answers: list[str] = field(default_factory=list)
    outputs: list[tuple[list[int], list[int]]] = field(default_factory=list)
    rids: set[str] = field(default_factory=set)
    """Of all requests to engines: none may come twice."""

    def rest(self, prompt: list[int]) -> list[int]:
        for known, output in self.outputs:
            tail = prompt[len(known) :]
            if prompt[: len(known)] == known and output[: len(tail)] == tail:
                return output[len(tail) :]
        output = self.rendering.tokenizer.encode(self.answers.pop(0))
        self.outputs.append((prompt, output))
        return output


@dataclass
class ScriptedEngine:
    """One engine. `die_after` tokens of the next request it fails once; `pause_after` tokens it waits for `go`."""

    script: Script
    version: int = 0
    die_after: int | None = None
    pause_after: int | None = None
    cached: int = 0
    absent: bool = False
    """Its process has ended: nobody listens."""
    requests: list[tuple[str, list[int], int, str]] = field(default_factory=list)
    aborted: set[str] = field(default_factory=set)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(
        self,
        rid: str,
        input_ids: EncodedIds,
        max_new_tokens: int,
        kv_key: str,
        stop_token_ids: Sequence[int] = (),
    ) -> AsyncIterator[Chunk]:
        if self.absent:
            raise EngineAbsent("connection refused")
        if max_new_tokens < 1:
            raise EngineRefused("scripted", 400, f"max_new_tokens={max_new_tokens}: must be at least 1")
        if rid in self.script.rids:
            raise EngineRefused("scripted", 400, f"Duplicate request ID detected: {rid}")
        self.script.rids.add(rid)
        self.requests.append((rid, input_ids.ids(), max_new_tokens, kv_key))
        rest = self.script.rest(input_ids.ids())
        complete = len(rest) <= max_new_tokens
        rest = rest[:max_new_tokens]
        if not rest:
            raise EngineUnreachable("nothing was left to sample")
        for index, token in enumerate(rest):
            if self.die_after == index:
                self.die_after = None
                raise EngineUnreachable("scripted death")
            if self.pause_after == index:
                self.waiting.set()
                while not self.go.is_set() and rid not in self.aborted:
                    await asyncio.sleep(0.002)
            if rid in self.aborted:
                yield self._chunk([], input_ids.count, "abort")
                return
            last = index == len(rest) - 1 and self.die_after != len(rest)
            yield self._chunk([token], input_ids.count, ("stop" if complete else "length") if last else None)
        if self.die_after == len(rest):
            self.die_after = None
            raise EngineUnreachable("scripted death after the last token")

    def _chunk(self, ids: list[int], prompt: int, finish: str | None) -> Chunk:
        logprobs = [-float(token) / 1000 for token in ids]
        return Chunk(ids, logprobs, [Version(self.version)] * len(ids), finish, self.cached, prompt)

    async def abort(self, rid: str) -> None:
        self.aborted.add(rid)


@dataclass
class RunningGateway:
    """A gateway that serves HTTP, its engines by address, and its log."""

    app: GatewayApp
    script: Script
    engines: dict[str, ScriptedEngine]
    faults: list[tuple[CellId, str]]
    runner: web.AppRunner
    url: str
    path: Path
    edge: Edge
    server: asyncio.Server

    @classmethod
    async def start(
        cls,
        rendering: Rendering,
        folder: Path,
        pages: Callable[[Router], PageMover] = PageMover.still,
        *,
        listening: socket.socket | None = None,
        **settings: Any,
    ) -> RunningGateway:
        script, engines, faults = Script(rendering), {}, []
        settings = {
            "keepalive_s": 5.0,
            "drain_s": 0.0,
            "max_output_tokens": 400,
            "attach_grace_s": 5.0,
            **settings,
        }
        max_context = settings.pop("max_context", 2000)
        router = Router(lambda address: engines[address], lambda cell, cause: faults.append((cell, cause)))
        path = folder / "gateway-001000.log"
        logged = read_for_restore(path)
        log = CallLog(path, incarnation=1000, end=logged.offset)
        app = GatewayApp(rendering, router, log, GatewayConfig(**settings), max_context, pages=pages(router))
        restore(app, logged)
        app.open_execution(7, 1, KEY)
        runner = gateway_runner(app, 0.1)
        await runner.setup()
        listening = listening or socket.create_server(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        edge = runner.app[EDGE]
        server = await edge.serve(runner, listening)
        url = f"http://127.0.0.1:{port}/x/{KEY}"
        return cls(app, script, engines, faults, runner, url, path, edge, server)

    def engine(self, cell: int = 0, version: int = 0, **behaviour: Any) -> ScriptedEngine:
        """A routed cell with a scripted engine."""
        address = f"http://cell-{cell}-{version}"
        place = behaviour.pop("place", 0)
        engine = self.engines[address] = ScriptedEngine(self.script, version, **behaviour)
        self.app.router.route(CellId(cell), address, 4, Version(version), place=place)
        return engine

    async def chat(
        self, messages: list[dict[str, Any]], headers: dict[str, str] | None = None, **more: Any
    ) -> dict[str, Any]:
        """One Chat Completions call that is not streamed."""
        async with (
            aiohttp.ClientSession() as session,
            session.post(
                f"{self.url}/v1/chat/completions", json={"messages": messages, **more}, headers=headers
            ) as response,
        ):
            return dict(await response.json()) | {"status": response.status}

    async def records(self) -> list[CallRecord]:
        """What the log says."""
        await self.app.log.sync()
        return read_call_log(self.path)

    async def stop(self) -> None:
        self.server.close()
        await self.app.close()
        await self.runner.cleanup()
        self.app.log.close()
