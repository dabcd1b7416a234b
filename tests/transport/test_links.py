"""Links: who may connect, in which order messages arrive, and what silences or ends a link."""

from __future__ import annotations

import asyncio
import shutil
import stat
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from gyre_hpc.errors import CorruptRecord, MissingInput, PeerLost, ProtocolViolation
from gyre_hpc.layout import RunLayout
from gyre_hpc.transport.links import (
    AuthenticationFailed,
    Link,
    LinkServer,
    PeerLink,
    StaleIncarnation,
    read_rendezvous,
    read_secret,
    write_rendezvous,
    write_secret,
)
from gyre_hpc.transport.messages import Claim, Goodbye, Hello, PeerKind, Shutdown, WorkReady
from gyre_hpc.transport.wire import Fence, read_frame

PATIENCE_S = 30.0


def hello(index: int = 0, kind: PeerKind = PeerKind.CELL) -> Hello:
    return Hello(kind=kind, index=index, pid=1, host="here", address="")


async def connect(
    layout: RunLayout, incarnation: int = 0, *, heartbeat_s: float = 60.0, index: int = 0
) -> Link:
    return await Link.connect(
        layout, hello(index), incarnation, heartbeat_s=heartbeat_s, timeout_s=PATIENCE_S
    )


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return RunLayout(tmp_path)


@pytest_asyncio.fixture
async def server(layout: RunLayout) -> AsyncIterator[LinkServer]:
    server = LinkServer(write_secret(layout), 3, "127.0.0.1")
    write_rendezvous(layout, *await server.start(), 3)
    yield server
    await server.close()


async def pair(layout: RunLayout, server: LinkServer, **options: float) -> tuple[Link, PeerLink]:
    link = await connect(layout, **options)  # type: ignore[arg-type]
    return link, await server.accept()


def test_the_secret_is_private_and_survives_a_second_controller(layout: RunLayout) -> None:
    secret = write_secret(layout)
    assert stat.S_IMODE(layout.secret.stat().st_mode) == 0o600
    assert write_secret(layout) == read_secret(layout) == secret


def test_a_copied_run_has_a_secret_of_its_own_and_a_moved_one_keeps_it(layout: RunLayout) -> None:
    """Regions and KV pages are named by it: a copy would share those of the run it was copied from."""
    secret = write_secret(layout)
    copy = RunLayout(layout.root.with_name("copy"))
    shutil.copytree(layout.root, copy.root)
    fresh = write_secret(copy)
    assert fresh != secret and write_secret(copy) == fresh and write_secret(layout) == secret
    linked = RunLayout(layout.root.with_name("linked"))
    linked.root.symlink_to(layout.root)
    assert write_secret(linked) == secret
    moved = RunLayout(layout.root.rename(layout.root.with_name("moved")))
    assert write_secret(moved) == secret


def test_a_missing_or_damaged_secret_is_named(layout: RunLayout) -> None:
    with pytest.raises(MissingInput, match="secret"):
        read_secret(layout)
    layout.secret.write_text("zz")
    with pytest.raises(CorruptRecord, match="secret"):
        read_secret(layout)


async def test_a_peer_learns_the_epoch_and_the_controller_the_hello(
    layout: RunLayout, server: LinkServer
) -> None:
    link, peer = await pair(layout, server)
    assert link.epoch == peer.epoch == 3
    assert peer.hello == hello()
    assert peer.incarnation == 0
    await link.close()


async def test_messages_arrive_whole_and_in_order_both_ways(layout: RunLayout, server: LinkServer) -> None:
    link, peer = await pair(layout, server)
    for batch in range(200):
        link.send(Claim(batch=batch))
        peer.send(WorkReady(batch=batch))
    assert [await peer.receive() for _ in range(200)] == [Claim(batch=batch) for batch in range(200)]
    assert [await link.receive() for _ in range(200)] == [WorkReady(batch=batch) for batch in range(200)]
    await link.close()


async def test_closing_delivers_what_was_sent_and_then_none_for_ever(
    layout: RunLayout, server: LinkServer
) -> None:
    link, peer = await pair(layout, server)
    link.send(Goodbye())
    await link.close()
    assert await peer.receive() == Goodbye()
    assert await peer.receive() is None
    assert await peer.receive() is None


async def test_a_controller_that_closes_ends_its_peers(layout: RunLayout, server: LinkServer) -> None:
    link, peer = await pair(layout, server)
    peer.send(Shutdown(reason="done"))
    await peer.close()
    assert await link.receive() == Shutdown(reason="done")
    assert await link.receive() is None
    await link.close()


async def test_a_wrong_secret_has_a_named_error(layout: RunLayout, server: LinkServer) -> None:
    layout.secret.write_text("00" * 32)
    with pytest.raises(AuthenticationFailed, match="secret"):
        await connect(layout)


async def test_a_peer_refuses_a_controller_without_the_secret(layout: RunLayout) -> None:
    class Gullible(LinkServer):
        def _verify(self, challenge: object, introduction: object) -> Hello:
            return hello()

    write_secret(layout)
    impostor = Gullible(b"x" * 32, 1, "127.0.0.1")
    write_rendezvous(layout, *await impostor.start(), 1)
    with pytest.raises(AuthenticationFailed, match="controller does not know"):
        await connect(layout)
    await impostor.close()


