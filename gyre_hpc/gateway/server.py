"""The HTTP face of the gateway: `/x/<key>/[v1/]...`, one key per attempt as identity and credential.

Generations are POST messages, chat/completions and responses; count_tokens, models and HEAD probes are answered here and leave
no record. A client that leaves is noticed at once (`handler_cancellation`), slow ones are bounded by the `EDGE` that serves
the application. The key is looked at before anything of the body is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from gyre_hpc.gateway.app import GatewayApp
from gyre_hpc.gateway.calls import Call, Execution
from gyre_hpc.gateway.canonical import History, Request, ToolForm
from gyre_hpc.gateway.delivery import WholeAnswer, deliver
from gyre_hpc.gateway.dialects.anthropic import AnthropicMessages
from gyre_hpc.gateway.dialects.base import AnswerStream, Dialect, Refusal, RefusalKind, Reply, invalid
from gyre_hpc.gateway.dialects.chat import ChatCompletions
from gyre_hpc.gateway.dialects.responses import OpenAIResponses
from gyre_hpc.gateway.edge import Edge, http_log, read_body, watched
from gyre_hpc.gateway.parts import DeliverMode
from gyre_hpc.gateway.rendering import ParsedAnswer, Rendering
from gyre_hpc.gateway.roles import Asker, compared, role_hint
from gyre_hpc.records import FinishReason

EDGE: web.AppKey[Edge] = web.AppKey("edge", Edge)
MODEL = "policy"
MODEL_CHARS = 256
"""Of the name a client gives the model: events repeat it."""
BYTES_PER_TOKEN = 64
"""No conversation takes so many: a body above this for every token of the context is too long without being counted, for a
tokenizer works off a megabyte or two per second, and all other calls wait meanwhile."""
ANTHROPIC, CHAT, RESPONSES = AnthropicMessages(), ChatCompletions(), OpenAIResponses()


def web_app(gateway: GatewayApp) -> web.Application:
    """The routes over one gateway."""
    server = GatewayServer(gateway)
    edge = Edge(gateway.settings.client_timeout_s)
    app = web.Application(client_max_size=server.max_body, middlewares=[watched(edge)])
    app[EDGE] = edge
    for version in ("/v1", ""):
        base = "/x/{key}" + version
        app.router.add_post(f"{base}/messages", server.messages)
        app.router.add_post(f"{base}/messages/count_tokens", server.count_tokens)
        app.router.add_post(f"{base}/chat/completions", server.chat)
        app.router.add_post(f"{base}/responses", server.responses)
        app.router.add_get(f"{base}/models", server.models, allow_head=False)
        app.router.add_get(f"{base}/models/{{model}}", server.models, allow_head=False)
    app.router.add_route("HEAD", "/x/{key}{rest:.*}", server.probe)
    app.router.add_route("*", "/{rest:.*}", server.unknown)
    return app


def gateway_runner(gateway: GatewayApp, shutdown_s: float) -> web.AppRunner:
    """Ready to be served by `runner.app[EDGE]`. Open connections get `shutdown_s` at the end."""
    return web.AppRunner(
        web_app(gateway),
        handler_cancellation=True,
        access_log=None,
        logger=http_log,
        shutdown_timeout=shutdown_s,
        auto_decompress=False,
    )


class GatewayServer:
    """Handlers."""

    def __init__(self, gateway: GatewayApp) -> None:
        self.gateway = gateway
        self.max_body = gateway.settings.max_body_mib << 20

    async def messages(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, ANTHROPIC)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, CHAT)

    async def responses(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, RESPONSES)

    async def count_tokens(self, request: web.Request) -> web.StreamResponse:
        try:
            self.gateway.execution(request.match_info["key"])
            body = await self._body(request)
            asked = ANTHROPIC.read(body, History())
            self._bound(body)
            prompt = self.gateway.rendering.render(asked.messages(0, len(asked.units)), asked.tools)
        except Refusal as refusal:
            return _refused(ANTHROPIC, refusal)
        except ValueError as error:
            return _refused(ANTHROPIC, invalid(f"the model's renderer refuses this conversation: {error}"))
        return _json({"input_tokens": len(prompt)})

    async def models(self, request: web.Request) -> web.StreamResponse:
        try:
            self.gateway.execution(request.match_info["key"])
        except Refusal as refusal:
            return _refused(_dialect(request), refusal)
        wanted = request.match_info.get("model")
        entry = _model_entry(wanted or MODEL)
        listing = {"object": "list", "data": [entry], "has_more": False, "first_id": MODEL, "last_id": MODEL}
        return _json(entry if wanted else listing)

    async def probe(self, request: web.Request) -> web.StreamResponse:
        try:
            self.gateway.execution(request.match_info["key"])
        except Refusal:
            return web.Response(status=404)
        return web.Response()

    async def unknown(self, request: web.Request) -> web.StreamResponse:
        text = f"{request.method} {request.path}: not found"
        return _refused(_dialect(request), Refusal(RefusalKind.NOT_FOUND, text))

    async def _body(self, request: web.Request) -> bytes:
        return await read_body(request, self.max_body, self.gateway.settings.client_timeout_s)

    async def _generate(self, request: web.Request, dialect: Dialect) -> web.StreamResponse:
        gateway = self.gateway
        try:
            gateway.execution(request.match_info["key"])
            body = await self._body(request)
            execution = gateway.execution(request.match_info["key"])
            asked, call = self._admitted(request, dialect, body, execution)
        except Refusal as refusal:
            return _refused(dialect, refusal)
        model, forms = asked.model, asked.forms
        in_parts = gateway.deliver.of(asked.stream) is DeliverMode.BLOCKS
        grammar: AnswerStream = WholeAnswer(dialect)
        if asked.stream:
            grammar = dialect.stream(asked, call.id, int(call.started), call.context.length)
        del asked, body
        gateway.arrive(call)
        keepalive_s = gateway.settings.keepalive_s
        try:
            return await deliver(
                request,
                call,
                grammar,
                lambda: _reply(call, model, forms),
                gateway.log.written,
                keepalive_s,
                partial(_so_far, gateway.rendering, call, model, forms) if in_parts else None,
            )
        finally:
            gateway.leave(execution, call)

    def _bound(self, body: bytes) -> None:
        """Raises Refusal for a body of which it can be said unread that it is too long."""
        tokens, limit = len(body) // BYTES_PER_TOKEN, self.gateway.max_context
        if tokens > limit:
            raise Refusal(RefusalKind.TOO_LONG, "", tokens=tokens, limit=limit)

    def _admitted(
        self, request: web.Request, dialect: Dialect, body: bytes, execution: Execution
    ) -> tuple[Request, Call]:
        """The request and the call that answers it. Raises Refusal, and leaves nothing of the request behind then."""
        gateway, history = self.gateway, execution.history
        before = history.sizes()
        try:
            asked = dialect.read(body, history)
            self._bound(body)
            if len(asked.model) > MODEL_CHARS:
                raise invalid(f"model: at most {MODEL_CHARS} characters")
            role = role_hint(request.headers, asked, gateway.roles, execution.past_roles)
            same = compared(request.headers, gateway.roles)
            shared = gateway.sessions.shared(request.headers, execution)
            return asked, gateway.call(execution, asked, Asker(role, same, shared))
        except Refusal:
            history.cut(before)
            raise


def _so_far(rendering: Rendering, call: Call, model: str, forms: Mapping[str, ToolForm]) -> Reply:
    """The call under way, with those parts of its answer that are complete."""
    return _reply(call, model, forms, rendering.completed(call.ids))


def _reply(
    call: Call, model: str, forms: Mapping[str, ToolForm], answer: ParsedAnswer | None = None
) -> Reply:
    answer = answer or call.answer
    assert answer is not None
    return Reply(
        call=call.id,
        model=model,
        created=int(call.started),
        answer=answer,
        finish=call.finish or FinishReason.STOP,
        stop_sequence=call.stop_sequence,
        prompt_tokens=call.context.length,
        output_tokens=len(call.ids),
        cached_tokens=call.cached_tokens,
        forms=forms,
    )


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _refused(dialect: Dialect, refusal: Refusal) -> web.Response:
    status, body = dialect.error(refusal)
    return web.Response(status=status, body=body, content_type="application/json")


def _dialect(request: web.Request) -> Dialect:
    """The dialect a client speaks outside the generation paths, for an error in its words."""
    return ANTHROPIC if "anthropic-version" in request.headers or "/messages" in request.path else CHAT


def _model_entry(name: str) -> dict[str, Any]:
    """One model in the words of both vendors."""
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": 0,
        "created_at": "1970-01-01T00:00:00Z",
        "owned_by": "gyre_hpc",
    }
