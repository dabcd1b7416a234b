from __future__ import annotations

import signal
from pathlib import Path
from typing import ClassVar

import pytest

from gyre_hpc.cells import engine_host
from gyre_hpc.cells.engine_host import EngineHost
from gyre_hpc.config import RunConfig
from gyre_hpc.engines.process import EngineProcess
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
