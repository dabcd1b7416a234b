from __future__ import annotations

import errno
import fcntl
import signal
from pathlib import Path
from typing import ClassVar

import pytest

from gyre_hpc.cells import engine_host
from gyre_hpc.cells.engine_host import EngineHost, page_store
from gyre_hpc.config import EngineConfig, RunConfig
from gyre_hpc.config_engine import SglangConfig
from gyre_hpc.engines.process import EngineProcess
from gyre_hpc.engines.sglang.page_keys import page_keys
from gyre_hpc.errors import ConfigError
from gyre_hpc.layout import RunLayout
from gyre_hpc.records import CellId
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
