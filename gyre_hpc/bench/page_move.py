"""KV pages of one long prompt moved between two real engines against prefilling it: part of `gyre bench switch`.

Two engine processes, each with its host store and page port, as cells have them. The move is all that stands between a
call that was cut and its next token: export at the source, pull by the destination, and the destination's first token on
what it found. The prefill is the first token of a destination that found nothing. In turns, on prompts of their own.
"""

from __future__ import annotations

import contextlib
import random
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from gyre_hpc.bench.figure import Figure
from gyre_hpc.config import EngineConfig
from gyre_hpc.engines.client import EngineClient
from gyre_hpc.engines.process import EngineProcess
from gyre_hpc.engines.wire import EncodedIds
from gyre_hpc.kv.client import PortClient
from gyre_hpc.kv.page_store import PageStore
from gyre_hpc.kv.port import PagePort
from gyre_hpc.models.shape import ModelShape
from gyre_hpc.records import Version
from gyre_hpc.training.new_model import write_new_model
from gyre_hpc.transport.regions import RegionServer

TOKENS, ROUNDS = 3000, 3
SHAPE = ModelShape(
    vocab_size=512,
    hidden_size=384,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=64,
    intermediate_size=1152,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    tie_word_embeddings=False,
)
"""Seven million parameters. The larger a model, the more a prefill costs against the bytes of its pages."""
DEADLINE_S = 60.0
KV_KEY = "w0"
VOCABULARY = 256
"""Byte tokens, which every vocabulary here has."""
STORE_MIB = 512


@dataclass(frozen=True)
class Side:
    """One engine and the way to its page port."""

    engine: EngineClient
    port: PortClient


@dataclass(frozen=True)
class Round:
    """Seconds of a prefill, of a move and of its parts; pages that moved, and that were full."""

    prefill_s: float
    export_s: float
    pull_s: float
    first_token_s: float
    moved: int
    full: int

    @property
    def move_s(self) -> float:
        return self.export_s + self.pull_s + self.first_token_s


@contextlib.asynccontextmanager
async def _side(name: str, model: Path, folder: Path, run: str) -> AsyncIterator[Side]:
    config = EngineConfig(pool_tokens=8 * TOKENS, kv_store_mib=STORE_MIB)
    store = PageStore(folder / name, STORE_MIB << 20)
    log = folder / f"{name}.log"
    process = EngineProcess(config, model, Version(0), log, TOKENS + 64, kv_store=store.folder)
    address = await process.start()
    regions = RegionServer("127.0.0.1", name, run, secret=run.encode())
    await regions.start()
    try:
        async with aiohttp.ClientSession() as session:
            engine = EngineClient(address, session)
            port = PagePort("127.0.0.1", name, run, store, regions, engine)
            await port.start()
            yield Side(engine, PortClient(port.address, session, run))
            await port.close()
    finally:
        regions.close()
        await process.stop()


async def measure(
    folder: Path, shape: ModelShape = SHAPE, tokens: int = TOKENS, rounds: int = ROUNDS
) -> list[Round]:
    """So many rounds after one that warms up; files go to `folder`."""
    model = folder / "moved-model"
    model.mkdir()
    write_new_model(model, shape, seed=0)
    run = uuid.uuid4().hex
    async with _side("cell-0", model, folder, run) as source, _side("cell-1", model, folder, run) as target:
        return [await _round(source, target, tokens, number) for number in range(rounds + 1)][1:]


async def _round(source: Side, target: Side, tokens: int, number: int) -> Round:
    moves, fills = (_prompt(tokens, 2 * number + which) for which in (0, 1))
    await _first_token(source, moves)
    prefill_s = await _first_token(target, fills)
    began = time.perf_counter()
    offer = await source.port.export(moves, KV_KEY)
    exported = time.perf_counter()
    came = await target.port.bring(offer, DEADLINE_S)
    pulled = time.perf_counter()
    first_token_s = await _first_token(target, moves)
    full = (tokens - 1) // offer.page_tokens
    return Round(prefill_s, exported - began, pulled - exported, first_token_s, came.moved, full)


def _prompt(tokens: int, number: int) -> EncodedIds:
    draw = random.Random(f"prompt {number}")
    return EncodedIds.of([draw.randrange(VOCABULARY) for _ in range(tokens)])


async def _first_token(side: Side, prompt: EncodedIds) -> float:
    began = time.perf_counter()
    async for _ in side.engine.generate(f"{uuid.uuid4().hex}.", prompt, 1, KV_KEY):
        pass
    return time.perf_counter() - began


def figures(rounds: list[Round]) -> dict[str, Figure]:
    """The ratio at this length of prompt: the best of each, as others may share the machine."""
    prefill_s, best = min(one.prefill_s for one in rounds), min(rounds, key=lambda one: one.move_s)
    move_s = best.move_s
    parts = {"export": best.export_s, "pull": best.pull_s, "first token": best.first_token_s}
    told = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in parts.items())
    pages = f"{best.moved} of {best.full} pages"
    against = (
        f"prefill {prefill_s:.3f} s over a move of {pages} in {move_s:.3f} s ({told}), 7 million parameters"
    )
    return {"prefill_over_move": Figure(prefill_s / move_s, "ratio", "higher", aim=5.0, against=against)}
