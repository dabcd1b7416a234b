"""The host memory of a cell, checked before each switch: one that cannot fit is refused with the numbers, not tried.

Needs are what the switch is known to take on this host: a gradient for training, and the pulled snapshot where the cell is not
the core; the snapshot, its copy in the engine's folder, what the engine held before and what the trainer sets aside for rollout. What the other side gives back first
counts as room where the engine's memory is the host's. The kernel would otherwise end the whole step at its cgroup's limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gyre_hpc.errors import GyreError
from gyre_hpc.transport.messages import Manifest
from gyre_hpc.transport.region_files import total_bytes

MIB: Final = 1 << 20
CGROUP: Final = Path("/sys/fs/cgroup")
UNLIMITED: Final = 1 << 60


class MemoryShort(GyreError):
    """A switch needs more host memory than there is (names each part and the limit that binds)."""


@dataclass(frozen=True)
class Available:
    """Bytes this process may still take, and what limits it."""

    bytes: int
    limit: str


def available(cgroup: Path = CGROUP, proc: Path = Path("/proc")) -> Available:
    """The least of the machine's MemAvailable and what the limits of this process's cgroups (v2) leave."""
    rooms = [Available(_mem_available(proc / "meminfo"), "MemAvailable of the machine")]
    group = _own_group(proc / "self" / "cgroup")
    for folder in (group, *Path(group).parents) if group else ():
        path = cgroup / str(folder).lstrip("/")
        limit, used = _number(path / "memory.max"), _number(path / "memory.current")
        if limit is not None and used is not None:
            rooms.append(
                Available(max(0, limit - used + _reclaimable(path / "memory.stat")), f"{path}/memory.max")
            )
    return min(rooms, key=lambda room: room.bytes)


@dataclass
class MemoryLedger:
    """Asks before each switch. `look` tells what there is."""

    look: Callable[[], Available] = available

    def for_training(self, weights: Manifest | None, gradient: int, freed: int) -> None:
        """Before a cell trains: `weights` are pulled (None: the core has its own), the engine gives `freed` bytes back.

        `gradient`: bytes of a gradient of the model.
        """
        snapshot = {} if weights is None else {"snapshot": total_bytes(weights.fragments)}
        self.check("to_training", {**snapshot, "gradient": gradient}, freed)

    def for_rollout(self, weights: Manifest, engine: int, aside: int = 0) -> None:
        """Before an engine loads pulled `weights`: their copy in its folder, and `engine` bytes that it takes again.

        `aside`: what the trainer keeps on the host from then on (an open gradient of the core, moments from a device).
        """
        copy = total_bytes(weights.fragments)
        self.check("to_rollout", {"weights folder": copy, "engine": engine, "trainer aside": aside})

    def check(self, switch: str, needs: Mapping[str, int], freed: int = 0) -> None:
        """Raises MemoryShort if the parts do not fit beside what is in use, `freed` bytes being given back first."""
        room, needed = self.look(), sum(needs.values())
        if needed <= room.bytes + freed:
            return
        parts = ", ".join(f"{name} {size / MIB:.0f} MiB" for name, size in needs.items())
        raise MemoryShort(
            f"{switch} refused: it needs {needed / MIB:.0f} MiB of host memory ({parts}); {room.limit} leaves"
            f" {room.bytes / MIB:.0f} MiB and {freed / MIB:.0f} MiB are given back first",
            fix="give the cell more memory (cluster.cell.mem) or lower engine.pool_tokens or engine.kv_store_mib",
        )


def _mem_available(meminfo: Path) -> int:
    for line in _text(meminfo).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return UNLIMITED


def _own_group(path: Path) -> Path | None:
    """Path of the v2 cgroup of this process; None where there is none."""
    for line in _text(path).splitlines():
        if line.startswith("0::"):
            return Path(line[3:])
    return None


def _reclaimable(stat: Path) -> int:
    """Page cache that counts as used and is given up under pressure."""
    for line in _text(stat).splitlines():
        if line.startswith("inactive_file "):
            return int(line.split()[1])
    return 0


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
