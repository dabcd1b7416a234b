"""A whole controller over the real `Cell`, with trainers that only remember: what was trained, on which weights, how often.

Weights are the steps behind them, a gradient is the micro-steps in it with the weights each was computed on, so what a run
has trained can be read off its last weights. Everything is one event loop without threads: the same run passes the same
points in the same order. `World.at` is called at each of them (a message heard, half a region pulled, an optimizer
step under way, a message about to leave), and may end a cell there as SIGKILL would: nothing of it happens afterwards.
With `apart` every cell has a host of its own, and what it offered is gone with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gyre_hpc.cells.steps import Phases
from gyre_hpc.controller.controller import Controller
from gyre_hpc.errors import MissingInput
from gyre_hpc.layout import RunLayout
from gyre_hpc.records import Version
from gyre_hpc.trajectories.micro_steps import MicroStep
from gyre_hpc.transport import messages as msg
from gyre_hpc.transport.messages import RegionKind
from gyre_hpc.transport.regions import PullFailed

if TYPE_CHECKING:
    from tests.controller.live_cells import CellPeers, LiveCell

CORE_TAKES, SATELLITE_TAKES = 12, 4
"""Turns of the loop that a micro-step takes: satellites come in time to have some."""


class Killed(BaseException):
    """This process has ended: unwinds what it was doing."""


@dataclass(frozen=True)
class Taken:
    """An optimizer step: its version, the micro-steps in it in order, and |E|."""

    version: int
    names: tuple[str, ...]
    executions: int


Weights = tuple[Taken, ...]


class Box:
    """In the place of an array."""

    nbytes = 0

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclass(frozen=True)
class Point:
    """Where a cell stands: what it does next, and how often it has stood there before."""

    cell: int
    core: bool
    what: str


@dataclass
class World:
    """What is common to all cells of a run, over all its controllers. `strike` is called at each point."""

    run: Path
    apart: bool = True
    strike: Callable[[Point], None] = lambda point: None
    disk: dict[Path, tuple[int, Weights]] = field(default_factory=dict)
    regions: dict[str, tuple[LiveCell, Mapping[str, Any]]] = field(default_factory=dict)
    pulled: set[str] = field(default_factory=set)
    dropped: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    """Open gradients that a living cell threw away."""
    wrong: list[str] = field(default_factory=list)
    """What must never happen."""
    versions: dict[int, Weights] = field(default_factory=dict)
    """What each version that somebody may pull is."""
    passed: list[Point] = field(default_factory=list)
    controller: Controller = field(init=False)
    peers: CellPeers = field(init=False)
    incarnations: int = 0
    at_rest: set[int] = field(default_factory=set)
    """Executions that a shard holds."""

    @property
    def core(self) -> int | None:
        """The cell that is the core, as the schedule has it."""
        return self.controller.driver.state.core

    def at(self, cell: LiveCell, what: str) -> None:
        """A point of the run; raises Killed in a cell that is no more."""
        if not cell.dead:
            point = Point(cell.index, cell.index == self.core, what)
            self.passed.append(point)
            self.strike(point)
        if cell.dead:
            raise Killed

    def forget_regions(self, index: int) -> None:
        """What a cell offers outlives it by one restart."""
        own = sorted({cell.incarnation for cell, _ in self.regions.values() if cell.index == index})
        for path, (cell, _) in list(self.regions.items()):
            if cell.index == index and cell.incarnation in own[:-1]:
                del self.regions[path]

    def readable(self, manifest: msg.Manifest) -> Mapping[str, Any]:
        owner, content = self.regions.get(manifest.path, (None, {}))
        if owner is None or (owner.dead and self.apart):
            raise PullFailed(manifest, "the owner is gone")
        return content


class Regions:
    """In the place of a cell's RegionServer."""

    def __init__(self, world: World, cell: LiveCell) -> None:
        self.world, self.cell, self.count = world, cell, 0

    def publish(
        self, kind: RegionKind, name: str, version: int, layout: str, arrays: Mapping[str, Any]
    ) -> msg.Manifest:
        self.world.at(self.cell, f"write {kind}")
        self.count += 1
        path = f"{self.cell.index}.{self.cell.incarnation}/{kind}-{self.count}"
        manifest = msg.Manifest(kind, name, version, layout, self.cell.owner, "127.0.0.1:1", (), path)
        self.world.regions[path] = (self.cell, arrays)
        self.world.at(self.cell, f"wrote {kind}")
        return manifest

    def drop(self, manifest: msg.Manifest) -> None:
        _, content = self.world.regions.pop(manifest.path, (None, {}))
        if manifest.kind is RegionKind.GRADIENT and manifest.path not in self.world.pulled:
            self.world.dropped.append((self.cell.index, tuple(name for name, _ in content["grad"])))

    async def pull(self, manifest: msg.Manifest, *, deadline_s: float) -> Mapping[str, Any]:
        if manifest.kind is RegionKind.MICRO_STEPS:
            self.world.at(self.cell, "pull micro_steps")
            return NO_TOKENS
        self.world.at(self.cell, f"pull {manifest.kind}")
        content = self.world.readable(manifest)
        await turns(2)
        self.world.at(self.cell, f"half of {manifest.kind}")
        content = self.world.readable(manifest)
        await turns(2)
        self.world.at(self.cell, f"pulled {manifest.kind}")
        self.world.pulled.add(manifest.path)
        return content


