"""Peers as processes and links: what a process said before its end is heard before its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gyre_hpc.config_cluster import ClusterConfig
from gyre_hpc.controller.peers import peers as module
from gyre_hpc.controller.peers.inbound import Connected, Exited, Replaced, Said
from gyre_hpc.controller.peers.peers import Peers
from gyre_hpc.launch.incarnations import INCARNATIONS_PER_LAUNCH, launch_number
from gyre_hpc.transport.messages import Goodbye, Hello, Message, PeerKind, Shutdown

RUNNER = (PeerKind.RUNNER, 0)


class FakeLink:
    """A link whose messages the test has already received from the network."""

    name = "runner-0"

    def __init__(self, incarnation: int, *messages: Goodbye, ends: bool) -> None:
        self.incarnation, self.hello = incarnation, Hello(*RUNNER, 1, "here", "")
        self.unread: list[Goodbye | None] = [*messages, *([None] if ends else [])]
        self.told: list[Message] = []
        self.closed = False

    async def receive(self) -> Goodbye | None:
        await asyncio.sleep(0)  # a turn of the loop for each message, as the network gives it
        if not self.unread:
            await asyncio.Event().wait()
        return self.unread.pop(0)

    def send(self, message: Message) -> None:
        self.told.append(message)

    async def close(self) -> None:
        self.closed = True


class Bench:
    """One launched runner: a process that ends when the test says so, and links on demand."""

    nodes, unanswered = (), False

    def __init__(self, run: Path) -> None:
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.links: asyncio.Queue[Any] = asyncio.Queue()
        outer: Any = self
        self.peers = Peers(run, ClusterConfig(), outer, outer, epoch=1)
        self.peers.start_accepting()

    async def start(self, spec: object) -> Any:
        return self

    async def wait(self) -> int:
        return await asyncio.shield(self.ended)

    def poll(self) -> int | None:
        return self.ended.result() if self.ended.done() else None

    async def accept(self) -> Any:
        return await self.links.get()

    async def close(self) -> None: ...

    async def connect(self, *messages: Goodbye, ends: bool) -> FakeLink:
        peer = self.peers.peers[RUNNER]
        link = FakeLink(peer.number * INCARNATIONS_PER_LAUNCH, *messages, ends=ends)
        self.links.put_nowait(link)
        return link

    async def next(self) -> Any:
        return await asyncio.wait_for(self.peers.inbox.get(), 30)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    result = Bench(tmp_path)
    await result.peers.launch(*RUNNER)
    yield result
    await result.peers.shut_down("done", 0.1)


async def test_what_a_process_said_last_is_heard_before_its_end(bench: Bench) -> None:
    words = [Goodbye(str(i)) for i in range(20)]
    await bench.connect(*words, ends=True)
    assert await bench.next() == Connected(RUNNER, again=False)
    bench.ended.set_result(3)
    assert [await bench.next() for _ in words] == [Said(RUNNER, word) for word in words]
    assert await bench.next() == Exited(RUNNER, 1, 3)


async def test_a_link_that_does_not_end_holds_the_news_up_only_so_long(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "READ_OUT_S", 0.05)
    await bench.connect(ends=False)
    assert await bench.next() == Connected(RUNNER, again=False)
    bench.ended.set_result(-9)
    assert await bench.next() == Exited(RUNNER, 1, -9)


async def test_a_process_that_never_connected_is_reported_at_once(bench: Bench) -> None:
    bench.ended.set_result(1)
    assert await bench.next() == Exited(RUNNER, 1, 1)


async def test_who_connects_after_the_end_is_told_to_end(bench: Bench) -> None:
    bench.ended.set_result(1)
    assert await bench.next() == Exited(RUNNER, 1, 1)
    link = await bench.connect(ends=True)
    async with asyncio.timeout(30):
        while not link.closed:
            await asyncio.sleep(0)
    assert [type(message) for message in link.told] == [Shutdown]
    assert bench.peers.inbox.empty()


async def test_of_external_services_the_newest_process_has_the_place(bench: Bench) -> None:
    peers = bench.peers
    peers.expect_external(PeerKind.RUNNER)

    async def come(launch: int, attempt: int = 0) -> FakeLink:
        link = FakeLink(launch * INCARNATIONS_PER_LAUNCH + attempt, ends=False)
        bench.links.put_nowait(link)
        return link

    await come(5)
    assert await bench.next() == Connected(RUNNER, again=False)
    await come(5, attempt=1)
    assert await bench.next() == Connected(RUNNER, again=True)
    await come(6)
    assert [await bench.next(), await bench.next()] == [Replaced(RUNNER), Connected(RUNNER, again=False)]
    old = await come(5, attempt=2)
    async with asyncio.timeout(30):
        while not old.closed:
            await asyncio.sleep(0)
    assert [type(message) for message in old.told] == [Shutdown] and peers.inbox.empty()
    peers.end_external("done")
    assert not peers.missing()


async def test_a_survivor_keeps_the_number_of_its_launch(bench: Bench) -> None:
    survivor = launch_number(7, 2)
    bench.peers.expect(PeerKind.RUNNER, survivor * INCARNATIONS_PER_LAUNCH, bench)  # type: ignore[arg-type]
    await bench.connect(ends=False)
    assert await bench.next() == Connected(RUNNER, again=False)
    assert bench.peers.peers[RUNNER].number == survivor
    assert bench.peers.peers[RUNNER].log.match("logs/attempt-7/runner-0.2.log")
