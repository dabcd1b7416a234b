from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import aiohttp
import psutil
import pytest

from gyre_hpc.config import EngineConfig
from gyre_hpc.engines.client import EngineClient
from gyre_hpc.engines.process import EngineProcess, EngineStartFailed
from gyre_hpc.errors import ConfigError
from gyre_hpc.records import Version

from .models import PAGE


def engine_of(model: Path, folder: Path, **changes: object) -> EngineProcess:
    config = EngineConfig(page_tokens=PAGE, pool_tokens=1024, capacity=2, **changes)  # type: ignore[arg-type]
    return EngineProcess(config, model, Version(5), folder / "logs" / "engine.log", max_context=256)


async def test_an_engine_process_starts_serves_and_stops(model: Path, tmp_path: Path) -> None:
    engine = engine_of(model, tmp_path)
    url = await engine.start()
    try:
        async with aiohttp.ClientSession() as session:
            client = EngineClient(url, session)
            assert await client.health()
            info = await client.server_info()
            assert (info.capacity, info.pool_tokens, info.weight_version) == (2, 1024, "5")
            versions = [v async for c in client.generate("call", [3, 4], 5, "w5") for v in c.versions]
            assert versions == [5] * len(versions) != []
        assert engine.poll() is None
    finally:
        await engine.stop()
    assert engine.poll() == 0
    assert await engine.wait() == 0


async def test_a_token_reaches_the_engine_and_no_place_where_others_look(model: Path, tmp_path: Path) -> None:
    engine = engine_of(model, tmp_path)
    engine.token = "a-token-of-the-run"
    url = await engine.start()
    try:
        async with aiohttp.ClientSession() as session:
            assert await EngineClient(url, session).health()
            assert not await EngineClient(url, session).ready()
            assert await EngineClient(url, session, engine.token).ready()
        process = psutil.Process(engine.pid)
        shown = [*process.cmdline(), *process.environ().values(), repr(engine), engine.log_path.read_text()]
        assert engine.token not in " ".join(shown)
    finally:
        await engine.stop()


async def test_a_killed_engine_is_seen_and_can_be_started_again(model: Path, tmp_path: Path) -> None:
    engine = engine_of(model, tmp_path)
    await engine.start()
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    assert await engine.wait() == engine.poll() == -signal.SIGKILL
    await engine.start()
    assert engine.poll() is None
    await engine.stop()


async def test_an_engine_that_cannot_start_quotes_its_log(tmp_path: Path) -> None:
    engine = engine_of(tmp_path / "nowhere", tmp_path)
    with pytest.raises(EngineStartFailed, match=r"config\.json: no such file"):
        await engine.start()
    assert engine.poll() not in (None, 0)


async def test_an_engine_that_does_not_serve_in_time_is_ended(model: Path, tmp_path: Path) -> None:
    engine = engine_of(model, tmp_path, start_timeout_s=0.05)
    with pytest.raises(EngineStartFailed, match="did not serve within"):
        await engine.start()
    assert engine.poll() is not None


async def test_an_unknown_kind_is_refused_by_key(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.kind=sglang"):
        await engine_of(model, tmp_path, kind="sglang").start()


def test_a_port_in_use_is_named(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [
            sys.executable,
            "-m",
            "gyre_hpc.engines.torch.server",
            "--model",
            str(model),
            "--port",
            port,
        ]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert f"127.0.0.1:{port}" in ended.stderr


async def test_an_engine_dies_with_the_process_that_started_it(model: Path, tmp_path: Path) -> None:
    script = (
        "import asyncio, pathlib, sys\n"
        "from gyre_hpc.config import EngineConfig\n"
        "from gyre_hpc.engines.process import EngineProcess\n"
        "async def main():\n"
        "    engine = EngineProcess(EngineConfig(), pathlib.Path(sys.argv[1]), 0, pathlib.Path(sys.argv[2]), 256)\n"
        "    await engine.start()\n"
        "    sys.stdout.write(f'{engine.pid}\\n'); sys.stdout.flush()\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, str(model), str(tmp_path / "log"), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    child = psutil.Process(int(await parent.stdout.readline()))
    parent.kill()
    await parent.wait()
    await asyncio.to_thread(psutil.wait_procs, [child], 60)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
