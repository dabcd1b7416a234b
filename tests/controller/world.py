"""A whole controller among peers that answer at once and do nothing: no process, no socket, no clock.

Cells train two micro-steps per group, executions complete with scores by their id, shards are never written to disk. What
a test wants to see or to disturb happens in `watch`, which is called with every message before it is answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from gyre_hpc.config import ModelConfig, RunConfig
from gyre_hpc.controller.context import RunContext
from gyre_hpc.controller.controller import Controller
from gyre_hpc.controller.journal.history import read_history
from gyre_hpc.controller.journal.journal import Journal
from gyre_hpc.controller.monitor.progress import Progress
from gyre_hpc.controller.peers.inbound import Connected, Exited, Inbound, PeerId, Said
from gyre_hpc.controller.peers.peers import Peer
from gyre_hpc.controller.train import schedule_settings
from gyre_hpc.layout import RunLayout
from gyre_hpc.records import Assessment, ClosingReason, ExecutionId, GroupId, Version
from gyre_hpc.report.metrics import MetricsWriter
from gyre_hpc.schedule.protocol import Role
from gyre_hpc.transport import messages as msg
from gyre_hpc.transport.messages import PeerKind

MICRO_STEPS = 2


class Interrupt(Exception):
    """The controller dies here, as by kill -9."""


def small_run(steps: int, *, heldout: int = 0) -> RunConfig:
    """Three cells, two groups of four executions per batch."""
    config = RunConfig(model=ModelConfig(path="unused"))
    config.schedule.steps, config.schedule.batch_groups, config.schedule.executions_per_group = steps, 2, 4
    config.cluster.cells, config.engine.capacity = 3, 3
    config.tasks.heldout, config.tasks.evaluate_every = heldout, 2 if heldout else 0
    return config


def region(kind: msg.RegionKind, name: str, version: int) -> msg.Manifest:
    return msg.Manifest(kind, name, version, "", "owner", "127.0.0.1:1", ())


class Cells:
    """All cells: each does what it is told and remembers its micro-steps of the open batch."""

    def __init__(self) -> None:
        self.done: dict[int, list[str]] = {}

    def answer(self, cell: int, message: msg.Message) -> list[msg.Message]:
        match message:
            case msg.BecomeEngine(version=version, serial=serial):
                return [msg.CellSwitched(Role.ROLLOUT, version, f"http://cell-{cell}", {}, serial)]
            case msg.BecomeTrainer(weights=weights, version=version, serial=serial):
                held = version if weights is None else Version(weights.version)
                return [msg.CellSwitched(Role.TRAINING, held, "", {}, serial)]
            case msg.StartBatch(batch=batch):
                self.done[cell] = []
                return [msg.Claim(batch)]
            case msg.WorkReady(batch=batch):
                return [msg.Claim(batch)]
            case msg.Claimed(batch=batch, micro_step=ref) if ref is not None:
                self.done[cell].append(ref.id)
                return [msg.MicroStepDone(batch, ref.id, 0.0, {}), msg.Claim(batch)]
            case msg.FlushContribution(batch=batch):
                names = tuple(self.done.pop(cell, ()))
                gradient = region(msg.RegionKind.GRADIENT, f"{batch}.{cell}", 0) if names else None
                return [msg.Contribution(batch, names, gradient)]
            case msg.CommitBatch(batch=batch, version=version):
                return [msg.BatchCommitted(batch, version, {})]
            case msg.PublishWeights(version=version, checkpoint=checkpoint):
                folder = f"checkpoints/v{version:06d}" if checkpoint else ""
                return [msg.WeightsPublished(version, self.weights(version), folder)]
            case msg.RestoreTrainer(version=version):
                return [msg.TrainerRestored(version, self.weights(version))]
        return []

    @staticmethod
    def weights(version: int) -> msg.Manifest:
        return region(msg.RegionKind.WEIGHTS, "policy", version)


class Services:
    """Gateway, runner and processor."""

    micro_steps = MICRO_STEPS
    """Of each group."""

    def __init__(self) -> None:
        self.expected: dict[GroupId, msg.ExpectGroup] = {}
        self.outcomes: dict[ExecutionId, msg.ExecutionOutcome] = {}
        self.at_rest: set[ExecutionId] = set()

    def answer(self, message: msg.Message) -> list[tuple[PeerKind, msg.Message]]:
        match message:
            case msg.Unroute(cell=cell, serial=serial):
                return [(PeerKind.GATEWAY, msg.Unrouted(cell, 0, serial))]
            case msg.CloseExecution(execution=id, attempt=attempt):
                sealed = msg.ExecutionSealed(id, attempt, 1, 0, 0, 10, 0, 100, 0.0, False, False)
                return [(PeerKind.GATEWAY, sealed)]
            case msg.StartExecution(execution=id, attempt=attempt):
                closed = msg.ExecutionClosed(id, attempt, ClosingReason.COMPLETED, 1.0, 0, "")
                reports = [msg.ExecutionStarted(id, attempt), closed, self._assessed(id, attempt)]
                return [(PeerKind.RUNNER, report) for report in reports]
            case msg.AssessExecution(execution=id, attempt=attempt):
                return [(PeerKind.RUNNER, self._assessed(id, attempt))]
            case msg.ExpectGroup(group=group):
                self.expected[group] = message
                return self._processed(group)
            case msg.ExecutionOutcome(execution=id, group=of):
                self.outcomes[id] = message
                return [] if of is None else self._processed(of)
            case msg.DropGroup(group=group):
                self.expected.pop(group, None)
            case msg.Seal():
                ids = tuple(id for id in self.outcomes if id not in self.at_rest)
                self.at_rest.update(ids)
                return [(PeerKind.PROCESSOR, msg.ShardSealed("shard", ids))]
        return []

    @staticmethod
    def _assessed(id: ExecutionId, attempt: int) -> msg.Message:
        return msg.ExecutionAssessed(id, attempt, Assessment((id % 5) / 4, True, "ok"))

    def _processed(self, group: GroupId) -> list[tuple[PeerKind, msg.Message]]:
        expect = self.expected.get(group)
        if expect is None or not set(expect.executions) <= set(self.outcomes):
            return []
        refs = tuple(
            msg.MicroStepRef(
                f"{group}.{index}",
                group,
                expect.version,
                10,
                5,
                region(msg.RegionKind.MICRO_STEPS, f"{group}.{index}", expect.version),
            )
            for index in range(self.micro_steps)
        )
        rewards = tuple((id % 5) / 4 for id in expect.executions)
        report = msg.GroupProcessed(group, len(rewards), rewards, refs, 10, 2, 0, "")
        return [(PeerKind.PROCESSOR, report)]


class FakePeers:
    """In the place of `Peers`."""

    def __init__(self, watch: Callable[[PeerId, msg.Message], None]) -> None:
        self.inbox: asyncio.Queue[Inbound] = asyncio.Queue()
        self.survivors: set[PeerKind] = set()
        self.peers: dict[PeerId, Peer] = {}
        self.hosts: dict[Any, Any] = {}
        self.cells, self.services, self._watch = Cells(), Services(), watch
        self.nodes, self.happened = self, 0

    def stir(self) -> None: ...

    def start_accepting(self) -> None: ...

    def check_liveness(self) -> None: ...

    def dead(self) -> list[Peer]:
        return []

    def address(self, kind: PeerKind, index: int = 0) -> str:
        return "http://gateway"

    def fence(self, kind: PeerKind, index: int) -> None: ...

    def forget(self, kind: PeerKind, index: int) -> None:
        self.peers.pop((kind, index), None)

    def kill(self, kind: PeerKind, index: int) -> None:
        if (kind, index) in self.peers:
            self.vanish(index)

    def vanish(self, cell: int, code: int = -9) -> None:
        """The process of the cell ends, once; it answers nothing more."""
        peer = self.peers[PeerKind.CELL, cell]
        if peer.dead:
            return
        peer.dead = True
        self.inbox.put_nowait(Exited((PeerKind.CELL, cell), 1, code))

    async def launch(self, kind: PeerKind, index: int, launcher: object = None) -> None:
        self.peers[kind, index] = Peer(kind, index)
        self.inbox.put_nowait(Connected((kind, index), False))

    async def launch_first(self, kind: PeerKind, index: int) -> None:
        await self.launch(kind, index)

    async def shut_down(self, reason: str, grace_s: float) -> None: ...

    def send(self, kind: PeerKind, index: int, message: msg.Message) -> None:
        self._watch((kind, index), message)
        for who, answer in self._answers(kind, index, message):
            self.inbox.put_nowait(Said((who, index), answer))

    def _answers(
        self, kind: PeerKind, index: int, message: msg.Message
    ) -> list[tuple[PeerKind, msg.Message]]:
        if kind is not PeerKind.CELL:
            return self.services.answer(message)
        peer = self.peers.get((kind, index))
        if peer is None or peer.dead:
            return []
        if isinstance(message, msg.Shutdown):
            self.vanish(index, code=0)
        return [(kind, answer) for answer in self.cells.answer(index, message)]


def make_controller(
    run: Path,
    config: RunConfig,
    epoch: int,
    watch: Callable[[Controller, msg.Message], None],
    make_peers: Callable[[Callable[[PeerId, msg.Message], None]], FakePeers] | None = None,
) -> Controller:
    """The controller of one epoch in the folder `run`, resumed from what lies there."""
    layout = RunLayout(run)
    layout.root.mkdir(exist_ok=True)
    history = read_history(layout.journal, schedule_settings(config))
    context = RunContext(
        config=config,
        layout=layout,
        secret=b"",
        epoch=epoch,
        journal=Journal(layout.journal, epoch),
        metrics=MetricsWriter(layout.metrics),
        progress=Progress(config.schedule.steps, Console(file=StringIO())),
    )
    controller: Controller
    peers = (make_peers or FakePeers)(lambda peer, message: watch(controller, message))
    controller = Controller(context, cast(Any, peers), history)
    return controller


def nothing(controller: Controller, message: msg.Message) -> None:
    """Nobody watches."""
