"""HTTP process of the embedded reference engine (CPU and tests; not a production engine): SGLang's endpoints we use.

    python -m gyre_hpc.engines.torch.server --model DIR --port-file FILE

Binds first, then writes "HOST PORT" to the port file; dies with its parent. Streams are incremental, as SGLang's under
--incremental-streaming-output. A body that cannot be served is refused with 400 naming the field, an engine whose
memory is released with 503, a control call the state does not allow with 400 naming the state. With a token every
request but GET /health must carry it (`Authorization: Bearer TOKEN`, as under SGLang's --api-key), else 401.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import logging
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
import uvloop
from aiohttp import web
from aiohttp.typedefs import Middleware

from gyre_hpc.engines import wire
from gyre_hpc.engines.torch.calls import Call, Finish
from gyre_hpc.engines.torch.service import Options, Reader, Service, Unavailable
from gyre_hpc.errors import GyreError
from gyre_hpc.launch.signals import die_with_parent

log = logging.getLogger(__name__)

_MAX_BODY = 256 * 2**20

_Body = TypeVar("_Body", bound=wire.Request)
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Endpoints:
    """One method per path."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[web.RouteDef]:
        """Paths and methods, as SGLang has them."""
        return [
            web.post("/generate", self.generate),
            web.post("/abort_request", self.abort),
            web.post("/pause_generation", self.pause),
            web.post("/continue_generation", self.resume),
            web.post("/flush_cache", self.flush),
            web.post("/release_memory_occupation", self.release),
            web.post("/resume_memory_occupation", self.take),
            web.post("/begin_weight_update", self.begin_update),
            web.post("/update_weights_from_disk", self.update),
            web.post("/end_weight_update", self.end_update),
            web.post("/weights_checker", self.checker),
            web.post("/kv/export", self.export),
            web.get("/health", self.health),
            web.get("/ready", self.ready),
            web.get("/server_info", self.server_info),
        ]

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Stream or return one generation; a client that goes away ends it."""
        body = await _body(request, wire.GenerateRequest)
        reader = self._service.submit(_call(body, self._service.batcher.model.shape.eos_token_ids))
        try:
            if body.stream:
                return await _stream(request, reader, body.return_logprob)
            while reader.call.finish is None:
                await _news(reader)
            return _json(_event(reader, body.return_logprob))
        finally:
            self._service.batcher.abort(reader.call)

    async def abort(self, request: web.Request) -> web.Response:
        body = await _body(request, wire.AbortRequest)
        if body.abort_all:
            self._service.abort_all()
        else:
            self._service.abort(body.rid)
        return web.Response()

    async def pause(self, request: web.Request) -> web.Response:
        self._service.pause((await _body(request, wire.PauseRequest)).mode)
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, request: web.Request) -> web.Response:
        self._service.resume()
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def flush(self, request: web.Request) -> web.Response:
        self._service.flush()
        return web.Response(text="Cache flushed.\n")

    async def release(self, request: web.Request) -> web.Response:
        self._service.release(_tags(await _body(request, wire.MemoryRequest)))
        return _json(None)

    async def take(self, request: web.Request) -> web.Response:
        self._service.take(_tags(await _body(request, wire.MemoryRequest)))
        return _json(None)

    async def begin_update(self, request: web.Request) -> web.Response:
        self._service.updating = True
        return _json(wire.UpdateAnswer(True))

    async def end_update(self, request: web.Request) -> web.Response:
        self._service.updating = False
        return _json(wire.UpdateAnswer(True))

    async def update(self, request: web.Request) -> web.Response:
        """Refused outside begin/end; a fault leaves the old weights in place."""
        body = await _body(request, wire.UpdateFromDiskRequest)
        if not self._service.updating:
            return _json(wire.UpdateAnswer(False, "call /begin_weight_update first"), 400)
        if body.abort_all_requests:
            self._service.abort_all()
        try:
            self._service.update(Path(body.model_path), body.weight_version, flush=body.flush_cache)
        except GyreError as error:
            log.exception("weight update from %s failed", body.model_path)
            return _json(wire.UpdateAnswer(False, str(error)), 400)
        return _json(wire.UpdateAnswer(True, f"serving {self._service.batcher.version}"))

    async def checker(self, request: web.Request) -> web.Response:
        await _body(request, wire.CheckerRequest)
        digest = self._service.checksum()
        return _json(
            wire.CheckerAnswer(True, ranks=[wire.RankChecksum({}, digest)], per_engine_checksum=digest)
        )

    async def export(self, request: web.Request) -> web.Response:
        body = await _body(request, wire.ExportRequest)
        return _json(await self._service.export(body.extra_key, body.input_ids, body.lease_s))

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def ready(self, request: web.Request) -> web.Response:
        serves = self._service.serves and not self._service.paused
        return web.Response(status=200 if serves else 503)

    async def server_info(self, request: web.Request) -> web.Response:
        return _json(self._service.info())


def _call(body: wire.GenerateRequest, eos: tuple[int, ...]) -> Call:
    """The engine's call. Raises ValueError naming a parameter outside the sampling law."""
    params = body.sampling_params
    if params.temperature not in (0.0, 1.0):
        raise ValueError(
            f"sampling_params.temperature={params.temperature}: this engine serves 1 and 0 (greedy)"
        )
    if params.top_p != 1.0:
        raise ValueError(f"sampling_params.top_p={params.top_p}: this engine serves 1")
    if params.top_k not in (-1, 0):
        raise ValueError(f"sampling_params.top_k={params.top_k}: this engine serves -1")
    if body.logprob_start_len != -1:
        raise ValueError(f"logprob_start_len={body.logprob_start_len}: this engine serves -1 (output only)")
    return Call(
        rid=body.rid or uuid.uuid4().hex,
        ids=body.input_ids,
        max_new_tokens=params.max_new_tokens,
        namespace=body.extra_key or "",
        stop_ids=frozenset() if params.ignore_eos else frozenset([*params.stop_token_ids, *eos]),
        greedy=params.temperature == 0.0,
    )


