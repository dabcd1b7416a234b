"""Two processes for test_many_calls: `gateway MODEL ENGINE_URL KEEPALIVE_S CALLS CORE` and `engine TOKENS PACE_S STOP_ID`.

Each prints its port and ends with its standard input. The gateway is whole but for its controller, on one core; the engine streams
one token per `PACE_S` to every call, as SGLang does.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import sys
import tempfile
from pathlib import Path

import aiohttp
import msgspec
import uvloop
from aiohttp import web

from gyre_hpc.config import GatewayConfig
from gyre_hpc.engines.client import EngineClient
from gyre_hpc.engines.wire import FinishInfo, GenerateEvent, MetaInfo
from gyre_hpc.gateway.app import GatewayApp
from gyre_hpc.gateway.call_log import CallLog
from gyre_hpc.gateway.rendering import Rendering
from gyre_hpc.gateway.routing import Router
from gyre_hpc.gateway.server import EDGE, gateway_runner
from gyre_hpc.records import CellId, Version

TEXT_ID = 70


def key(number: int) -> str:
    """Of execution `number`."""
    return f"{number:032x}"


async def until_asked() -> None:
    """Until standard input ends."""
    await asyncio.to_thread(sys.stdin.read)


async def gateway(model: Path, engine: str, keepalive_s: float, calls: int) -> None:
    """Serve one execution per call."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        client = EngineClient(engine, session)
        router = Router(lambda _: client, lambda *_: None)
        router.route(CellId(0), engine, calls, Version(0))
        log = CallLog(Path(tempfile.mkdtemp()) / "calls.log", 1)
        rendering = Rendering(model, "qwen3", thinking=False)
        app = GatewayApp(rendering, router, log, GatewayConfig(keepalive_s=keepalive_s), 4000)
        syncing = asyncio.create_task(log.keep_synced(1.0))
        for number in range(calls):
            app.open_execution(number, 1, key(number))
        runner = gateway_runner(app, 1.0)
        await runner.setup()
        listening = socket.create_server(("127.0.0.1", 0))
        server = await runner.app[EDGE].serve(runner, listening)
        sys.stdout.write(f"{listening.getsockname()[1]}\n")
        sys.stdout.flush()
        await until_asked()
        sys.stdout.write(f"{sum(os.times()[:2])}\n")
        server.close()
        syncing.cancel()
        await app.close()
        await runner.cleanup()


async def engine(tokens: int, pace_s: float, stop_id: int) -> None:
    """Answer every call with `tokens` tokens and the stop token."""

    async def generate(request: web.Request) -> web.StreamResponse:
        prompt = len(msgspec.json.decode(await request.read())["input_ids"])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for count in itertools.count(1):
            last = count > tokens
            token = stop_id if last else TEXT_ID
            finish = FinishInfo("stop", matched=stop_id) if last else None
            meta = MetaInfo("", finish, prompt, count, 0, "0", [], [(-0.5, token, None)])
            event = GenerateEvent([token], meta)
            await response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")
            if last:
                break
            await asyncio.sleep(pace_s)
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    await web.SockSite(runner, listening, backlog=1024).start()
    sys.stdout.write(f"{listening.getsockname()[1]}\n")
    sys.stdout.flush()
    await until_asked()
    await runner.cleanup()


if __name__ == "__main__":
    role, *given = sys.argv[1:]
    if role == "gateway":
        os.sched_setaffinity(0, {int(given[4])})
        uvloop.run(gateway(Path(given[0]), given[1], float(given[2]), int(given[3])))
    else:
        uvloop.run(engine(int(given[0]), float(given[1]), int(given[2])))
