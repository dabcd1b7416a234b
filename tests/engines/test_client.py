"""The client against servers that are not the embedded engine: SGLang's cumulative streams, refusals, broken ones."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from gyre_hpc.engines import wire
from gyre_hpc.engines.client import (
    Chunk,
    EngineClient,
    EngineRefused,
    EngineUnreachable,
    PromptChanged,
    generate_options,
)
from gyre_hpc.errors import ProtocolViolation

IDS = [11, 12, 13, 14, 15]
SPANS = [{"version": "4", "start": 0, "end": 2}, {"version": "5", "start": 2, "end": 5}]


@asynccontextmanager
async def serving(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
) -> AsyncIterator[EngineClient]:
    """A client of a server that answers every path with `handler`."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    async with aiohttp.ClientSession() as session:
        yield EngineClient(f"http://{host}:{port}", session)
    await runner.cleanup()


def event(first: int, last: int, finish: dict[str, object] | None = None, **meta: object) -> bytes:
    """A stream event that shows tokens first..last-1 of the answer, as SGLang 0.5.21 writes it."""
    spans = [
        span | {"end": min(int(str(span["end"])), last)} for span in SPANS if int(str(span["start"])) < last
    ]
    body = {
        "text": "",
        "output_ids": IDS[first:last],
        "meta_info": {
            "id": "call",
            "finish_reason": finish,
            "prompt_tokens": 3,
            "completion_tokens": last,
            "cached_tokens": 2,
            "weight_version": spans[-1]["version"] if spans else "4",
            "weight_versions": spans,
            "output_token_logprobs": [[-0.5 * k, IDS[k], None] for k in range(first, last)],
            "e2e_latency": 0.1,
        }
        | meta,
    }
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def stream(*parts: bytes) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for part in parts:
            await response.write(part)
        return response

    return handler


async def chunks(client: EngineClient) -> list[Chunk]:
    return [chunk async for chunk in client.generate("call", [1, 2, 3], 8, "w4", [0])]


STOP = {"type": "stop", "matched": 15}
DONE = b"data: [DONE]\n\n"
STREAMS = {
    "cumulative": [event(0, 1), event(0, 2), event(0, 4), event(0, 5, STOP), DONE],
    "incremental": [event(0, 1), event(1, 2), event(2, 4), event(4, 5, STOP), DONE],
    "repeated at the end": [event(0, 5), event(4, 5, STOP), DONE],
}


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("cut", [0, 7, 150])
async def test_both_streaming_modes_give_the_same_tokens(kind: str, cut: int) -> None:
    whole = b"".join(STREAMS[kind])
    parts = [whole[at : at + cut] for at in range(0, len(whole), cut)] if cut else [whole]
    async with serving(stream(*parts)) as client:
        got = await chunks(client)
    assert [token for chunk in got for token in chunk.ids] == IDS
    assert [value for chunk in got for value in chunk.logprobs] == [0.0, -0.5, -1.0, -1.5, -2.0]
    assert [version for chunk in got for version in chunk.versions] == [4, 4, 5, 5, 5]
    assert [chunk.finish for chunk in got][-1] == "stop" and {chunk.finish for chunk in got[:-1]} <= {None}
    assert {chunk.cached_tokens for chunk in got} == {2}


async def test_an_abort_from_the_waiting_queue_is_an_empty_final_chunk() -> None:
    body = {"text": "", "output_ids": [], "meta_info": {"id": "call", "finish_reason": {"type": "abort"}}}
    async with serving(stream(b"data: " + msgspec.json.encode(body) + b"\n\n")) as client:
        assert await chunks(client) == [Chunk([], [], [], "abort", 0, 3)]


@pytest.mark.parametrize("parts", [[event(0, 2)], [event(0, 2), DONE], []], ids=["cut", "done", "empty"])
async def test_a_stream_that_ends_unfinished_is_unreachable(parts: list[bytes]) -> None:
    async with serving(stream(*parts)) as client:
        with pytest.raises(EngineUnreachable, match=r"call call ended unfinished"):
            await chunks(client)