async def _stream(request: web.Request, reader: Reader, logprobs: bool) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    finished = False
    while not finished:
        await _news(reader)
        finished = reader.call.finish is not None
        tail = b"\n\ndata: [DONE]\n\n" if finished else b"\n\n"
        await response.write(b"data: " + msgspec.json.encode(_event(reader, logprobs)) + tail)
    await response.write_eof()
    return response


async def _news(reader: Reader) -> None:
    await reader.news.wait()
    reader.news.clear()


def _event(reader: Reader, with_logprobs: bool) -> wire.GenerateEvent:
    """What the call sampled since the last event, and its totals."""
    call, first = reader.call, reader.seen
    reader.seen = last = call.sampled
    ids = call.ids[call.prompt_tokens + first :]
    ends = [start for _, start in call.spans[1:]] + [last]
    meta = wire.MetaInfo(
        id=call.rid,
        finish_reason=_finish(call),
        prompt_tokens=call.prompt_tokens,
        completion_tokens=last,
        cached_tokens=call.cached_tokens,
        weight_version=call.spans[-1][0] if call.spans else "",
        weight_versions=[
            wire.WeightVersionSpan(version, start, end)
            for (version, start), end in zip(call.spans, ends, strict=bool(call.spans))
        ],
        output_token_logprobs=[
            (logprob, token, None) for logprob, token in zip(call.logprobs[first:], ids, strict=True)
        ]
        if with_logprobs
        else [],
        num_retractions=call.retractions,
        prompt_xxh3="" if first else wire.ids_xxh3(call.ids[: call.prompt_tokens]),
    )
    return wire.GenerateEvent(ids, meta)


def _finish(call: Call) -> wire.FinishInfo | None:
    match call.finish:
        case None:
            return None
        case Finish.STOP:
            return wire.FinishInfo("stop", matched=call.ids[-1])
        case Finish.LENGTH:
            return wire.FinishInfo("length", length=call.sampled)
        case Finish.ABORT:
            return wire.FinishInfo("abort", message="Aborted")


def _tags(body: wire.MemoryRequest) -> set[str]:
    return {"kv_cache", "weights"} if body.tags is None else set(body.tags)


async def _body(request: web.Request, kind: type[_Body]) -> _Body:
    raw = await request.read()
    return msgspec.json.decode(raw or b"{}", type=kind)