async def test_a_newer_incarnation_supersedes_and_an_older_one_is_refused(
    layout: RunLayout, server: LinkServer
) -> None:
    old, old_peer = await pair(layout, server)
    new = await connect(layout, 1)
    new_peer = await server.accept()
    assert await old.receive() is None
    assert await old_peer.receive() is None
    for stale in (0, 1):
        with pytest.raises(StaleIncarnation):
            await connect(layout, stale)
    new.send(Claim(batch=1))
    assert await new_peer.receive() == Claim(batch=1)
    await new.close()
    await old.close()


async def test_peers_of_other_index_do_not_supersede_each_other(
    layout: RunLayout, server: LinkServer
) -> None:
    first, first_peer = await pair(layout, server)
    second = await connect(layout, index=1)
    await server.accept()
    first.send(Claim(batch=4))
    assert await first_peer.receive() == Claim(batch=4)
    await first.close()
    await second.close()


async def test_a_peer_waits_for_a_controller_with_a_newer_epoch(
    layout: RunLayout, server: LinkServer
) -> None:
    link = await connect(layout)
    waiting = asyncio.create_task(
        Link.connect(layout, hello(), 0, heartbeat_s=60.0, timeout_s=PATIENCE_S, after_epoch=link.epoch)
    )
    successor = LinkServer(read_secret(layout), 4, "127.0.0.1")
    write_rendezvous(layout, *await successor.start(), 4)
    again = await waiting
    assert again.epoch == 4
    await asyncio.gather(link.close(), again.close())
    await successor.close()


async def test_no_controller_within_the_time_is_a_lost_peer(layout: RunLayout) -> None:
    with pytest.raises(PeerLost, match=r"controller\.json"):
        await Link.connect(layout, hello(), 0, heartbeat_s=1.0, timeout_s=0.01)


async def test_heartbeats_continue_while_the_peers_event_loop_is_blocked(
    layout: RunLayout, server: LinkServer
) -> None:
    """The peer's loop is this loop: while it is blocked nothing but a thread can have written the heartbeats."""
    link, peer = await pair(layout, server, heartbeat_s=0.02)
    before = peer._arrivals.received
    time.sleep(0.5)
    async with asyncio.timeout(PATIENCE_S):
        while peer._arrivals.received < before + 5:
            await asyncio.sleep(0)
    assert peer.silent_s() < PATIENCE_S
    assert peer._inbox.empty()
    await link.close()


async def test_a_peer_that_falls_silent_is_seen(layout: RunLayout, server: LinkServer) -> None:
    link, peer = await pair(layout, server)
    first = peer.silent_s()
    await asyncio.sleep(0.02)
    assert peer.silent_s() > first
    await link.close()


@pytest.mark.parametrize("noise", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x02ab", b"\xff" * 64])
async def test_a_foreign_client_does_not_disturb_the_server(
    layout: RunLayout, server: LinkServer, noise: bytes
) -> None:
    rendezvous = read_rendezvous(layout)
    assert rendezvous is not None
    _, writer = await asyncio.open_connection(rendezvous.host, rendezvous.port)
    writer.write(noise)
    writer.close()
    link, _ = await pair(layout, server)
    await link.close()


async def test_a_frame_that_is_no_message_closes_the_link(layout: RunLayout, server: LinkServer) -> None:
    link, peer = await pair(layout, server)
    link._writer.write(b"\x00\x00\x00\x03abc")
    assert await peer.receive() is None
    await link.close()


def test_the_fence_admits_each_sequence_once() -> None:
    fence = Fence(2, 5)
    assert fence.admit(2, 5, 1)
    assert not fence.admit(2, 5, 1)
    assert not fence.admit(1, 5, 2), "an older epoch is stale"
    assert not fence.admit(2, 4, 2), "an older incarnation is stale"
    assert fence.admit(2, 5, 2)


@pytest.mark.parametrize("envelope", [(2, 5, 2), (3, 5, 1), (2, 6, 1)])
def test_the_fence_refuses_gaps_and_the_future(envelope: tuple[int, int, int]) -> None:
    with pytest.raises(ProtocolViolation):
        Fence(2, 5).admit(*envelope)


def test_a_damaged_rendezvous_file_is_named(layout: RunLayout) -> None:
    layout.rendezvous.write_bytes(msgspec.json.encode({"host": 3}))
    with pytest.raises(CorruptRecord, match=r"controller\.json"):
        read_rendezvous(layout)


def test_a_loop_that_ends_amid_a_handshake_says_nothing(layout: RunLayout) -> None:
    said = list[str]()

    async def ends_early() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context["message"]))
        server = LinkServer(write_secret(layout), 3, "127.0.0.1")
        reader, _ = await asyncio.open_connection(*await server.start())
        assert await read_frame(reader)

    asyncio.run(ends_early())
    assert said == []
