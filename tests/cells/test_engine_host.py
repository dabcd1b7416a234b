from __future__ import annotations

import asyncio
import errno
import fcntl
import signal
import threading
from pathlib import Path
from typing import ClassVar

import pytest

from gyre_hpc.cells import engine_host
from gyre_hpc.cells.engine_host import EngineHost, page_store
from gyre_hpc.cells.steps import Phases, Step, StepOverdue
from gyre_hpc.config import EngineConfig, RunConfig
from gyre_hpc.config_engine import SglangConfig
from gyre_hpc.engines.client import EngineRefused
from gyre_hpc.engines.process import EngineProcess
from gyre_hpc.engines.sglang.page_keys import page_keys
from gyre_hpc.errors import ConfigError, CorruptRecord
from gyre_hpc.layout import RunLayout
from gyre_hpc.records import CellId, Version
from gyre_hpc.transport.messages import StepName
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


@pytest.fixture
def killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunLayout:
    """A run whose engines die as they start, and only leave their seeds in `Killed.seeds`."""
    monkeypatch.setattr(engine_host, "EngineProcess", Killed)
    monkeypatch.setattr(Killed, "seeds", [])
    layout = RunLayout(tmp_path)
    layout.create()
    write_secret(layout)
    return layout


async def test_no_start_of_an_engine_repeats_the_sampling_noise_of_another(
    tmp_path: Path, killed: RunLayout
) -> None:
    for cell in (0, 1):
        for incarnation in (1_000_000, 1_001_000):
            host = EngineHost(RunConfig(), killed, CellId(cell), incarnation, tmp_path, tmp_path)
            for _ in range(2):
                host.begin()
                await host.release()
            await host.stop()
    assert len(set(Killed.seeds)) == len(Killed.seeds) == 8


async def test_an_engine_starts_after_what_would_lessen_its_share_of_the_device(
    tmp_path: Path, killed: RunLayout
) -> None:
    host = EngineHost(RunConfig(), killed, CellId(0), 1_000_000, tmp_path, tmp_path)
    made: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    host.begin(made)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not Killed.seeds
    made.set_exception(ConfigError("the trainer's own"))
    await host.release()
    assert len(Killed.seeds) == 1
    await host.stop()


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

    async def load(self, folder: str, version: Version, *, keep_kv: bool, timeout_s: float) -> None:
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


class Hung(Busy):
    """Never answers what is asked at `step`."""

    def __init__(self, step: StepName) -> None:
        super().__init__()
        self.moving, self._step = 0, step

    async def _hangs_at(self, step: StepName) -> None:
        if step is self._step:
            await asyncio.Event().wait()

    async def pause(self, mode: str) -> None:
        await self._hangs_at(StepName.RESUME)

    async def load(self, *given: object, **named: object) -> None:
        await self._hangs_at(StepName.LOAD)

    async def resume_generation(self) -> None:
        await self._hangs_at(StepName.CONFIRM)


DEADLINES = {
    StepName.WRITE: "WRITE_S",
    StepName.START: "STOP_GRACE_S",
    StepName.RESUME: "RESUME_S",
    StepName.LOAD: "CONTROL_TIMEOUT_S",
    StepName.CONFIRM: "CONFIRM_S",
}
"""Each step of a load, and the constant that bounds it where `engine.start_timeout_s` is 0."""


@pytest.mark.parametrize("step", DEADLINES)
async def test_a_step_of_a_load_that_hangs_is_overdue_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: StepName
) -> None:
    layout = RunLayout(tmp_path)
    layout.create()
    write_secret(layout)
    monkeypatch.setattr(engine_host, DEADLINES[step], 0.01)
    config = RunConfig(engine=EngineConfig(start_timeout_s=0.0))
    host, over = EngineHost(config, layout, CellId(0), 1_000_000, tmp_path, tmp_path), threading.Event()

    def written(folder: Path, arrays: object) -> str:
        over.wait(0.0 if step is not StepName.WRITE else None)
        return "digest"

    async def booting() -> None:
        await Hung(step)._hangs_at(StepName.START)

    async def no_bytes(client: object) -> int:
        return 0

    monkeypatch.setattr(host, "_client", Hung(step))
    monkeypatch.setattr(host, "_write", written)
    monkeypatch.setattr(host, "_booted", booting)
    monkeypatch.setattr(host._process, "poll", lambda: None)
    monkeypatch.setattr(host._process, "declared_bytes", no_bytes)
    told: list[Step] = []
    try:
        with pytest.raises(StepOverdue, match=f"step {step} is not complete after 0.01 s"):
            await host.serve(Version(1), {}, Phases(told.append))
    finally:
        over.set()
    *done, last = told
    assert (last.name, last.outcome.partition(":")[0]) == (step, "StepOverdue")
    assert [it.name for it in done] == list(DEADLINES)[: len(done)] and all(
        it.outcome == "done" for it in done
    )


async def test_weights_that_are_not_what_was_published_are_told_as_the_step_that_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = RunLayout(tmp_path)
    layout.create()
    write_secret(layout)
    host, client = EngineHost(RunConfig(), layout, CellId(0), 1_000_000, tmp_path, tmp_path), Busy()
    client.moving = 0
    monkeypatch.setattr(host, "_client", client)
    monkeypatch.setattr(host, "_served", (Version(1), tmp_path, "another digest"))
    monkeypatch.setattr(host._process, "poll", lambda: None)
    told: list[Step] = []
    with pytest.raises(CorruptRecord, match="serves weights digest, version 1 is another digest"):
        await host.serve_again(Phases(told.append))
    assert told[-1].name is StepName.CONFIRM and told[-1].outcome.startswith("CorruptRecord")
    assert client.asked[-1] == "load", "it does not sample"


async def test_weights_may_take_as_long_to_load_as_an_engine_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = RunLayout(tmp_path)
    layout.create()
    write_secret(layout)
    config = RunConfig(engine=EngineConfig(start_timeout_s=1200.0))
    host, allowed = EngineHost(config, layout, CellId(0), 1_000_000, tmp_path, tmp_path), list[float]()

    class Slow(Busy):
        async def load(self, *given: object, timeout_s: float = 0.0, **named: object) -> None:
            allowed.append(timeout_s)

    client = Slow()
    client.moving = 0

    async def no_bytes(client: object) -> int:
        return 0

    monkeypatch.setattr(host, "_client", client)
    monkeypatch.setattr(host, "_served", (Version(1), tmp_path, "digest"))
    monkeypatch.setattr(host._process, "poll", lambda: None)
    monkeypatch.setattr(host._process, "declared_bytes", no_bytes)
    await host.serve_again(Phases())
    assert allowed == [1200.0]


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
