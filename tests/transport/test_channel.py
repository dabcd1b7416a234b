"""Channels: whatever a channel loses, and whenever it opens and closes, messages arrive once and in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_hpc.errors import ProtocolViolation
from gyre_hpc.layout import RunLayout
from gyre_hpc.transport import channel as channels
from gyre_hpc.transport.channel import Channel, InOrder
from gyre_hpc.transport.links import Link, LinkServer, PeerLink, write_rendezvous, write_secret
from gyre_hpc.transport.messages import Claim, Hello, PeerKind, WorkReady

PATIENCE_S = 30.0


class Side:
    """One end of a link of numbered envelopes: a reliable socket and a channel that may lose everything."""

    def __init__(self) -> None:
        self.socket: deque[bytes] = deque()
        self.channel_out: deque[bytes] = deque()
        self.sent = 0
        self.order: InOrder[bytes] = InOrder()
        self.got: list[bytes] = []
        self.channel = Channel(self.socket.extend, self.deliver)

    def send(self) -> None:
        self.sent += 1
        envelope = str(self.sent).encode()
        if not self.channel.takes(self.sent, envelope):
            self.socket.append(envelope)

    def deliver(self, envelope: bytes) -> None:
        self.got.extend(self.order.take(int(envelope), envelope))

    def open(self, now: float) -> None:
        self.channel.open(self.channel_out.append, lambda: self.order.received, now)


ACTIONS = st.tuples(
    st.sampled_from(
        ["send", "send", "send", "socket", "channel", "channel", "lose", "repeat", "open", "close", "ping"]
    ),
    st.booleans(),
)


@given(st.lists(ACTIONS, max_size=200))
def test_messages_arrive_once_and_in_order_whatever_the_channel_does(actions: list[tuple[str, bool]]) -> None:
    sides = Side(), Side()
    for now, (action, which) in enumerate(actions):
        here, there = sides[which], sides[not which]
        match action:
            case "send":
                here.send()
            case "socket" if here.socket:
                there.deliver(here.socket.popleft())
            case "channel" if here.channel_out:
                there.channel.arrived(here.channel_out.popleft(), now)
            case "lose" if here.channel_out:
                here.channel_out.popleft()
            case "repeat" if here.channel_out:
                there.channel.arrived(here.channel_out[0], now)
            case "open":
                here.open(now)
            case "close":
                here.channel.close()
            case "ping":
                here.channel.tick(now, heartbeat_s=0, silent_s=1e9)
    for here, there in (sides, sides[::-1]):
        here.channel.close()
        while here.socket:
            there.deliver(here.socket.popleft())
        assert there.got == [str(number + 1).encode() for number in range(here.sent)]


def opened() -> tuple[Side, Side]:
    left, right = Side(), Side()
    left.open(0.0)
    right.open(0.0)
    return left, right


def carry(left: Side, right: Side, now: float) -> None:
    for here, there in ((left, right), (right, left)):
        while here.channel_out:
            there.channel.arrived(here.channel_out.popleft(), now)


def test_what_was_acknowledged_is_not_sent_again() -> None:
    left, right = opened()
    left.send()
    carry(left, right, 1.0)
    right.channel.tick(1.0, heartbeat_s=1.0, silent_s=9.0)
    carry(left, right, 1.0)
    left.send()
    assert left.channel.close() == 1
    assert list(left.socket) == [b"2"]


def test_a_channel_that_brings_nothing_has_failed_and_one_that_pings_has_not() -> None:
    left, right = opened()
    for now in range(1, 20):
        assert right.channel.tick(now, heartbeat_s=1.0, silent_s=5.0) == ""
        assert left.channel.tick(now, heartbeat_s=1.0, silent_s=5.0) == ""
        carry(left, right, now)
    assert "silent for 6.0 s" in left.channel.tick(25.0, heartbeat_s=1.0, silent_s=5.0)


def test_a_channel_that_acknowledges_nothing_has_failed_though_it_pings() -> None:
    left, right = opened()
    left.send()
    left.channel_out.clear()
    for now in range(1, 6):
        right.channel.tick(now, heartbeat_s=1.0, silent_s=5.0)
        carry(left, right, now)
        assert left.channel.tick(now, heartbeat_s=1.0, silent_s=5.0) == ""
    right.channel.tick(6, heartbeat_s=1.0, silent_s=5.0)
    carry(left, right, 6)
    assert "acknowledged" in left.channel.tick(6, heartbeat_s=1.0, silent_s=5.0)


def test_a_full_window_leaves_the_rest_to_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "WINDOW_FRAMES", 3)
    left, _ = opened()
    for _ in range(5):
        left.send()
    assert len(left.channel_out) == 3 and list(left.socket) == [b"4", b"5"]


def test_too_many_messages_ahead_of_a_missing_one_are_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "MAX_AHEAD", 3)
    order: InOrder[int] = InOrder()
    with pytest.raises(ProtocolViolation, match="message 1 is missing"):
        for number in range(2, 9):
            order.take(number, number)


async def test_a_real_link_loses_nothing_when_its_channel_dies_in_the_middle(tmp_path: Path) -> None:
    """Every third frame of the channel is lost, both sides lose it at different moments, heartbeats go on."""
    layout = RunLayout(tmp_path)
    server = LinkServer(write_secret(layout), 1, "127.0.0.1")
    write_rendezvous(layout, *await server.start(), 1)
    hello = Hello(kind=PeerKind.CELL, index=0, pid=1, host="here", address="")
    link = await Link.connect(layout, hello, 0, heartbeat_s=0.01, timeout_s=PATIENCE_S)
    peer = await server.accept()
    lost = 0

    def lossy(other: Link | PeerLink) -> Callable[[bytes], None]:
        """Out of the sender's thread into the loop, as a host does; what arrives late is dropped by nobody."""
        loop = asyncio.get_running_loop()

        def carry(data: bytes) -> None:
            nonlocal lost
            if hash(data) % 3:
                loop.call_soon_threadsafe(other.channel.arrived, data, 0.0)
            else:
                lost += 1

        return carry

    async def talk(first: int, last: int) -> None:
        for number in range(first, last):
            link.send(Claim(batch=number))
            peer.send(WorkReady(batch=number))
            await asyncio.sleep(0.001)

    await talk(0, 50)
    link.expect_channel()
    peer.expect_channel()
    link.open_channel(lossy(peer))
    await talk(50, 60)
    peer.open_channel(lossy(link))
    await talk(60, 150)
    peer.channel.close()
    await talk(150, 200)
    assert link.channel.close() > 0 and lost > 0
    await talk(200, 250)
    async with asyncio.timeout(PATIENCE_S):
        assert [await peer.receive() for _ in range(250)] == [Claim(batch=number) for number in range(250)]
        assert [await link.receive() for _ in range(250)] == [
            WorkReady(batch=number) for number in range(250)
        ]
    await link.close()
    assert await peer.receive() is None
    await server.close()


async def test_what_is_still_in_the_channel_leaves_with_the_end_of_the_link(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    server = LinkServer(write_secret(layout), 1, "127.0.0.1")
    write_rendezvous(layout, *await server.start(), 1)
    hello = Hello(kind=PeerKind.CELL, index=0, pid=1, host="here", address="")
    link = await Link.connect(layout, hello, 0, heartbeat_s=60.0, timeout_s=PATIENCE_S)
    peer = await server.accept()
    peer.expect_channel()
    link.open_channel(lambda data: None)
    link.send(Claim(batch=7))
    await link.close()
    assert await peer.receive() == Claim(batch=7)
    assert await peer.receive() is None
    await server.close()
