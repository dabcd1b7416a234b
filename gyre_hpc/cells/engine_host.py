"""The rollout engine of a cell: its process, its memory, the weights it serves.

`serve` ends only when the engine has confirmed the weights by checksum. Weights reach the engine as a safetensors
folder on this host; the folder served last is kept, so that a restarted engine can load it without the core. A dead
engine is restarted by `serve` and `serve_again`; nothing here restarts it behind the cell's back. Each start samples
with a seed of its own, and only who knows the run's secret can call the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy.typing as npt

from gyre_hpc.cells.steps import Phases, within
from gyre_hpc.config import EngineConfig, RunConfig
from gyre_hpc.engines.client import CONTROL_TIMEOUT_S, EngineClient, EngineRefused, EngineUnreachable
from gyre_hpc.engines.process import STOP_GRACE_S, EngineProcess
from gyre_hpc.engines.sglang.process import SglangProcess
from gyre_hpc.engines.weights import CONFIG_FILE, write_weights
from gyre_hpc.engines.wire import EncodedIds, ExportAnswer
from gyre_hpc.errors import ConfigError, CorruptRecord, GyreError
from gyre_hpc.kv.page_store import PageStore, require_locks
from gyre_hpc.kv.shared import shared_folder
from gyre_hpc.layout import RunLayout
from gyre_hpc.records import CellId, KvPolicy, Version
from gyre_hpc.transport.hosts import node_name, own_address
from gyre_hpc.transport.messages import StepName
from gyre_hpc.transport.rendezvous import engine_token, read_secret

log = logging.getLogger(__name__)

IDLE_S = 60.0
"""Seconds in which a paused engine must have ended whatever it does."""
IDLE_POLL_S = 0.05
WRITE_S = 300.0
"""Seconds in which the weights must lie in the engine's folder, or `engine.start_timeout_s` if that is longer."""
RESUME_S = 150.0
"""Seconds in which the engine must have paused and taken its memory again, or forgotten its cache."""
CONFIRM_S = 150.0
"""Seconds in which the engine must have told its checksum and sample again."""
STARTS: Final = 2
"""Starts that one step may wait for: the one under way when it begins, and one more if that engine has died."""


def engine_seed(run_seed: int, cell: CellId, incarnation: int, start: int) -> int:
    """Seed of an engine's `start`-th start: 32 bits (all that torch's CPU generator uses), hashed from its identity."""
    identity = f"{run_seed}:{cell}:{incarnation}:{start}".encode()
    return int.from_bytes(hashlib.sha256(identity).digest()[:4], "big")


def page_store(config: EngineConfig, scratch: Path, run: str) -> PageStore | None:
    """Where the cell's KV pages lie; None if they stay in the engine.

    A folder that cells share holds one folder per run, named by its key `run`: version 3 of another run has other weights.
    Raises ConfigError where it cannot be shared.
    """
    if not config.kv_store_mib:
        return None
    folder = shared_folder(config, run) if config.kind == SglangProcess.KIND else None
    if folder is not None:
        _require_shareable(folder)
    return PageStore(folder or scratch / "kv", config.kv_store_mib << 20)


def _require_shareable(folder: Path) -> None:
    try:
        require_locks(folder)
    except OSError as error:
        raise ConfigError(
            f"engine.sglang.kv_folder={folder.parent} cannot be shared on {node_name()}: {folder}:"
            f" {error.strerror or error}",
            fix="name a folder that every node can write and lock (Lustre: mount with flock), or leave it empty",
        ) from error


