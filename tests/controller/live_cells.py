"""The cells of a `World`: the real `Cell` of gyre_hpc.cells, fed by a queue as its leader feeds it, and the peers that they are.

An incarnation lives until `vanish`; what it says or does after that never happens. The controller may be lost as well: it
then hears nothing more, and all its cells end with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from gyre_hpc.cells.cell import Cell
from gyre_hpc.cells.memory_ledger import Available, MemoryLedger
from gyre_hpc.config import RunConfig
from gyre_hpc.controller.peers.inbound import Said, Told
from gyre_hpc.controller.peers.peers import Peer
from gyre_hpc.errors import GyreError
from gyre_hpc.layout import RunLayout
from gyre_hpc.records import CellId
from gyre_hpc.transport import messages as msg
from gyre_hpc.transport.messages import PeerKind
from tests.controller.test_switch_gaps import SteppingPeers
from tests.controller.training_world import Engine, Killed, Regions, Trainer, World
from tests.controller.world import Interrupt


class LiveCell:
    """One incarnation of a cell: the real `Cell` fed by a queue, as its leader feeds it."""

    def __init__(
        self, world: World, peers: CellPeers, config: RunConfig, index: int, incarnation: int
    ) -> None:
        self.world, self.peers, self.index, self.incarnation = world, peers, index, incarnation
        self.owner = f"cell-{index}"
        self.dead = False
        self.queue: asyncio.Queue[msg.Message] = asyncio.Queue()
        self.regions = Regions(world, self)
        parts: tuple[Any, ...] = (Engine(world, self), Trainer(world, self), self.regions)
        ledger = MemoryLedger(lambda: Available(1 << 40, "nothing"))
        self.cell = Cell(config, RunLayout(world.run), self.say, *parts, CellId(index), ledger)
        world.forget_regions(index)
        self.task = asyncio.create_task(self._work())

    async def _work(self) -> None:
        try:
            while True:
                message = await self.queue.get()
                self.world.at(self, f"hear {name_of(message)}")
                await self.cell.handle(message)
        except Killed:
            pass
        except GyreError as error:
            self.world.wrong.append(f"cell {self.index} ends by itself: {error}")
            self.peers.vanish(self.index, error.exit_code)

    def say(self, message: msg.Message) -> None:
        if isinstance(message, msg.StepDone):
            if self.dead:
                raise Killed
            self.peers.hear(self.index, message)
            return
        self.world.at(self, f"say {name_of(message)}")
        self.peers.hear(self.index, message)
        self.world.at(self, f"said {name_of(message)}")

    def die(self) -> None:
        """SIGKILL."""
        self.dead = True
        self.task.cancel()


def name_of(message: msg.Message) -> str:
    """The kind of a message, and what tells it apart from others of the kind."""
    match message:
        case msg.Claimed(micro_step=None):
            return "Claimed nothing"
        case msg.CellSwitched(role=role):
            return f"CellSwitched {role}"
        case msg.PublishWeights(checkpoint=True):
            return "PublishWeights with a checkpoint"
        case msg.StartBatch(weights=weights) if weights is not None:
            return "StartBatch with a snapshot"
        case _:
            return type(message).__name__


class CellPeers(SteppingPeers):
    """Peers whose cells are alive."""

    def __init__(self, world: World, config: RunConfig, *given: object) -> None:
        super().__init__(*given)
        self.world, self.config = world, config
        self.services.micro_steps = 4
        self.live: dict[int, LiveCell] = {}
        self.interrupted = False
        self.may_release: Callable[[], bool] = lambda: True
        world.peers = self

    def send(self, kind: PeerKind, index: int, message: msg.Message) -> None:
        super().send(kind, index, message)
        if isinstance(message, msg.Route) and self.may_release():
            held, self.services.held = self.services.held, []
            for who, answer in held:
                self.inbox.put_nowait(Said((who, 0), answer))

    async def launch(self, kind: PeerKind, index: int, launcher: object = None) -> None:
        await super().launch(kind, index, launcher)
        if kind is PeerKind.CELL:
            self.world.incarnations += 1
            self.live[index] = LiveCell(self.world, self, self.config, index, self.world.incarnations)

    def hear(self, index: int, message: msg.Message) -> None:
        """The controller has got the message."""
        self.inbox.put_nowait(Said((PeerKind.CELL, index), message))

    def vanish(self, cell: int, code: int = -9) -> None:
        self.live[cell].die()
        super().vanish(cell, code)

    def end(self) -> None:
        """The controller is gone, and all cells with it."""
        for cell in self.live.values():
            cell.die()

    def interrupt(self) -> None:
        """SIGKILL of the controller, which hears nothing more."""
        self.end()
        while not self.inbox.empty():
            self.inbox.get_nowait()
        self.interrupted = True
        self.inbox.put_nowait(Told("controller", "dies"))

    def dead(self) -> list[Peer]:
        if self.interrupted:
            raise Interrupt
        return super().dead()

    def _answers(self, kind: PeerKind, index: int, message: msg.Message) -> list[Any]:
        if kind is not PeerKind.CELL:
            return self.services.answer(message)
        if isinstance(message, msg.Shutdown):
            self.vanish(index, code=0)
        elif index in self.live and not self.live[index].dead:
            self.live[index].queue.put_nowait(message)
        return []


class Inline(ThreadPoolExecutor):
    """Does at once what is given to it: no thread, no chance."""

    def submit(self, work: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*given, **named))
        except (Exception, Killed) as error:  # noqa: BLE001
            future.set_exception(error)
        return future
