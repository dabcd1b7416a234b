"""One node's part of the acceptance job: meet the other nodes in a shared folder and over the network, then look at itself.

A node writes 1 MiB and after it a card with its address; both are replaced whole, as files of a run are. Who sees the
card must see the data behind it, or the file system does not keep the order of renames. Who reads the card connects to
the address that `cluster.host=auto` would publish, and is told the node's name and clock.
"""

from __future__ import annotations

import os
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import xxhash

from gyre_hpc.errors import ConfigError
from gyre_hpc.files import replace_file
from gyre_hpc.launch.address import node_address
from gyre_hpc.launch.doctor.site import Finding

T = TypeVar("T")
MEET_S: Final = 60.0
"""Tasks of one step start within seconds; a name may take tens of seconds to appear on another client of NFS."""
CONNECT_S: Final = 5.0
POLL_S: Final = 0.05
DATA_BYTES: Final = 1 << 20


class Card(msgspec.Struct, frozen=True):
    """How to reach a node, and the checksum of the data it wrote before this card."""

    node: str
    address: str
    port: int
    digest: str


class Met(msgspec.Struct, frozen=True):
    """What one node knows of another: why its files were not seen, why it was not reached ("" = was), its clock ahead
    of ours, known to `error_s`."""

    unseen: str = ""
    unreached: str = ""
    skew_s: float = 0.0
    error_s: float = 0.0


class Report(msgspec.Struct, frozen=True):
    """All of one node: the address it published, the others by name, its own findings."""

    node: str
    address: str
    met: dict[str, Met]
    findings: list[Finding]


class _Clock(socketserver.StreamRequestHandler):
    """Says name and time to whoever connects."""

    timeout = CONNECT_S

    def handle(self) -> None:
        self.wfile.write(f"{self.server.node} {time.time():.6f}\n".encode())  # type: ignore[attr-defined]


class ClockServer(socketserver.TCPServer):
    """Listens on a free port of `address` while it is entered."""

    request_queue_size = 128

    def __init__(self, node: str, address: str) -> None:
        super().__init__((address, 0), _Clock)
        self.node = node
        self._thread = threading.Thread(target=self.serve_forever, args=(POLL_S,), daemon=True)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def __enter__(self) -> ClockServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


def report_node(
    folder: Path, node: str, names: Sequence[str], look: Callable[[], list[Finding]], meet_s: float = MEET_S
) -> Report:
    """Meet `names` in `folder`, then `look` at this node; written into the folder and returned."""
    address, met = _meet(folder, node, [name for name in names if name != node], time.monotonic() + meet_s)
    report = Report(node, address, met, look())
    replace_file(folder / f"report-{node}.json", msgspec.json.encode(report))
    return report


def read_reports(folder: Path) -> dict[str, Report]:
    """The reports that lie in the folder, by node."""
    files = sorted(folder.glob("report-*.json"))
    reports = [msgspec.json.decode(file.read_bytes(), type=Report) for file in files]
    return {report.node: report for report in reports}


def _meet(folder: Path, node: str, peers: Sequence[str], deadline: float) -> tuple[str, dict[str, Met]]:
    try:
        server = ClockServer(node, node_address())
    except (ConfigError, OSError) as error:
        return f"none: {error}", {}
    with server:
        address = str(server.server_address[0])
        _publish(folder, Card(node, address, server.port, ""))
        met = {peer: _look_up(folder, peer, deadline) for peer in peers}
        replace_file(folder / f"met-{node}", b"")
        for peer in peers:  # they may still want to connect
            _until(lambda peer=peer: (folder / f"met-{peer}").exists() or None, deadline)  # type: ignore[misc]
    return address, met


def _publish(folder: Path, card: Card) -> None:
    data = os.urandom(DATA_BYTES)
    replace_file(folder / f"data-{card.node}", data)
    card = msgspec.structs.replace(card, digest=xxhash.xxh3_64_hexdigest(data))
    replace_file(folder / f"card-{card.node}.json", msgspec.json.encode(card))


def _look_up(folder: Path, peer: str, deadline: float) -> Met:
    content = _until(lambda: _bytes(folder / f"card-{peer}.json"), deadline)
    if content is None:
        return Met(unseen="nothing appeared in time")
    card = msgspec.json.decode(content, type=Card)
    data = _bytes(folder / f"data-{peer}")
    if data is None:
        return Met(unseen="a file was seen before the file that was renamed ahead of it")
    if xxhash.xxh3_64_hexdigest(data) != card.digest:
        return Met(unseen="a renamed file had other bytes than were written and synced")
    return reach(card)


def reach(card: Card) -> Met:
    """Connect to the node of a card. A loopback address leads to this node itself, which its name tells."""
    began = time.time()
    try:
        with socket.create_connection((card.address, card.port), timeout=CONNECT_S) as connection:
            said = connection.makefile().readline().split()
    except OSError as error:
        return Met(unreached=f"{card.address} port {card.port}: {error.strerror or error}")
    if len(said) != 2 or said[0] != card.node:
        return Met(
            unreached=f"{card.address} port {card.port}: answered by {said[:1] or 'nobody'}, not {card.node}"
        )
    ended = time.time()
    return Met(skew_s=float(said[1]) - (began + ended) / 2, error_s=(ended - began) / 2)


def _bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _until(probe: Callable[[], T | None], deadline: float) -> T | None:
    """What `probe` finds once it finds something; None after the deadline."""
    while (found := probe()) is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return found
