"""What a client may cost: slow ones are cut, big requests refused in the dialect's words, strangers not even read."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import resource
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gyre_hpc.gateway.rendering import Rendering

from .fakes import KEY, RunningGateway

PATHS = {"anthropic": "messages", "chat": "chat/completions", "responses": "responses"}
ASK = {"model": "m", "max_tokens": 20, "messages": [{"role": "user", "content": "hi"}], "input": "hi"}
SMALL_BUFFER = 4096


@pytest.fixture
async def strict(rendering: Rendering, tmp_path: Path) -> AsyncIterator[RunningGateway]:
    """Half a second for clients, bodies of one MiB, and kernel buffers so small that a reader's pace shows."""
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER)
    running = await RunningGateway.start(
        rendering, tmp_path, listening=listening, client_timeout_s=0.5, max_body_mib=1
    )
    running.engine()
    yield running
    await running.stop()
    assert not running.edge.guards


async def connect(gateway: RunningGateway) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    port = int(gateway.url.split(":")[2].split("/")[0])
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
    return await asyncio.open_connection(sock=connection)


def head(path: str, *fields: str, key: str = KEY, method: str = "POST") -> bytes:
    return "\r\n".join([f"{method} /x/{key}/v1/{path} HTTP/1.1", "Host: x", *fields, "", ""]).encode()


async def answer(reader: asyncio.StreamReader) -> tuple[int, Any]:
    """Status and JSON body of one answer with a length."""
    top = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(top.split("content-length: ")[1].split("\r\n")[0])
    return int(top.split()[1]), json.loads(await reader.readexactly(length))


async def is_cut(reader: asyncio.StreamReader) -> bool:
    """Whether the other end ends the connection; waits for it."""
    with contextlib.suppress(ConnectionResetError):
        return await reader.read() == b""
    return True


@pytest.mark.parametrize("sent", [b"", b"POST /x/", head("models", method="GET")[:-2]])
async def test_a_head_that_does_not_arrive_ends_the_connection(strict: RunningGateway, sent: bytes) -> None:
    reader, writer = await connect(strict)
    writer.write(sent)
    async with asyncio.timeout(20):
        assert await is_cut(reader)
    writer.close()


async def test_a_trickle_of_head_bytes_is_no_life(strict: RunningGateway) -> None:
    reader, writer = await connect(strict)

    async def trickle() -> None:
        writer.write(b"GET /")
        while True:
            writer.write(b"x")
            await asyncio.sleep(0.05)

    trickling = asyncio.create_task(trickle())
    async with asyncio.timeout(20):
        assert await is_cut(reader)
    trickling.cancel()
    await asyncio.wait([trickling])


async def test_a_connection_may_rest_between_requests(strict: RunningGateway) -> None:
    reader, writer = await connect(strict)
    for _ in range(2):
        writer.write(head("models", method="GET"))
        assert (await answer(reader))[0] == 200
        await asyncio.sleep(2 * strict.app.settings.client_timeout_s)
    assert len(strict.edge.guards) == 1
    writer.close()


@pytest.mark.parametrize("dialect", PATHS)
async def test_a_slow_body_is_refused_in_the_dialects_words(strict: RunningGateway, dialect: str) -> None:
    reader, writer = await connect(strict)
    writer.write(head(PATHS[dialect], "Content-Length: 100") + b'{"model"')
    async with asyncio.timeout(20):
        status, body = await answer(reader)
    assert status == 408 and "0.5 s" in body["error"]["message"]
    assert body["error"]["type"] == "invalid_request_error"
    writer.close()


@pytest.mark.parametrize("dialect", PATHS)
@pytest.mark.parametrize("way", ["declared", "chunked", "compressed"])
async def test_a_big_body_is_refused_in_the_dialects_words(
    strict: RunningGateway, dialect: str, way: str
) -> None:
    big = json.dumps({**ASK, "metadata": "x" * (2 << 20)}).encode()
    data: Any = {"declared": big, "chunked": _pieces(big), "compressed": gzip.compress(big)}[way]
    headers = {"Content-Encoding": "gzip"} if way == "compressed" else {}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{strict.url}/v1/{PATHS[dialect]}", data=data, headers=headers) as response,
    ):
        body = await response.json()
    assert response.status == 413 and f"{1 << 20} bytes" in body["error"]["message"]
    if dialect == "anthropic":
        assert body["type"] == "error" and body["error"]["type"] == "request_too_large"
    else:
        assert body["error"]["code"] == "request_too_large"
    assert await strict.records() == []


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(data), 1 << 16):
        yield data[at : at + (1 << 16)]


