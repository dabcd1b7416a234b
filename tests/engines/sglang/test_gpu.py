"""What only a GPU shows. Needs a CUDA SGLang: GYRE_SGLANG names the folder of its environment."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from gyre_hpc.config import EngineConfig
from gyre_hpc.config_engine import SglangConfig
from gyre_hpc.engines.client import EngineClient
from gyre_hpc.engines.sglang.process import SglangProcess
from gyre_hpc.engines.weights import read_weights
from gyre_hpc.records import Version
from tests.conftest import sglang_python

from ..models import write_model

pytestmark = [pytest.mark.gpu, pytest.mark.sglang, pytest.mark.full]

PAGE = 64
POOL = 1 << 20


def gpus() -> list[int]:
    """MiB in use, by GPU; none without a driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.check_output(command, text=True).split()]


@contextlib.asynccontextmanager
async def serving(folder: Path, **sglang: object) -> AsyncIterator[tuple[SglangProcess, EngineClient, Path]]:
    model = write_model(folder / "model", seed=1, heads=4, kv_heads=2)
    config = EngineConfig(
        kind="sglang",
        page_tokens=PAGE,
        pool_tokens=POOL,
        sglang=SglangConfig(python=str(sglang_python()), dtype="bfloat16", **sglang),  # type: ignore[arg-type]
    )
    engine = SglangProcess(config, model, Version(0), folder / "log", 512, kv_store=folder / "kv")
    url = await engine.start()
    try:
        async with aiohttp.ClientSession() as session:
            yield engine, EngineClient(url, session), model
    finally:
        await engine.stop()


async def test_released_memory_goes_back_to_the_machine(tmp_path: Path) -> None:
    async with serving(tmp_path) as (engine, client, model):
        held = sum(gpus())
        await client.pause("abort")
        await client.flush()
        await client.release()
        kv_mib = POOL * 2 * 2 * 2 * 16 * 2 >> 20
        assert sum(gpus()) <= held - kv_mib // 2
        await client.resume()
        await client.load(str(model), Version(1))
        assert await client.checksum() == engine.expected_checksum(read_weights(model))


async def test_weights_in_half_precision_are_confirmed_by_the_hash_of_the_gpu(tmp_path: Path) -> None:
    async with serving(tmp_path) as (engine, client, model):
        assert await client.checksum() == engine.expected_checksum(read_weights(model))


@pytest.mark.skipif(len(gpus()) < 2, reason="needs gpu: two of them")
async def test_each_rank_of_a_sharded_engine_is_confirmed(tmp_path: Path) -> None:
    async with serving(tmp_path, tensor_parallel=2) as (engine, client, model):
        assert await client.checksum() == engine.expected_checksum(read_weights(model))
