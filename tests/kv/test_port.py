"""Pages travel between cells by region, pulled by the destination; what goes wrong shortens the prefix and nothing else."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
import pytest

from gyre_hpc.engines.wire import EncodedIds, ExportAnswer
from gyre_hpc.kv.client import PortClient, PortFailed
from gyre_hpc.kv.offers import Offer
from gyre_hpc.kv.page_store import PageKey, PageStore
from gyre_hpc.kv.port import PagePort
from gyre_hpc.transport.regions import RegionServer

SECRET, TOKEN = b"s" * 32, "token"
LAYOUT = b"\x07" * 32
PAGES = 20
IDS = EncodedIds.of(list(range(PAGES * 4)))


def page(index: int) -> bytes:
    return bytes([index]) * 5000


def key(index: int) -> PageKey:
    return PageKey("w0", LAYOUT, index.to_bytes(32, "little"))


class Engine:
    """Has computed PAGES pages of 4 tokens."""

    def __init__(self, store: PageStore) -> None:
        self.store = store

    async def export(self, ids: EncodedIds, kv_key: str, lease_s: float) -> ExportAnswer:
        count = ids.count // 4
        self.store.put([(key(i), page(i)) for i in range(count)], lease_s=lease_s)
        return ExportAnswer(LAYOUT.hex(), 4, [key(i).prefix.hex() for i in range(count)])


@dataclass
class Cell:
    store: PageStore
    port: PagePort
    client: PortClient
    regions: RegionServer


@asynccontextmanager
async def cell(name: str, folder: Path, run: str, *, same_host: bool = True) -> AsyncIterator[Cell]:
    store = PageStore(folder / name, 1 << 22)
    regions = RegionServer("127.0.0.1", name, run, secret=SECRET, same_host=same_host)
    await regions.start()
    port = PagePort("127.0.0.1", name, TOKEN, store, regions, Engine(store))
    await port.start()
    async with aiohttp.ClientSession() as session:
        yield Cell(store, port, PortClient(port.address, session, TOKEN), regions)
    await port.close()
    regions.close()


@pytest.fixture(params=[True, False], ids=["same host", "tcp"])
async def cells(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[tuple[Cell, Cell]]:
    run = uuid.uuid4().hex
    async with (
        cell("cell-0", tmp_path, run) as source,
        cell("cell-1", tmp_path, run, same_host=request.param) as target,
    ):
        yield source, target


async def test_the_destination_pulls_what_it_lacks_and_nothing_twice(cells: tuple[Cell, Cell]) -> None:
    source, target = cells
    offer = await source.client.export(IDS, "w0")
    target.store.put([(key(3), page(3))])
    first = await target.client.bring(offer, 10.0)
    assert (first.pages, first.moved, first.reason) == (PAGES, PAGES - 1, "")
    assert first.bytes == (PAGES - 1) * len(page(0))
    assert [target.store.get(key(i)) for i in range(PAGES)] == [page(i) for i in range(PAGES)]
    again = await target.client.bring(offer, 10.0)
    assert (again.pages, again.moved) == (PAGES, 0)
    assert not source.port._loans


async def test_a_slow_file_system_does_not_keep_the_port_from_its_other_work(
    cells: tuple[Cell, Cell], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = cells
    offer, answers = await source.client.export(IDS, "w0"), threading.Event()
    has, lease = target.store.has, target.store.lease

    def slow_has(key: PageKey) -> bool:
        assert answers.wait(10.0), "the event loop waits for the file system"
        return has(key)

    def slow_lease(keys: Sequence[PageKey], seconds: float) -> int:
        answers.clear()
        loop.call_soon_threadsafe(answers.set)
        assert answers.wait(10.0), "the event loop waits for the file system"
        return lease(keys, seconds)

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(target.store, "has", slow_has)
    monkeypatch.setattr(target.store, "lease", slow_lease)
    loop.call_later(0.01, answers.set)
    assert (await target.client.bring(offer, 30.0)).pages == PAGES


async def test_the_offers_own_cell_pulls_nothing(cells: tuple[Cell, Cell]) -> None:
    source, _ = cells
    offer = await source.client.export(IDS, "w0")
    assert (await source.client.bring(offer, 10.0)).moved == 0


async def test_pages_gone_or_damaged_at_the_source_leave_a_shorter_prefix(cells: tuple[Cell, Cell]) -> None:
    source, target = cells
    offer = await source.client.export(IDS, "w0")
    torn = source.store.path(key(7))
    torn.write_bytes(torn.read_bytes()[:-1] + b"\xff")
    came = await target.client.bring(offer, 10.0)
    assert came.pages == 7 and "gone at the source" in came.reason
    assert all(target.store.get(key(i)) in (None, page(i)) for i in range(PAGES))


async def test_pages_that_the_own_store_has_no_room_for_are_not_said_to_be_gone_at_the_source(
    cells: tuple[Cell, Cell],
) -> None:
    source, target = cells
    target.store.limit_bytes = 3 * 6000
    target.store.put([(key(100), page(100)), (key(101), page(101))], lease_s=60.0)
    came = await target.client.bring(await source.client.export(IDS, "w0"), 10.0)
    assert (came.pages, came.moved) == (1, 1)
    assert "engine.kv_store_mib" in came.reason and "gone" not in came.reason


async def test_a_source_that_dies_between_offer_and_pull_costs_only_its_pages(
    cells: tuple[Cell, Cell],
) -> None:
    source, target = cells
    offer = await source.client.export(IDS, "w0")
    await source.port.close()
    came = await target.client.bring(offer, 10.0)
    assert (came.pages, came.moved) == (0, 0) and offer.source in came.reason


async def test_a_source_that_dies_between_loan_and_pull_costs_only_its_pages(
    cells: tuple[Cell, Cell], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = cells
    offer = await source.client.export(IDS, "w0")
    publish = source.port._publish

    def dying(name: str, pages: Offer) -> object:
        manifest = publish(name, pages)
        source.regions.drop(manifest)
        return manifest

    monkeypatch.setattr(source.port, "_publish", dying)
    came = await target.client.bring(offer, 2.0)
    assert (came.pages, came.moved) == (0, 0) and came.reason


async def test_a_deadline_ends_a_pull_and_what_came_stays(cells: tuple[Cell, Cell]) -> None:
    source, target = cells
    offer = await source.client.export(IDS, "w0")
    came = await target.client.bring(offer, 0.0)
    assert (came.pages, came.moved) == (0, 0) and "within 0 s" in came.reason
    assert (await target.client.bring(offer, 10.0)).pages == PAGES


async def test_whoever_does_not_know_the_runs_token_is_told_nothing(cells: tuple[Cell, Cell]) -> None:
    source, _ = cells
    async with aiohttp.ClientSession() as session:
        stranger = PortClient(source.port.address, session, "guess")
        with pytest.raises(PortFailed, match="401"):
            await stranger.export(IDS, "w0")
        with pytest.raises(PortFailed, match="401"):
            await stranger.lend(Offer("w0", "w0", LAYOUT.hex(), 4, (), ""))


async def test_an_offer_that_lies_about_its_layout_brings_no_page_under_the_true_one(
    cells: tuple[Cell, Cell],
) -> None:
    source, target = cells
    offer = await source.client.export(IDS, "w0")
    other = msgspec.structs.replace(offer, layout=(b"\x08" * 32).hex())
    came = await target.client.bring(other, 10.0)
    assert came.pages == 0 and not target.store.has(key(0))