async def test_a_broken_connection_is_unreachable_and_keeps_what_was_yielded() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(event(0, 2))
        assert request.transport is not None
        request.transport.abort()
        return response

    got = []
    async with serving(handler) as client:
        with pytest.raises(EngineUnreachable):
            async for chunk in client.generate("call", [1, 2, 3], 8, "w4"):
                got += chunk.ids
    assert got in ([], IDS[:2])


async def test_an_error_event_inside_a_stream_is_a_refusal() -> None:
    body = {
        "error": {
            "message": "input too long",
            "type": "invalid_request_error",
            "code": 400,
            "retryable": False,
        }
    }
    async with serving(stream(b"data: " + msgspec.json.encode(body) + b"\n\n", DONE)) as client:
        with pytest.raises(EngineRefused, match="input too long") as refused:
            await chunks(client)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"error": {"message": "bad field x", "type": "t", "code": 400}}', "bad field x"),
        (b'{"success": false, "message": "not in a session"}', "not in a session"),
        (b"Flush cache failed.\n", "Flush cache failed."),
    ],
)
async def test_a_refusal_quotes_the_reason_in_every_shape(body: bytes, reason: str) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(status=400, body=body)

    async with serving(handler) as client:
        with pytest.raises(EngineRefused, match=reason):
            await client.flush()


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (event(0, 2, completion_tokens=9), "9 tokens declared"),
        (event(0, 2, prompt_tokens=4), "prompt of 3 tokens"),
        (event(0, 2, weight_version="default", weight_versions=[]), "weight-version"),
        (b"data: {nonsense}\n\n", "bad stream event"),
    ],
)
async def test_an_answer_that_cannot_be_true_is_a_protocol_violation(bad: bytes, named: str) -> None:
    async with serving(stream(bad)) as client:
        with pytest.raises(ProtocolViolation, match=named):
            await chunks(client)


async def test_a_prompt_of_another_length_is_another_prompt() -> None:
    async with serving(stream(event(0, 2, prompt_tokens=4))) as client:
        with pytest.raises(PromptChanged):
            await chunks(client)


async def test_nobody_listening_is_unreachable_and_unhealthy() -> None:
    async with serving(stream()) as client:
        url = client.base_url
    async with aiohttp.ClientSession() as session:
        gone = EngineClient(url, session)
        assert not await gone.health()
        with pytest.raises(EngineUnreachable, match=url):
            await gone.pause()


async def test_an_abort_waits_until_the_engine_has_taken_the_call() -> None:
    """Otherwise an abort that overtakes its call on another connection would be ignored as unknown."""
    order: list[str] = []
    aborted = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        if request.path == "/abort_request":
            order.append("abort")
            aborted.set()
            return web.Response()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(aborted.wait(), 0.2)
        order.append("taken")
        response = web.StreamResponse()
        await response.prepare(request)
        await aborted.wait()
        await response.write(event(0, 2, {"type": "abort"}))
        return response

    async with serving(handler) as client:
        call = asyncio.create_task(chunks(client))
        await asyncio.sleep(0)
        await client.abort("call")
        assert [chunk.finish for chunk in await call] == ["abort"]
    assert order == ["taken", "abort"]


@given(pieces=st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=4), max_size=5))
def test_a_prompt_encoded_piece_by_piece_is_the_prompt(pieces: list[list[int]]) -> None:
    whole = [token for piece in pieces for token in piece]
    prompt = sum((wire.EncodedIds.of(piece) for piece in pieces), wire.EncodedIds.of([]))
    assert (prompt.count, prompt.ids()) == (len(whole), whole)
    options = generate_options("call", 8, "w4", [0, 7])
    body = msgspec.json.decode(wire.encode_generate(prompt, options), type=wire.GenerateRequest)
    sampling = wire.SamplingParams(8, stop_token_ids=[0, 7])
    assert body == wire.GenerateRequest(
        sampling, input_ids=whole, rid="call", return_logprob=True, stream=True, extra_key="w4"
    )