async def test_a_packet_is_unpacked_as_far_as_the_limit(strict: RunningGateway) -> None:
    """Refusing costs no more than the limit allows, however much is packed; a whole packet is served."""
    spent = {}
    for size in (2, 256):
        bomb = gzip.compress(b"\0" * (size << 20))
        before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert await post(strict, bomb) == 413
        spent[size] = time.process_time() - before[0]
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before[1] < 64 << 10
    assert spent[256] < 10 * spent[2]
    strict.script.answers = ["hello<|im_end|>"]
    assert await post(strict, gzip.compress(json.dumps(ASK).encode())) == 200


async def post(gateway: RunningGateway, data: bytes) -> int:
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"{gateway.url}/v1/messages", data=data, headers={"Content-Encoding": "gzip"}
        ) as response,
    ):
        await response.read()
        return response.status


@pytest.mark.parametrize(
    "fields", [["Content-Encoding: gzip"], ["Content-Encoding: br"], ["Transfer-Encoding: chunked"]]
)
async def test_a_body_that_is_not_what_its_head_says_is_a_bad_request(
    strict: RunningGateway, fields: list[str]
) -> None:
    reader, writer = await connect(strict)
    length = [] if "chunked" in fields[0] else ["Content-Length: 9"]
    writer.write(head("messages", *fields, *length) + b"no such x\r\n")
    async with asyncio.timeout(20):
        top = await reader.readuntil(b"\r\n\r\n")
    assert top.split()[1] == b"400"
    writer.close()


@pytest.mark.parametrize("fields", [["X-Big: " + "x" * 10_000], [f"X-{number}: 1" for number in range(500)]])
async def test_heads_are_bounded(strict: RunningGateway, fields: list[str]) -> None:
    reader, writer = await connect(strict)
    writer.write(head("models", *fields, method="GET"))
    async with asyncio.timeout(20):
        top = await reader.readuntil(b"\r\n\r\n")
    assert top.split()[1] == b"400"
    writer.close()


async def test_of_a_stranger_nothing_but_the_head_is_read(strict: RunningGateway) -> None:
    """An unknown key and a revoked one get the same answer while their body is still to come."""
    strict.app.open_execution(8, 1, "r" * 32)
    await strict.app.close_execution(8, 1)
    answers = []
    for key in ("u" * 32, "r" * 32):
        reader, writer = await connect(strict)
        writer.write(head("messages", "Content-Length: 1000000", key=key))
        async with asyncio.timeout(20):
            answers.append(await answer(reader))
        writer.close()
    assert answers[0] == answers[1] and answers[0][0] == 404
    assert answers[0][1]["error"]["type"] == "not_found_error"


async def test_a_key_that_is_revoked_while_its_body_arrives_opens_nothing(strict: RunningGateway) -> None:
    body = json.dumps(ASK).encode()
    reader, writer = await connect(strict)
    writer.write(head("messages", f"Content-Length: {len(body)}") + body[:5])
    while not any(guard._working for guard in strict.edge.guards.values()):
        await asyncio.sleep(0.001)
    await strict.app.close_execution(7, 1)
    writer.write(body[5:])
    assert (await answer(reader))[0] == 404
    writer.close()


async def test_who_takes_no_answers_is_cut_off_and_others_are_served(strict: RunningGateway) -> None:
    _, greedy = await connect(strict)
    greedy.write(head("models", method="GET") * 3000)
    while not any(guard._taking for guard in strict.edge.guards.values()):
        await asyncio.sleep(0.01)
    strict.script.answers = ["hello<|im_end|>"]
    served = await strict.chat([{"role": "user", "content": "hi"}])
    assert served["choices"][0]["message"]["content"] == "hello"
    async with asyncio.timeout(20):
        while len(strict.edge.guards) > 1:
            await asyncio.sleep(0.01)
        while strict.edge.guards:
            await asyncio.sleep(0.01)
    greedy.close()


async def test_connections_are_bounded_and_those_there_go_on(strict: RunningGateway) -> None:
    strict.edge.room = 2
    first = [await connect(strict) for _ in range(2)]
    for reader, writer in first:
        writer.write(head("models", method="GET"))
        assert (await answer(reader))[0] == 200
    reader, writer = await connect(strict)
    async with asyncio.timeout(20):
        assert await is_cut(reader)
    writer.close()
    for reader, writer in first:
        writer.write(head("models", method="GET"))
        assert (await answer(reader))[0] == 200
        writer.close()


async def test_a_name_of_a_model_is_not_as_long_as_you_like(strict: RunningGateway) -> None:
    answer = await strict.chat([{"role": "user", "content": "hi"}], model="m" * 300)
    assert answer["status"] == 400 and "256" in answer["error"]["message"]
