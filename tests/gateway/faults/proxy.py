"""A fault-injecting proxy between the gateway and one real engine.

It hands tokens on one by one, so that every phase of an answer can be met exactly. Armed, each call that reaches the
phase is treated once: cut by an abort at the engine, or reset, or held. Held calls stay silent until their connection
ends; `caught` counts those treated. Unarmed it only relays.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
from aiohttp import web

from gyre_hpc.gateway.rendering import Rendering

INTO = 3
"""Tokens of a part after which a call is in the middle of it: every part has four letters at least."""


class Phase(enum.StrEnum):
    """How far the gateway has received an answer."""

    BEFORE_FIRST_TOKEN = "before_first_token"
    MID_THINKING = "mid_thinking"
    MID_TEXT = "mid_text"
    MID_TOOL_CALL = "mid_tool_call"
    AFTER_LAST_TOKEN = "after_last_token"


class Treatment(enum.StrEnum):
    """What happens to a call that reaches the phase."""

    ABORT = "abort"
    RESET = "reset"
    HOLD = "hold"


class Aborted(Exception):
    """The call was cut: its stream ends with the `tokens` it has."""

    def __init__(self, tokens: int) -> None:
        super().__init__(tokens)
        self.tokens = tokens


_OPENS = {
    Phase.MID_THINKING: ("<think>", INTO),
    Phase.MID_TEXT: ("</think>", INTO),
    Phase.MID_TOOL_CALL: ("<tool_call>", INTO),
    Phase.AFTER_LAST_TOKEN: ("<|im_end|>", 0),
}


class FaultProxy:
    """One proxy before the engine at `upstream`."""

    def __init__(self, upstream: str, rendering: Rendering) -> None:
        self._upstream = upstream
        self._rendering = rendering
        self._phase: Phase | None = None
        self._treatment = Treatment.HOLD
        self.caught = 0
        self.changed = asyncio.Event()
        self._done: set[str] = set()

    async def serve(self) -> None:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    def arm(self, phase: Phase | None, treatment: Treatment = Treatment.HOLD) -> None:
        """From here on calls that reach the phase are treated; None = relay only."""
        self._phase, self._treatment = phase, treatment
        self.caught = 0

    async def until(self, *, caught: int) -> None:
        """So many calls have been treated since `arm`."""
        while self.caught < caught:
            await self.changed.wait()

    def _notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def _abort(self, request: web.Request) -> web.Response:
        async with self._session.post(f"{self._upstream}/abort_request", data=await request.read()) as answer:
            return web.Response(status=answer.status, body=await answer.read())

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        asked = json.loads(body)
        try:
            async with self._session.post(f"{self._upstream}/generate", data=body) as answer:
                assert answer.status == 200, await answer.text()
                return await self._relay(request, asked, answer)
        except (aiohttp.ClientError, ConnectionResetError):
            self._reset(request)
            return web.Response()

    async def _relay(
        self, request: web.Request, asked: dict[str, Any], answer: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            await self._hand_on(request, response, asked, answer)
        except Aborted as cut:
            meta = {"completion_tokens": cut.tokens, "finish_reason": {"type": "abort"}}
            await response.write(_line({"output_ids": [], "meta_info": meta}))
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _hand_on(
        self,
        request: web.Request,
        response: web.StreamResponse,
        asked: dict[str, Any],
        answer: aiohttp.ClientResponse,
    ) -> None:
        rid, ids = asked["rid"], self._turn(asked["input_ids"])
        if self._phase is Phase.BEFORE_FIRST_TOKEN and _call(rid) not in self._done:
            await self._treat(request, rid)
        async for event in _events(answer):
            for piece in _pieces(event):
                ids += piece["output_ids"]
                struck = self._reached(rid, ids)
                if struck:
                    piece["meta_info"]["finish_reason"] = None
                await response.write(_line(piece))
                if struck:
                    await self._treat(request, rid, piece["meta_info"]["completion_tokens"])

    def _turn(self, prompt: list[int]) -> list[int]:
        """What of the prompt belongs to the answer: tokens received before the call moved here."""
        start = self._rendering.tokenizer.convert_tokens_to_ids("<|im_start|>")
        return prompt[len(prompt) - prompt[::-1].index(start) :]

    def _reached(self, rid: str, ids: Sequence[int]) -> bool:
        """Whether the call is in the phase, and not treated yet."""
        if self._phase in (None, Phase.BEFORE_FIRST_TOKEN) or _call(rid) in self._done:
            return False
        mark, tokens = _OPENS[self._phase]
        token = self._rendering.tokenizer.convert_tokens_to_ids(mark)
        return token in ids and len(ids) - ids.index(token) > tokens

    async def _treat(self, request: web.Request, rid: str, tokens: int = 0) -> None:
        self._done.add(_call(rid))
        self.caught += 1  # first: who has the last token need not wait for the rest, and ends this request
        self._notify()
        if self._treatment is Treatment.ABORT:
            abort = {"rid": rid}
            async with self._session.post(f"{self._upstream}/abort_request", json=abort) as answer:
                assert answer.status == 200
            raise Aborted(tokens)
        if self._treatment is Treatment.RESET:
            self._reset(request)
            raise ConnectionResetError("planted reset")
        if self._treatment is Treatment.HOLD:
            await asyncio.Event().wait()

    @staticmethod
    def _reset(request: web.Request) -> None:
        if request.transport is not None:
            raw = request.transport.get_extra_info("socket")
            with contextlib.suppress(OSError):
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            request.transport.abort()


def _call(rid: str) -> str:
    """The call of a request to an engine."""
    return rid.split(".")[0]


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in answer.content:
        data = line.removeprefix(b"data:").strip()
        if data and data != b"[DONE]":
            yield json.loads(data)


def _pieces(event: dict[str, Any]) -> list[dict[str, Any]]:
    """The event as events of one token each."""
    ids, meta = event["output_ids"], event["meta_info"]
    if len(ids) < 2:
        return [event]
    meta["weight_versions"] = []
    before = meta["completion_tokens"] - len(ids)
    logprobs = meta["output_token_logprobs"]
    return [
        {
            "output_ids": [token],
            "meta_info": meta
            | {
                "completion_tokens": before + place + 1,
                "output_token_logprobs": [logprobs[place]],
                "finish_reason": meta["finish_reason"] if place == len(ids) - 1 else None,
            },
        }
        for place, token in enumerate(ids)
    ]


def _line(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"
