from __future__ import annotations

import errno
import fcntl
import signal
from pathlib import Path
from typing import ClassVar

import pytest

from gyre_hpc.cells import engine_host
from gyre_hpc.cells.engine_host import EngineHost, page_store
from gyre_hpc.cells.steps import Phases
from gyre_hpc.config import EngineConfig, RunConfig
from gyre_hpc.config_engine import SglangConfig
from gyre_hpc.engines.client import EngineRefused
from gyre_hpc.engines.process import EngineProcess
from gyre_hpc.engines.sglang.page_keys import page_keys
from gyre_hpc.errors import ConfigError
from gyre_hpc.layout import RunLayout
from gyre_hpc.records import CellId, Version
from gyre_hpc.transport.rendezvous import write_secret


class Killed(EngineProcess):
    """Notes the seed of each start; ends at once."""

    seeds: ClassVar[list[int]] = []

    async def start(self) -> str:
        self.seeds.append(self.seed)
        return "http://127.0.0.1:1"

    async def wait(self) -> int:
        return -signal.SIGKILL

    def poll(self) -> int:
        return -signal.SIGKILL


async def test_no_start_of_an_engine_repeats_the_sampling_noise_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_host, "EngineProcess", Killed)
    monkeypatch.setattr(Killed, "seeds", [])
    layout = RunLayout(tmp_path)
    layout.create()
    write_secret(layout)
    for cell in (0, 1):
        for incarnation in (1_000_000, 1_001_000):
            host = EngineHost(RunConfig(), layout, CellId(cell), incarnation, tmp_path, tmp_path)
            for _ in range(2):
                host.begin()
                await host.release()
            await host.stop()
    assert len(set(Killed.seeds)) == len(Killed.seeds) == 8


class Busy:
    """The client of an engine that still moves pages when it is first asked to flush; notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.moving = 2

    async def pause(self, mode: str) -> None:
        self.asked.append(f"pause {mode}")

    async def resume(self) -> None:
        self.asked.append("resume")

    async def flush(self) -> None:
        self.asked.append("flush")
        self.moving -= 1
        if self.moving >= 0:
            raise EngineRefused("http://engine/flush_cache", 400, "there are pending requests")

    async def load(self, folder: str, version: Version, *, keep_kv: bool) -> None:
        assert keep_kv or "resume" in self.asked or self.moving < 0, "it dies of that"
        self.asked.append("load")

    async def checksum(self) -> str:
        return "digest"

    async def resume_generation(self) -> None:
        self.asked.append("go on")


@pytest.mark.parametrize(
    ("policy", "released", "asked"),
    [
        ("strict", False, ["pause abort", "flush", "flush", "flush", "load", "go on"]),
        ("strict", True, ["pause abort", "resume", "load", "go on"]),
        ("keep_execution", False, ["pause in_place", "load", "go on"]),
    ],
)
async def test_an_engine_has_moved_its_pages_before_it_must_forget_them_for_new_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, released: bool, asked: list[str]
) -> None:
    layout = RunLayout(tmp_path)
    layout.create()
    write_secret(layout)
    config = RunConfig(engine=EngineConfig(kv_policy=policy))
    host, client = EngineHost(config, layout, CellId(0), 1_000_000, tmp_path, tmp_path), Busy()

    async def no_bytes(client: object) -> int:
        return 0

    monkeypatch.setattr(host, "_client", client)
    monkeypatch.setattr(host, "_released", released)
    monkeypatch.setattr(host, "_served", (Version(1), tmp_path, "digest"))
    monkeypatch.setattr(host._process, "poll", lambda: None)
    monkeypatch.setattr(host._process, "declared_bytes", no_bytes)
    await host.serve_again(Phases())
    assert client.asked == asked


def test_two_runs_in_one_shared_folder_do_not_find_each_others_pages(tmp_path: Path) -> None:
    """Their keys are equal where model, version and tokens are, whatever the weights of that version."""
    config = EngineConfig(kind="sglang", sglang=SglangConfig(kv_folder=str(tmp_path / "shared")))
    (key,) = page_keys("layout", "w3", list(range(16)), 16)
    cell, neighbour, stranger = (
        page_store(config, tmp_path / name, run) for name, run in (("a", "one"), ("b", "one"), ("c", "other"))
    )
    assert cell is not None and neighbour is not None and stranger is not None
    cell.put([(key, b"of the weights of run one")])
    assert neighbour.get(key) == b"of the weights of run one"
    assert stranger.get(key) is None
    assert neighbour.folder.is_relative_to(tmp_path / "shared")


def test_without_a_shared_folder_each_cell_keeps_its_own_pages(tmp_path: Path) -> None:
    store = page_store(EngineConfig(kind="sglang"), tmp_path, "run")
    assert store is not None and store.folder == tmp_path / "kv"
    assert page_store(EngineConfig(kind="sglang", kv_store_mib=0), tmp_path, "run") is None


def test_a_shared_folder_that_refuses_locks_is_refused_with_the_key_to_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    config = EngineConfig(kind="sglang", sglang=SglangConfig(kv_folder=str(tmp_path)))
    monkeypatch.setattr(fcntl, "flock", refused)
    with pytest.raises(ConfigError, match=r"engine\.sglang\.kv_folder=.*Function not implemented"):
        page_store(config, tmp_path, "run")