class Engine:
    """In the place of a cell's EngineHost."""

    address, alive, held_bytes, released_bytes, shares_device = "http://engine", True, 0, 0, False

    def __init__(self, world: World, cell: LiveCell) -> None:
        self.world, self.cell = world, cell

    async def release(self) -> None:
        await turns(1)
        self.world.at(self.cell, "engine released")

    async def serve(self, version: Version, arrays: Mapping[str, Any], phases: Phases) -> None:
        self.world.at(self.cell, "engine loads")
        await turns(2)
        if arrays["w"].value != self.world.versions[version]:
            self.world.wrong.append(f"engine {self.cell.index} serves other weights as version {version}")
        self.world.at(self.cell, "engine serves")


class Trainer:
    """In the place of a cell's TrainerHost."""

    layout_digest, gradient_bytes = "layout", 0

    def leaving_bytes(self, *, keeps_gradient: bool) -> int:
        return 0

    def __init__(self, world: World, cell: LiveCell) -> None:
        self.world, self.cell = world, cell
        self.version, self.weights = Version(0), Weights()
        self.gradient: list[tuple[str, Weights]] = []
        self.aside: list[tuple[str, Weights]] = []

    async def leave(self) -> None:
        self.aside, self.gradient = self.gradient, []
        await turns(1)
        self.world.at(self.cell, "trainer off-loaded")

    async def enter(self) -> None:
        await turns(1)
        self.world.at(self.cell, "trainer restored")
        self.gradient, self.aside = self.gradient + self.aside, []

    async def load_weights(self, arrays: Mapping[str, Any], version: Version) -> None:
        await turns(1)
        self.world.at(self.cell, "snapshot loads")
        await self.clear()
        self.version, self.weights = version, arrays["w"].value

    async def restore_from(self, folder: Path, version: Version, *, resident: bool) -> Mapping[str, Any]:
        await self.clear()
        self.world.at(self.cell, "checkpoint loads")
        await turns(2)
        fresh = folder == RunLayout(self.world.run).model
        if not fresh and folder not in self.world.disk:
            raise MissingInput(f"{folder}: no such checkpoint")
        self.version, self.weights = (Version(0), ()) if fresh else self.world.disk[folder]
        if self.version != version:
            self.world.wrong.append(f"{folder} holds version {self.version}, {version} was asked for")
        self.world.at(self.cell, "checkpoint loaded")
        return self._exposed()

    async def micro_step(self, step: MicroStep) -> tuple[dict[str, float], float]:
        self.world.at(self.cell, "micro-step begins")
        await turns(CORE_TAKES if self.cell.index == self.world.core else SATELLITE_TAKES)
        self.gradient.append((step.id, self.weights))
        self.world.at(self.cell, "micro-step is done")
        return {}, 0.0

    async def take_gradient(self, consume: Callable[[Mapping[str, Any]], msg.Manifest]) -> msg.Manifest:
        await turns(1)
        manifest = consume({"grad": tuple(self.gradient)})
        self.gradient = []
        return manifest

    async def clear(self) -> None:
        lost = tuple(name for name, _ in self.gradient + self.aside)
        if lost:
            self.world.dropped.append((self.cell.index, lost))
        self.gradient, self.aside = [], []

    async def commit(
        self, contributions: Sequence[Mapping[str, Any]], executions: int, version: Version
    ) -> dict[str, float]:
        self.world.at(self.cell, "optimizer step begins")
        parts = [*self.gradient, *(part for arrays in contributions for part in arrays["grad"])]
        for name, weights in parts:
            if weights != self.weights:
                self.world.wrong.append(f"{name} enters version {version} with a gradient of other weights")
        await turns(1)
        self.world.at(self.cell, "within the optimizer step")
        self.gradient = []
        self.weights += (Taken(version, tuple(name for name, _ in parts), executions),)
        self.version = version
        self.world.at(self.cell, "optimizer step is taken")
        return {}

    async def publish(
        self, checkpoint: Path | None, version: Version, *, resident: bool
    ) -> Mapping[str, Any]:
        if self.version != version:
            self.world.wrong.append(f"version {self.version} is published as {version}")
        if checkpoint is not None:
            self.world.at(self.cell, "checkpoint is written")
            await turns(2)
            self.world.at(self.cell, "checkpoint is half written")
            self.world.disk[checkpoint] = (version, self.weights)
            self.world.at(self.cell, "checkpoint is on disk")
        return self._exposed()

    def _exposed(self) -> Mapping[str, Any]:
        if self.world.versions.setdefault(self.version, self.weights) != self.weights:
            self.world.wrong.append(f"version {self.version} has two meanings")
        return {"w": Box(self.weights)}


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def one_token() -> dict[str, Any]:
    """The arrays of a micro-step; what is in them does not matter here."""
    one = np.zeros(1, np.int32)
    step = MicroStep(
        id="",
        group=0,
        ids=np.arange(2, dtype=np.int32),
        tin=np.zeros(2, np.int32),
        tout=np.ones(2, np.int32),
        pos=np.arange(2, dtype=np.int32),
        row=one,
        target=one + 1,
        path=one,
        weight=np.ones(1, np.float32),
        advantage=np.ones(1, np.float32),
        behaviour_logprob=np.full(1, -1.0, np.float32),
        version=one,
        path_execution=one,
    )
    return step.to_arrays()


NO_TOKENS = one_token()
