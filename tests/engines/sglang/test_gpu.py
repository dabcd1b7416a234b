"""What only a GPU shows. Needs a CUDA SGLang: GYRE_SGLANG names the folder of its environment."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from gyre_hpc.config import EngineConfig
from gyre_hpc.config_engine import SglangConfig
from gyre_hpc.engines.client import EngineClient
from gyre_hpc.engines.sglang.arguments import layout_seed
from gyre_hpc.engines.sglang.exports import full_pages, kept_pages
from gyre_hpc.engines.sglang.page_keys import NAMESPACE, prefix_hashes, rank_layout
from gyre_hpc.engines.sglang.process import SglangProcess
from gyre_hpc.engines.weights import read_weights
from gyre_hpc.kv.page_store import PageKey, PageStore
from gyre_hpc.records import Version
from tests.conftest import sglang_python

from ..models import transformers_logprobs, write_model
from .test_real import Output, prompt, until

pytestmark = [pytest.mark.gpu, pytest.mark.sglang, pytest.mark.full]

PAGE = 64
POOL = 1 << 20


def gpus() -> list[int]:
    """MiB in use, by GPU; none without a driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.check_output(command, text=True).split()]


TWO_GPUS = pytest.mark.skipif(len(gpus()) < 2, reason="needs gpu: two of them")
NEAR = 0.25
"""Largest difference of a log-prob in half precision to transformers' float32; KV of other tokens is off by units."""


@contextlib.asynccontextmanager
async def serving(
    folder: Path, store: Path, **sglang: object
) -> AsyncIterator[tuple[SglangProcess, EngineClient, Path]]:
    """A server with a share of the memory that leaves room for a second one."""
    model = write_model(folder / "model", seed=1, heads=4, kv_heads=2)
    config = EngineConfig(
        kind="sglang",
        page_tokens=PAGE,
        pool_tokens=POOL,
        start_timeout_s=1200.0,
        sglang=SglangConfig(
            python=str(sglang_python()),
            dtype="bfloat16",
            arguments=["--mem-fraction-static", "0.2"],
            **sglang,  # type: ignore[arg-type]
        ),
    )
    engine = SglangProcess(config, model, Version(0), folder / "log", 512, kv_store=store)
    url = await engine.start()
    try:
        async with aiohttp.ClientSession() as session:
            yield engine, EngineClient(url, session), model
    finally:
        await engine.stop()


async def test_released_memory_goes_back_to_the_machine(tmp_path: Path) -> None:
    async with serving(tmp_path, tmp_path / "kv") as (engine, client, model):
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
    async with serving(tmp_path, tmp_path / "kv") as (engine, client, model):
        assert await client.checksum() == engine.expected_checksum(read_weights(model))


@TWO_GPUS
async def test_each_rank_of_a_sharded_engine_is_confirmed(tmp_path: Path) -> None:
    async with serving(tmp_path, tmp_path / "kv", tensor_parallel=2) as (engine, client, model):
        assert await client.checksum() == engine.expected_checksum(read_weights(model))


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=TWO_GPUS)])
async def test_a_live_call_moves_between_servers_with_its_pages(tmp_path: Path, ranks: int) -> None:
    """Device memory to the store and back; of a sharded engine every rank finds its own part."""
    folder, ids = tmp_path / "kv", prompt(1, 300)
    async with (
        serving(tmp_path / "a", folder, tensor_parallel=ranks) as (engine, a, model),
        serving(tmp_path / "b", folder, tensor_parallel=ranks) as (_, b, _),
    ):
        first = Output()
        running = asyncio.create_task(first.of(a, ids, 200, "w0", "moved-at-a"))
        await until(lambda: len(first.ids) >= PAGE)
        await a.abort("moved-at-a")
        await running
        received = ids + first.ids
        pages = full_pages(len(received), PAGE)
        hashes = prefix_hashes("w0", received, PAGE)[:pages]
        seed, store = layout_seed(engine.config, model), PageStore(folder, 256 << 20)
        for rank in range(ranks):
            layout = rank_layout(seed, tp=(rank, ranks))
            keys = [PageKey(NAMESPACE, layout, prefix) for prefix in hashes]
            assert await kept_pages(store, keys, lease_s=600, patience_s=60) == keys
        second = await Output().of(b, received, 40, "w0")
    assert (second.cached, second.finish) == (pages * PAGE, "length")
    expected = transformers_logprobs(model, received + second.ids, len(ids))
    assert np.abs(np.array(first.logprobs + second.logprobs) - expected).max() < NEAR


async def test_weights_under_a_running_call_leave_it_its_pages(tmp_path: Path) -> None:
    """What kv_policy=keep_execution does at a publication, with CUDA graphs of the older weights at hand."""
    async with serving(tmp_path, tmp_path / "kv") as (engine, client, _):
        newer = write_model(tmp_path / "newer", seed=2, heads=4, kv_heads=2)
        out = Output()
        running = asyncio.create_task(out.of(client, prompt(2, 40), 400, "x1.1"))
        await until(lambda: len(out.ids) >= 20)
        await client.pause("in_place")
        await client.load(str(newer), Version(1), keep_kv=True)
        assert await client.checksum() == engine.expected_checksum(read_weights(newer))
        await client.resume_generation()
        await running
    assert out.finish == "length" and out.versions == sorted(out.versions) and set(out.versions) == {0, 1}