def _json(body: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


@web.middleware
async def _refusals(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Turn typed refusals into SGLang's error body."""
    try:
        return await handler(request)
    except (ValueError, Unavailable, GyreError) as error:
        status = 503 if isinstance(error, Unavailable) else 400
        log.warning("%s %s refused: %s", request.method, request.path, error)
        return _json(wire.ErrorAnswer(wire.ErrorBody(str(error), code=status)), status)


def _credential_check(token: str) -> Middleware:
    """Refuse whoever does not know `token`, before the body is read."""
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def check(request: web.Request, handler: _Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        public = request.method == "GET" and request.path == "/health"
        if public or hmac.compare_digest(given, expected):
            return await handler(request)
        log.warning("%s %s refused: no valid bearer token", request.method, request.path)
        answer = wire.ErrorAnswer(wire.ErrorBody("Unauthorized: no valid bearer token", code=401))
        return _json(answer, 401)

    return check


def application(service: Service, token: str = "") -> web.Application:
    """The aiohttp application; its lifetime runs the engine loop, and a fault of the loop ends the process.

    Without a `token` it is open to all.
    """

    async def engine_loop(app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(service.run())
        task.add_done_callback(_end_process_on_fault)
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    checks = [_credential_check(token)] if token else []
    app = web.Application(middlewares=[*checks, _refusals], client_max_size=_MAX_BODY)
    app.add_routes(Endpoints(service).routes())
    app.cleanup_ctx.append(engine_loop)
    return app


def _end_process_on_fault(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.critical("engine loop failed", exc_info=task.exception())
        os._exit(1)


async def listen(service: Service, host: str, port: int, token: str = "") -> tuple[web.AppRunner, str, int]:
    """Serve on host:port (0 = any free port); returns the runner to clean up and the address bound."""
    runner = web.AppRunner(
        application(service, token), handler_cancellation=True, access_log=None, shutdown_timeout=1.0
    )
    await runner.setup()
    await web.TCPSite(runner, host, port, backlog=1024).start()
    bound = runner.addresses[0]
    return runner, str(bound[0]), int(bound[1])


async def serve(options: Options, host: str, port: int, port_file: Path | None, token: str) -> None:
    """Bind, publish the address, serve until SIGINT, or SIGTERM unless it is ignored."""
    service = Service(options)
    runner, bound_host, bound_port = await listen(service, host, port, token)
    log.info("serving %s on %s:%d", options.model, bound_host, bound_port)
    if port_file is not None:
        partial = port_file.with_name(f".{port_file.name}.{os.getpid()}")
        partial.write_text(f"{bound_host} {bound_port}\n")
        partial.rename(port_file)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop.set)
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    service.abort_all()
    await runner.cleanup()


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m gyre_hpc.engines.torch.server", description=__doc__)
    parser.add_argument(
        "--model", type=Path, required=True, help="folder with config.json and model.safetensors"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 = any free port")
    parser.add_argument("--port-file", type=Path, help="written with 'HOST PORT' once bound")
    parser.add_argument("--page-tokens", type=int, default=16)
    parser.add_argument("--pool-tokens", type=int, default=65536)
    parser.add_argument("--capacity", type=int, default=11, help="calls that run at the same time; more wait")
    parser.add_argument("--max-context", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens-per-s", type=float, default=0.0, help="paced device; 0 = off")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--weight-version", default="0")
    parser.add_argument("--kv-store", type=Path, help="folder of the cell's host store of KV pages")
    parser.add_argument("--kv-store-mib", type=int, default=256)
    parser.add_argument("--api-key-stdin", action="store_true", help="the bearer token comes on stdin")
    parser.add_argument("--parent", type=int, help="pid of the starting process, to die with it")
    return parser.parse_args(argv)


def _token_of_stdin() -> str:
    """The bearer token; ends the process if there is none, for an engine open to all was not asked for."""
    token = sys.stdin.read().strip()
    if not token:
        sys.exit("--api-key-stdin: stdin is empty")
    return token


def main(argv: list[str] | None = None) -> None:
    """Entry point of the engine process."""
    args = _arguments(argv)
    if args.parent is not None:
        die_with_parent(args.parent)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm's to the whole step: the parent judges it
    token = _token_of_stdin() if args.api_key_stdin else ""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    torch.set_num_threads(args.threads)
    torch.set_num_interop_threads(1)
    options = Options(
        model=args.model,
        page_tokens=args.page_tokens,
        pool_tokens=args.pool_tokens,
        capacity=args.capacity,
        max_context=args.max_context,
        weight_version=args.weight_version,
        seed=args.seed,
        tokens_per_s=args.tokens_per_s,
        kv_store=args.kv_store,
        kv_store_bytes=args.kv_store_mib << 20,
    )
    try:
        uvloop.run(serve(options, args.host, args.port, args.port_file, token))
    except (GyreError, OSError) as error:
        log.critical("engine of %s on %s:%d: %s", args.model, args.host, args.port, error)
        sys.exit(1)


if __name__ == "__main__":
    main()
