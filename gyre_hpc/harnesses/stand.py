"""A real gateway for one harness: router, call log, dialects and HTTP as in a run, over one engine that is given to it."""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from gyre_hpc import models
from gyre_hpc.config import GatewayConfig, HarnessConfig
from gyre_hpc.gateway.app import GatewayApp
from gyre_hpc.gateway.call_log import CallLog, read_call_log
from gyre_hpc.gateway.lineage import Mismatch
from gyre_hpc.gateway.parts import DeliverMode
from gyre_hpc.gateway.rendering import Rendering
from gyre_hpc.gateway.routing import Engine, Router
from gyre_hpc.gateway.server import EDGE, gateway_runner
from gyre_hpc.records import CallRecord, CellId, Version

MODEL = "package:patchkit"
"""Its tokenizer spells any text; its weights are not used."""
MAX_CONTEXT = 200_000
EXECUTION, ATTEMPT = 1, 1
SHUTDOWN_S = 1.0


@dataclass(frozen=True)
class Seen:
    """One HTTP request, `after_s` seconds from the start; `path` is below the base URL."""

    after_s: float
    method: str
    path: str
    status: int


@dataclass
class Stand:
    """`url` is the base URL of the harness's execution."""

    app: GatewayApp
    log: Path
    runner: web.AppRunner
    url: str
    server: asyncio.Server | None = None
    requests: list[Seen] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)

    @classmethod
    async def start(
        cls,
        folder: Path,
        engine: Engine,
        listening: socket.socket | None,
        settings: GatewayConfig,
        harness: HarnessConfig,
        max_context: int = MAX_CONTEXT,
    ) -> Stand:
        """Serve on a socket that was made elsewhere, or on a free port of 127.0.0.1."""
        rendering = Rendering(models.resolve(MODEL), "qwen3", thinking=False)
        router = Router(lambda _: engine, lambda cell, cause: None)
        log = folder / "calls.log"
        app = GatewayApp(
            rendering,
            router,
            CallLog(log, incarnation=1),
            settings,
            max_context,
            harness.roles,
            deliver=DeliverMode(harness.deliver),
            session=harness.session,
        )
        router.route(CellId(0), "scripted engine", 64, Version(0))
        key = secrets.token_hex(16)
        app.open_execution(EXECUTION, ATTEMPT, key)
        runner = gateway_runner(app, SHUTDOWN_S)
        stand = cls(app, log, runner, "")
        runner.app.middlewares.append(stand._watch(f"/x/{key}"))
        await runner.setup()
        listening = listening or socket.create_server(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        stand.server = await runner.app[EDGE].serve(runner, listening)
        stand.url = f"http://127.0.0.1:{port}/x/{key}"
        return stand

    def _watch(self, prefix: str) -> Middleware:
        @web.middleware
        async def watch(request: web.Request, handler: Handler) -> web.StreamResponse:
            number = len(self.requests)
            path = request.path.removeprefix(prefix) or "/"
            self.requests.append(Seen(time.monotonic() - self.begun, request.method, path, 0))
            response = await handler(request)
            self.requests[number] = Seen(self.requests[number].after_s, request.method, path, response.status)
            return response

        return watch

    async def records(self) -> list[CallRecord]:
        """All calls so far."""
        await self.app.log.sync()
        return read_call_log(self.log)

    def forks(self) -> dict[Mismatch, int]:
        """Turns of the history that did not come back as they were recorded, by reason."""
        return dict(self.app.executions[EXECUTION, ATTEMPT].lineage.mismatches)

    async def stop(self) -> None:
        """End calls and connections."""
        if self.server is not None:
            self.server.close()
        await self.app.close()
        await self.runner.cleanup()
        self.app.log.close()
