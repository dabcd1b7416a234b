"""The process group of a server, with a stand-in for SGLang that leaves a stubborn child behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import psutil
import pytest

from gyre_hpc.config import EngineConfig
from gyre_hpc.config_engine import SglangConfig
from gyre_hpc.engines.client import EngineClient
from gyre_hpc.engines.sglang.process import SglangProcess, group_members
from gyre_hpc.engines.wire import EncodedIds
from gyre_hpc.kv.page_store import PageStore
from gyre_hpc.records import Version

FAKE = Path(__file__).with_name("fake_server.py")


@pytest.fixture
async def engine(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[SglangProcess]:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("REAL_PYTHON", sys.executable)
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    config = EngineConfig(kind="sglang", sglang=SglangConfig(python=str(python), device="cpu"))
    process = SglangProcess(config, model, Version(0), tmp_path / "log", 256, token="secret")
    await process.start()
    yield process
    await process.stop()


def child_of(folder: Path) -> psutil.Process:
    return psutil.Process(int((folder / "seen").read_text().split()[0]))


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


async def test_stopping_leaves_no_process_behind(engine: SglangProcess, tmp_path: Path) -> None:
    child = child_of(tmp_path)
    assert engine.pid is not None
    assert child.pid in group_members(engine.pid)
    await engine.stop()
    assert gone(child)
    assert group_members(engine.pid) == []


async def test_a_killed_server_is_over_only_when_all_it_started_is(
    engine: SglangProcess, tmp_path: Path
) -> None:
    child = child_of(tmp_path)
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    assert await engine.wait() == -signal.SIGKILL
    assert gone(child)


async def test_the_watch_of_a_dead_server_leaves_its_successor_alone(
    engine: SglangProcess, tmp_path: Path
) -> None:
    assert engine.pid is not None
    watching = asyncio.create_task(engine.wait())
    await asyncio.sleep(0)
    os.kill(engine.pid, signal.SIGKILL)
    while engine.poll() is None:
        await asyncio.sleep(0.01)
    await engine.start()
    assert await watching == -signal.SIGKILL
    assert engine.poll() is None
    assert not gone(child_of(tmp_path))


async def test_the_server_sees_this_package_and_no_other_of_our_environment(
    engine: SglangProcess, tmp_path: Path
) -> None:
    folder = Path((tmp_path / "seen").read_text().split()[1])
    assert sorted(path.name for path in folder.iterdir()) == ["gyre_hpc", "gyre_sglang_cpu-1.dist-info"]
    assert (folder / "gyre_hpc" / "engines" / "sglang" / "server.py").is_file()
    await engine.stop()
    assert not folder.exists()


def test_the_server_keeps_its_pages_where_its_cell_looks_for_them(model: Path, tmp_path: Path) -> None:
    config = EngineConfig(kind="sglang", sglang=SglangConfig(kv_folder="/shared/kv"))
    process = SglangProcess(config, model, Version(0), tmp_path, 256, kv_store=Path("/shared/kv/run"))
    command = process._command(tmp_path / "port")
    extra = json.loads(command[command.index("--hicache-storage-backend-extra-config") + 1])
    assert extra["folder"] == "/shared/kv/run"


async def test_a_server_of_several_ranks_offers_no_pages_and_nobody_waits_for_them(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def waited(seconds: float) -> None:
        raise AssertionError("the call was held for pages that do not come")

    store, ids = PageStore(tmp_path / "kv", 1 << 20), EncodedIds.of(list(range(40)))
    config = EngineConfig(kind="sglang", sglang=SglangConfig(tensor_parallel=2))
    process = SglangProcess(config, model, Version(0), tmp_path, 256, kv_store=store.folder)
    async with aiohttp.ClientSession() as session:
        client = EngineClient("http://127.0.0.1:1", session)
        monkeypatch.setattr(asyncio, "sleep", waited)
        answer = await process.export(client, store, ids, "w1", 60.0)
    assert (answer.keys, answer.page_tokens) == ([], config.page_tokens)