class EngineHost:
    """The engine of cell `cell`. `scratch` is a folder of this process, in memory where the host can."""

    def __init__(
        self,
        config: RunConfig,
        layout: RunLayout,
        cell: CellId,
        incarnation: int,
        log_folder: Path,
        scratch: Path,
        store: PageStore | None = None,
    ) -> None:
        self._layout = layout
        self._token = engine_token(read_secret(layout))
        self._identity = (config.seed, cell, incarnation)
        self._starts = 0
        self._scratch = scratch
        self._store = store
        self._process = self._make_process(config, log_folder / f"engine-{cell}.{incarnation}.log")
        self._keeps_calls = KvPolicy(config.engine.kv_policy).keeps_calls
        self.shares_device = config.engine.kind == SglangProcess.KIND and config.engine.sglang.device != "cpu"
        """Whether it takes memory of a device that the cell's trainer needs as well."""
        self._start_s = config.engine.start_timeout_s
        self._load_s = max(CONTROL_TIMEOUT_S, self._start_s)
        """Large models take minutes to load: no longer than at a start."""
        self._session: aiohttp.ClientSession | None = None
        self._client: EngineClient | None = None
        self._released = False
        self._served: tuple[Version, Path, str] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._booting: asyncio.Task[None] | None = None
        self._declared_bytes = 0
        """Host memory of the engine when it served last, as it says itself."""
        self.address = ""
        self.on_death: Callable[[str], None] = lambda cause: None
        """Called on the event loop when the engine process ends without having been stopped."""

    def _make_process(self, config: RunConfig, log_path: Path) -> EngineProcess:
        engine, model, context = config.engine, self._layout.model, config.model.max_context
        kind = SglangProcess if engine.kind == SglangProcess.KIND else EngineProcess
        return kind(
            engine,
            model,
            Version(0),
            log_path,
            context,
            host=own_address(config.cluster.host),
            token=self._token,
            kv_store=None if self._store is None else self._store.folder,
        )

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._client is not None and self._process.poll() is None

    @property
    def held_bytes(self) -> int:
        """Host memory that `release` gives back."""
        return 0 if self._released or not self.alive else self._declared_bytes

    @property
    def released_bytes(self) -> int:
        """Host memory that the engine takes again when it serves."""
        return self._declared_bytes if self._released else 0

    def begin(self, after: asyncio.Future[object] | None = None) -> None:
        """Start the engine in the background; whoever needs it waits for it and meets its errors.

        `after` must be done before: an engine divides what memory its device has left when it starts, and a trainer that is
        being made holds some of it for a while. Its errors are not the engine's.
        """
        self._booting = asyncio.create_task(self._start_after(after))

    async def _start_after(self, after: asyncio.Future[object] | None) -> None:
        if after is not None:
            await asyncio.wait([after])
        await self._start()

    async def _booted(self) -> None:
        booting, self._booting = self._booting, None
        if booting is not None:
            await booting

    async def _start(self) -> None:
        """Start the engine process on the run's starting model; it serves nothing until `serve`."""
        await self._close_client()
        self._process.seed = engine_seed(*self._identity, self._starts)
        self._starts += 1
        self.address = await self._process.start()
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        self._client = EngineClient(self.address, self._session, self._token)
        self._released = False
        self._watch = asyncio.create_task(self._watch_process())

    async def release(self) -> None:
        """Give the engine's memory back; calls that still run are cut. A dead engine holds none."""
        await self._booted()
        if self._client is None or self._released:
            return
        try:
            await self._client.pause("abort")
            await self._flush_when_idle()
            await self._client.release()
        except EngineUnreachable:
            if await self._survives():
                raise
        self._released = True

    async def _flush_when_idle(self) -> None:
        """An engine may move pages for a while after its calls have ended.

        SGLang 0.5.21 dies if it must release memory meanwhile, or forget its cache for new weights.
        """
        assert self._client is not None
        deadline = time.monotonic() + IDLE_S
        while True:
            try:
                return await self._client.flush()
            except EngineRefused:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(IDLE_POLL_S)

    async def serve(self, version: Version, arrays: Mapping[str, npt.NDArray[Any]], phases: Phases) -> None:
        """Load and confirm these weights as `version`, starting the engine if it is dead."""
        folder = self._scratch / f"weights-v{version:06d}"
        async with within(phases, StepName.WRITE, max(WRITE_S, self._start_s)):
            digest = await asyncio.to_thread(self._write, folder, arrays)
        older = self._served
        self._served = (version, folder, digest)
        await self.serve_again(phases)
        if older is not None and older[1] != folder:
            shutil.rmtree(older[1], ignore_errors=True)

    async def serve_again(self, phases: Phases) -> Version:
        """Load and confirm the newest weights given to `serve`, starting the engine if it is dead."""
        if self._served is None:
            raise GyreError(
                "the engine has no weights to serve", fix="send BecomeEngine with a weights region"
            )
        try:
            await self._load(phases)
        except EngineUnreachable:
            if await self._survives():
                raise
            await self._load(phases)
        return self._served[0]

    async def export(self, ids: EncodedIds, kv_key: str, lease_s: float) -> ExportAnswer:
        """Have the host store keep the full KV pages of `ids`. Raises EngineUnreachable, EngineRefused."""
        if self._client is None or self._store is None:
            raise EngineUnreachable("there are no KV pages to export")
        return await self._process.export(self._client, self._store, ids, kv_key, lease_s)

    async def stop(self) -> None:
        """End the engine."""
        for task in (self._watch, self._booting):
            if task is not None:
                task.cancel()
        await self._close_client()
        await self._process.stop()

    async def _load(self, phases: Phases) -> None:
        assert self._served is not None
        version, folder, digest = self._served
        async with within(phases, StepName.START, STARTS * self._start_s + STOP_GRACE_S):
            await self._booted()
            if not self.alive:
                await self._start()
        assert self._client is not None
        async with within(phases, StepName.RESUME, RESUME_S):
            await self._client.pause("in_place" if self._keeps_calls else "abort")
            if self._released:
                await self._client.resume()
                self._released = False
            elif not self._keeps_calls:
                await self._flush_when_idle()
        async with within(phases, StepName.LOAD, self._load_s):
            await self._client.load(str(folder), version, keep_kv=self._keeps_calls, timeout_s=self._load_s)
        async with within(phases, StepName.CONFIRM, CONFIRM_S):
            served = await self._client.checksum()
            if served != digest:
                raise CorruptRecord(
                    f"engine {self.address} serves weights {served}, version {version} is {digest}"
                )
            self._declared_bytes = await self._process.declared_bytes(self._client)
            await self._client.resume_generation()

    def _write(self, folder: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> str:
        write_weights(arrays, folder)
        shutil.copyfile(self._layout.model / CONFIG_FILE, folder / CONFIG_FILE)
        return self._process.expected_checksum(arrays)

    async def _survives(self) -> bool:
        """Whether the process is still there after it broke a connection; its end may be noticed a little later."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), 1.0)
        return self.alive

    async def _watch_process(self) -> None:
        code = await self._process.wait()
        self.on_death(f"engine process {self._process.pid} ended with code {code}")

    async def _close_client(self) -> None:
        if self._session is not None:
            await self._session.close()
        self._session = self._client = None
