"""Many executions that wait for slow generations at once: one gateway process on one core keeps all of them alive."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre_hpc.gateway.rendering import Rendering

from . import slow_parts

log = logging.getLogger(__name__)

KEEPALIVE_S = 2.0
SLACK_S = 8.0
"""What a busy machine may add to the interval: far below the 240 s of silence that harnesses take."""
PACE_S = 0.5
REQUEST = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "work " * 50}]}


@contextlib.contextmanager
def part(*arguments: object) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """A process of slow_parts: its port and itself."""
    command = [sys.executable, "-P", slow_parts.__file__, *map(str, arguments)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        try:
            yield int(process.stdout.readline()), process
        finally:
            process.stdin.close()


async def largest_gap(port: int, number: int) -> tuple[float, str]:
    """Ask once; the longest silence from the request to the end of the answer, and its text."""
    loop = asyncio.get_running_loop()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(REQUEST).encode()
    head = f"POST /x/{slow_parts.key(number)}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    heard, gap, received = loop.time(), 0.0, b""
    while b"data: [DONE]\n\n" not in received:
        received += (piece := await reader.read(1 << 16))
        assert piece, received[-300:]
        gap, heard = max(gap, loop.time() - heard), loop.time()
    writer.close()
    parts = [json.loads(line[6:]) for line in received.split(b"\n") if line.startswith(b"data: {")]
    return gap, "".join(c["delta"].get("content") or "" for part in parts for c in part["choices"])


async def all_at_once(port: int, calls: int) -> list[tuple[float, str]]:
    return await asyncio.gather(*(largest_gap(port, number) for number in range(calls)))


@pytest.mark.parametrize(
    ("calls", "tokens"), [(60, 24), pytest.param(500, 60, marks=pytest.mark.full)], ids=["few", "many"]
)
def test_every_client_hears_of_its_call_in_time(
    model_dir: Path, rendering: Rendering, calls: int, tokens: int
) -> None:
    core = min(os.sched_getaffinity(0))
    stop_id = rendering.stop_ids[0]
    with (
        part("engine", tokens, PACE_S, stop_id) as (engine, _),
        part("gateway", model_dir, f"http://127.0.0.1:{engine}", KEEPALIVE_S, calls, core) as (port, process),
    ):
        answers = asyncio.run(all_at_once(port, calls))
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        cpu_s = float(process.stdout.readline())
    gaps = sorted(gap for gap, _ in answers)
    log.info(
        "%d calls: largest gap %.2f s, median %.2f s, gateway %.1f s of CPU",
        calls,
        gaps[-1],
        gaps[calls // 2],
        cpu_s,
    )
    assert {len(text) for _, text in answers} == {tokens}
    assert gaps[0] > KEEPALIVE_S / 2, "the calls were too fast to need a keep-alive"
    assert gaps[-1] <= KEEPALIVE_S + SLACK_S
