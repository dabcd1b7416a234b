"""What the server's endpoints do: one engine, its stages of life, and the loop that steps it. No HTTP.

Loop and endpoints share one thread: on a CPU the steps are Python-bound, so a second thread would only add switches,
and every endpoint sees the engine between two steps, at a token boundary. Weights and KV memory are each held or
released; generation needs both, and released weights stay empty until an update loads them. New tokens are announced
to their readers at most every FLUSH_INTERVAL_S and when a call ends, for an HTTP event costs as much as a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from gyre_hpc import __name__ as package
from gyre_hpc.engines import wire
from gyre_hpc.engines.torch.batching import Batcher
from gyre_hpc.engines.torch.calls import Call
from gyre_hpc.engines.torch.model import Qwen3
from gyre_hpc.engines.torch.pool import PrefixKeys
from gyre_hpc.engines.weights import read_weights, weights_digest
from gyre_hpc.errors import GyreError, IllegalTransition
from gyre_hpc.kv.page_store import PageStore
from gyre_hpc.models.shape import read_shape

FLUSH_INTERVAL_S = 0.05
"""Longest time a sampled token waits for its event."""
EXPORT_PAGES = 32
"""Pages written to the host store between two steps."""
PACE_BURST_S = 0.1
"""Seconds of unused allowance a paced engine may catch up."""


@dataclass(frozen=True)
class Options:
    """Settings of one engine process (server.py's command line)."""

    model: Path
    page_tokens: int
    pool_tokens: int
    capacity: int
    max_context: int
    weight_version: str
    seed: int
    tokens_per_s: float
    kv_store: Path | None = None
    """Folder of the cell's host store of KV pages."""
    kv_store_bytes: int = 0


class Unavailable(GyreError):
    """The engine cannot generate in its present state."""


class Reader:
    """A call and the event that wakes whoever reads its tokens."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.news = asyncio.Event()
        self.seen = 0


class Service:
    """One engine. All methods run on the loop's thread."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.model_path = options.model
        self.paused = False
        self.released: set[str] = set()
        self.updating = False
        self._readers: dict[str, Reader] = {}
        self._work = asyncio.Event()
        model = Qwen3(read_shape(options.model), options.max_context)
        model.load(read_weights(options.model), str(options.model))
        self.weights_loaded = True
        self.batcher = Batcher(
            model,
            page_tokens=options.page_tokens,
            pool_tokens=options.pool_tokens,
            capacity=options.capacity,
            max_context=options.max_context,
            version=options.weight_version,
            seed=options.seed,
            on_finish=self._finished,
            store=PageStore(options.kv_store, options.kv_store_bytes) if options.kv_store else None,
        )

    # ---- the loop -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Step while there is work, announce tokens, keep the pace. Ends by cancellation."""
        flush_at = allowed_at = 0.0
        while True:
            if not self._runnable():
                self._work.clear()
                await self._work.wait()
                continue
            sampled = self.batcher.step()
            now = time.monotonic()
            if now >= flush_at:
                flush_at = now + FLUSH_INTERVAL_S
                self._announce()
            if self.options.tokens_per_s and sampled:
                # A step of few calls takes as long as one of many, as on a device bound by memory bandwidth.
                step_s = self.options.capacity / self.options.tokens_per_s
                allowed_at = max(allowed_at, now - PACE_BURST_S) + step_s
            await asyncio.sleep(max(0.0, allowed_at - now))

    def _runnable(self) -> bool:
        return not self.paused and self.serves and bool(self.batcher.running or self.batcher.waiting)

    def _announce(self) -> None:
        for reader in self._readers.values():
            if reader.call.sampled > reader.seen:
                reader.news.set()

    def _finished(self, call: Call) -> None:
        reader = self._readers.pop(call.rid, None)
        if reader is not None:
            reader.news.set()

    # ---- calls --------------------------------------------------------------------------------------------------

    @property
    def serves(self) -> bool:
        """Weights and KV memory are there."""
        return self.weights_loaded and not self.released

    def submit(self, call: Call) -> Reader:
        """Queue a call. Raises Unavailable, or ValueError naming the field at fault."""
        if not self.serves:
            state = f"{', '.join(sorted(self.released))} released" if self.released else "no weights loaded"
            raise Unavailable(f"engine does not generate: {state}", fix="resume memory, then load weights")
        if call.rid in self._readers:
            raise ValueError(f"rid: {call.rid!r} is running")
        self.batcher.submit(call)
        reader = self._readers[call.rid] = Reader(call)
        self._work.set()
        return reader

    def abort(self, rid: str) -> None:
        """Cut one call; unknown ones are ignored."""
        if rid in self._readers:
            self.batcher.abort(self._readers[rid].call)

    def abort_all(self) -> None:
        """Cut every call."""
        for call in self.batcher.calls():
            self.batcher.abort(call)

    # ---- control ------------------------------------------------------------------------------------------------

    def pause(self, mode: str) -> None:
        """Stop sampling; new calls wait."""
        self.paused = True
        if mode == "abort":
            self.abort_all()
        elif mode == "retract":
            self.batcher.retract_all()

    def resume(self) -> None:
        """Sample again."""
        self.paused = False
        self._work.set()

    def flush(self) -> None:
        """Forget shared KV. Refused while calls hold pages."""
        self._require_idle("flush_cache")
        self.batcher.flush()

    def release(self, tags: set[str]) -> None:
        """Give memory back to the machine; waiting calls end without a token. Tags already released are ignored."""
        self._require_idle("release_memory_occupation")
        self.abort_all()
        if "kv_cache" in tags - self.released:
            self.batcher.free()
        if "weights" in tags - self.released:
            self.weights_loaded = False
            self.batcher.model.free()
        self.released |= tags
        gc.collect()
        _trim()

    def take(self, tags: set[str]) -> None:
        """Take released memory again: an empty pool, empty weights."""
        if "kv_cache" in tags & self.released:
            self.batcher.allocate()
        if "weights" in tags & self.released:
            self.batcher.model.allocate()
        self.released -= tags
        self._work.set()

    def update(self, path: Path, version: str | None, *, flush: bool) -> None:
        """Load weights in place, between two steps. All or nothing. Raises GyreError."""
        if "weights" in self.released:
            raise IllegalTransition("weights are released", fix="resume_memory_occupation first")
        if read_shape(path) != self.batcher.model.shape:
            raise IllegalTransition(
                f"{path}: config.json differs from the model served", fix="give weights of this model"
            )
        self.batcher.model.load(read_weights(path), str(path))
        self.weights_loaded, self.model_path = True, path
        self.batcher.set_version(self.batcher.version if version is None else version, flush=flush)
        self._work.set()

    async def export(self, namespace: str, ids: list[int], lease_s: float) -> wire.ExportAnswer:
        """Have the host store keep the findable full pages of `ids`, leased, while calls go on. Raises Unavailable."""
        batcher, host = self.batcher, self.batcher.host
        if host is None or "kv_cache" in self.released:
            raise Unavailable("no KV pages to export", fix="start the engine with --kv-store")
        chain = PrefixKeys(namespace, batcher.layout, batcher.page_tokens)
        chain.extend(ids)
        keys, pool, kv = host.keys(namespace, chain.keys), batcher.pool, batcher.kv
        pages = pool.acquire_prefix(chain.keys)
        there = host.lease(keys, lease_s)
        try:
            for first in range(there, len(pages), EXPORT_PAGES):
                some = slice(first, first + EXPORT_PAGES)
                keyed = keys[some][: len(pages) - first]
                batcher.counters.pages_exported += host.write(keyed, kv, pages[some], lease_s)
                await asyncio.sleep(0)
        finally:
            pool.release(pages)
        found = host.lease(keys, lease_s)
        return wire.ExportAnswer(
            layout=batcher.layout.hex(),
            page_tokens=batcher.page_tokens,
            keys=[key.prefix.hex() for key in keys[:found]],
        )

    def checksum(self) -> str:
        """Digest of the weights being served."""
        if not self.weights_loaded:
            raise IllegalTransition("no weights are loaded", fix="update_weights_from_disk first")
        return weights_digest(self.batcher.model.arrays())

    def info(self) -> wire.ServerInfo:
        """State and counters."""
        batcher, counters = self.batcher, self.batcher.counters
        kv = 0 if "kv_cache" in self.released else batcher.kv.nbytes
        return wire.ServerInfo(
            version=_version(),
            engine="gyre-torch",
            weight_version=batcher.version if self.weights_loaded else "",
            model_path=str(self.model_path),
            capacity=batcher.capacity,
            running=batcher.running,
            waiting=batcher.waiting,
            pool_tokens=batcher.pool_tokens,
            free_pool_tokens=batcher.pool.available * batcher.page_tokens if kv else 0,
            page_tokens=batcher.page_tokens,
            max_context=batcher.max_context,
            paused=self.paused,
            released=sorted(self.released),
            memory={"kv_cache": kv, "weights": 0 if "weights" in self.released else batcher.model.nbytes()},
            resident_bytes=psutil.Process().memory_info().rss,
            tokens_sampled=counters.tokens_sampled,
            tokens_prefilled=counters.tokens_prefilled,
            tokens_cached=counters.tokens_cached,
            tokens_fetched=counters.tokens_fetched,
            pages_exported=counters.pages_exported,
            retractions=counters.retractions,
            busy_s=counters.busy_s,
            incremental_streaming_output=True,
            capabilities=wire.Capabilities(frees_memory=True, can_export_live=batcher.host is not None),
        )

    def _require_idle(self, what: str) -> None:
        if self.batcher.running:
            raise IllegalTransition(
                f"{what} refused: {self.batcher.running} calls hold pages",
                fix="pause_generation(abort) first",
            )


def _version() -> str:
    from importlib.metadata import version

    return version(package)


def _trim() -> None:
    """Return freed heap to the machine where the C library can (glibc)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
