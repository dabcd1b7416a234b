from __future__ import annotations

import hashlib
import json
import re
import socket
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_hpc.config import EngineConfig, RunConfig
from gyre_hpc.config_checks import validate
from gyre_hpc.config_engine import SglangConfig
from gyre_hpc.engines.sglang.arguments import layout_seed, server_arguments
from gyre_hpc.engines.sglang.page_keys import chain_seed, page_keys, prefix_hashes, rank_layout
from gyre_hpc.engines.sglang.server import publish, require_version, reserve
from gyre_hpc.errors import ConfigError
from gyre_hpc.records import Version

ids = st.lists(st.integers(0, 2**31 - 1), max_size=60)


def arguments(config: EngineConfig, model: Path, store: Path | None) -> list[str]:
    return server_arguments(config, model, Version(7), 256, 3, store)


def value(flags: list[str], name: str) -> str:
    return flags[flags.index(name) + 1]


def test_a_cpu_server_keeps_the_models_own_precision_and_pages_in_our_store(
    model: Path, tmp_path: Path
) -> None:
    config = EngineConfig(page_tokens=8, pool_tokens=1024, capacity=2, sglang=SglangConfig(device="cpu"))
    flags = arguments(config, model, tmp_path)
    assert value(flags, "--dtype") == "float32"
    assert (value(flags, "--page-size"), value(flags, "--max-total-tokens")) == ("8", "1024")
    assert value(flags, "--weight-version") == "7"
    extra = json.loads(value(flags, "--hicache-storage-backend-extra-config"))
    assert (extra["folder"], extra["limit_bytes"]) == (str(tmp_path), config.kv_store_mib << 20)
    assert extra["prefetch_threshold"] == 8
    assert "--enable-memory-saver" not in flags


def test_a_gpu_server_frees_its_memory_and_own_arguments_come_last(model: Path) -> None:
    config = EngineConfig(sglang=SglangConfig(arguments=["--mem-fraction-static", "0.7"]))
    flags = arguments(config, model, None)
    assert "--enable-memory-saver" in flags
    assert "--enable-hierarchical-cache" not in flags
    assert flags[-2:] == ["--mem-fraction-static", "0.7"]


def test_pages_are_interchangeable_only_between_equal_layouts(model: Path) -> None:
    changed = [
        EngineConfig(),
        EngineConfig(page_tokens=8),
        EngineConfig(sglang=SglangConfig(tensor_parallel=2)),
        EngineConfig(sglang=SglangConfig(dtype="bfloat16")),
        EngineConfig(sglang=SglangConfig(device="cpu")),
        EngineConfig(sglang=SglangConfig(arguments=["--hicache-mem-layout", "page_first"])),
        EngineConfig(sglang=SglangConfig(arguments=["--kv-cache-dtype", "fp8_e4m3"])),
    ]
    assert len({layout_seed(config, model) for config in changed}) == len(changed)
    assert len({rank_layout("s"), rank_layout("s", tp=(0, 2)), rank_layout("s", tp=(1, 2))}) == 3


def test_page_hashes_are_those_of_sglang_0_5_21() -> None:
    """By hand, from mem_cache/utils.py: seed over the namespace, then SHA-256 over (previous, tokens as uint32)."""
    seed = hashlib.sha256(
        b"sglang-cache-namespace-v1" + b"\x01" + (2).to_bytes(8, "little") + b"w3" + b"\x00"
    ).digest()
    assert chain_seed("w3") == seed
    first = hashlib.sha256(seed + b"".join(token.to_bytes(4, "little") for token in (1, 2))).digest()
    second = hashlib.sha256(first + b"".join(token.to_bytes(4, "little") for token in (3, 4))).digest()
    assert prefix_hashes("w3", [1, 2, 3, 4, 5], 2) == [first, second]


@given(ids, ids)
def test_a_longer_call_has_the_keys_of_its_prefix(head: list[int], tail: list[int]) -> None:
    keys = page_keys("layout", "w1", head, 4)
    assert page_keys("layout", "w1", head + tail, 4)[: len(keys)] == keys
    assert len(keys) == len(head) // 4


@given(st.lists(st.integers(0, 100), min_size=4, max_size=40))
def test_no_page_of_other_weights_has_the_same_key(tokens: list[int]) -> None:
    assert not set(page_keys("layout", "w1", tokens, 4)) & set(page_keys("layout", "w2", tokens, 4))


def test_a_reserved_port_is_given_to_nobody_else_and_can_be_listened_on() -> None:
    with reserve("127.0.0.1") as holder, socket.socket() as server, socket.socket() as stranger:
        address = holder.getsockname()
        with pytest.raises(OSError):
            stranger.bind(address)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address)
        server.listen()
        with socket.create_connection(address, timeout=5):
            pass


def test_an_address_is_published_only_when_it_answers(tmp_path: Path) -> None:
    with reserve("127.0.0.1") as holder, socket.socket() as server:
        host, port = holder.getsockname()
        publishing = threading.Thread(target=publish, args=(tmp_path / "port", host, port))
        publishing.start()
        publishing.join(0.3)
        assert publishing.is_alive()
        assert not (tmp_path / "port").exists()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, port))
        server.listen()
        publishing.join()
    assert (tmp_path / "port").read_text() == f"{host} {port}\n"


@pytest.mark.parametrize("version", ["0.5.21", "0.5.21.post1", "0.5.22+cpu", "0.5.23"])
def test_versions_of_sglang_whose_pages_and_checksums_are_known_are_taken(version: str) -> None:
    require_version(version)


@pytest.mark.parametrize("version", ["0.5.20", "0.5.24", "0.6.0", "0.4.10.post2", "1.0"])
def test_other_versions_of_sglang_are_refused_before_they_start(version: str) -> None:
    with pytest.raises(
        SystemExit, match=rf"sglang {re.escape(version)} .*>=0\.5\.21,<0\.5\.24.*engine\.sglang\.python"
    ):
        require_version(version)


@pytest.mark.parametrize(
    ("key", "engine"),
    [
        ("engine.tokens_per_s", EngineConfig(kind="sglang", tokens_per_s=10)),
        (
            "engine.sglang.tensor_parallel",
            EngineConfig(kind="sglang", sglang=SglangConfig(device="cpu", tensor_parallel=2)),
        ),
        ("engine.sglang.device", EngineConfig(kind="sglang", sglang=SglangConfig(device="tpu"))),
    ],
)
def test_what_sglang_cannot_do_is_refused_by_key(key: str, engine: EngineConfig) -> None:
    with pytest.raises(ConfigError, match=re.escape(key)):
        validate(RunConfig(engine=engine))
