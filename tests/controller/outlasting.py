"""A gateway and a runner that may outlive controllers, step by step, for whole-controller tests: no process, no clock.

`Services.advance` does one thing that could happen next, drawn by `dice`: a harness starts, ends or is assessed, or the gateway
seals. Reports go to the controller that is there, else they are kept as the real ones keep them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gyre_hpc.controller.peers.inbound import Connected, Inbound, PeerId, Said
from gyre_hpc.records import SCORED_REASONS, Assessment, ClosingReason, ExecutionId
from gyre_hpc.transport import messages as msg
from gyre_hpc.transport.messages import PeerKind
from tests.controller import world

Key = tuple[ExecutionId, int]


@dataclass
class Runner:
    """Attempts by key, each with what was reported of it."""

    reports: dict[Key, list[msg.Message]] = field(default_factory=dict)
    cancelled: dict[Key, ClosingReason] = field(default_factory=dict)
    assessing: set[Key] = field(default_factory=set)

    def obey(self, message: msg.Message) -> None:
        match message:
            case msg.StartExecution(execution=id, attempt=attempt):
                if (id, attempt) not in self.reports:
                    others = [key for key in self.running() if key[0] == id and key not in self.cancelled]
                    assert not others, f"{(id, attempt)} is started while {others} run"
                    self.reports[id, attempt] = []
            case msg.CancelExecution(execution=id, attempt=attempt, reason=reason):
                if (id, attempt) in self.running():
                    self.cancelled.setdefault((id, attempt), reason)
            case msg.AssessExecution(execution=id, attempt=attempt):
                if (id, attempt) not in self.reports:
                    self.reports[id, attempt] = []
                    self.assessing.add((id, attempt))
            case msg.ForgetExecution(execution=id):
                for key in [key for key in self.reports if key[0] == id and key not in self.running()]:
                    del self.reports[key]

    def running(self) -> list[Key]:
        """Those whose harness has not ended."""
        ended = msg.ExecutionClosed
        return [
            key
            for key, said in self.reports.items()
            if key not in self.assessing and not any(isinstance(report, ended) for report in said)
        ]

    def steps(self) -> list[tuple[Key, msg.Message]]:
        """What could be reported next."""
        return [(key, step) for key in self.reports if (step := self._next(key)) is not None]

    def _next(self, key: Key) -> msg.Message | None:
        said = self.reports[key]
        kinds = [type(report) for report in said]
        if msg.ExecutionAssessed in kinds:
            return None
        if key in self.assessing:
            return self._assessed(key)
        if msg.ExecutionClosed in kinds:
            closed = next(report for report in said if isinstance(report, msg.ExecutionClosed))
            return self._assessed(key) if closed.reason in SCORED_REASONS else None
        if key in self.cancelled:
            return msg.ExecutionClosed(*key, self.cancelled[key], 1.0, None, "cancelled")
        if msg.ExecutionStarted in kinds:
            return msg.ExecutionClosed(*key, ClosingReason.COMPLETED, 1.0, 0, "")
        return msg.ExecutionStarted(*key)

    @staticmethod
    def _assessed(key: Key) -> msg.Message:
        return msg.ExecutionAssessed(*key, Assessment((key[0] % 5) / 4, True, f"attempt {key[1]}"))


@dataclass
class Gateway:
    """Attempts that are open, asked to close, or sealed."""

    open: set[Key] = field(default_factory=set)
    closing: list[Key] = field(default_factory=list)
    sealed: set[Key] = field(default_factory=set)

    def obey(self, message: msg.Message) -> None:
        match message:
            case msg.OpenExecution(execution=id, attempt=attempt):
                if (id, attempt) not in self.sealed:
                    self.open.add((id, attempt))
            case msg.CloseExecution(execution=id, attempt=attempt):
                self.closing.append((id, attempt))

    def seal(self, key: Key) -> msg.Message:
        self.closing.remove(key)
        known = key in self.open or key in self.sealed
        self.open.discard(key)
        if known:
            self.sealed.add(key)
        return msg.ExecutionSealed(*key, int(known), 0, 0, 10, 0, 100, 0.0, not known, False)


class Services:
    """Both, over all controllers of a run. `tell` is the link to the controller, None while there is none."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.runner: Runner | None = None
        self.gateway: Gateway | None = None
        self.tell: Callable[[PeerKind, msg.Message], None] | None = None
        self.started: list[Key] = []

    def advance(self) -> bool:
        """One thing happens; False when nothing can."""
        steps: list[Callable[[], None]] = []
        if self.runner is not None:
            steps += [lambda step=step: self._report(*step) for step in self.runner.steps()]  # type: ignore[misc]
        if self.gateway is not None:
            steps += [lambda key=key: self._seal(key) for key in self.gateway.closing]  # type: ignore[misc]
        if steps:
            self.dice.choice(steps)()
        return bool(steps)

    def _report(self, key: Key, report: msg.Message) -> None:
        assert self.runner is not None
        self.runner.reports[key].append(report)
        self._say(PeerKind.RUNNER, report)

    def _seal(self, key: Key) -> None:
        assert self.gateway is not None
        self._say(PeerKind.GATEWAY, self.gateway.seal(key))

    def _say(self, kind: PeerKind, message: msg.Message) -> None:
        if self.tell is not None:
            self.tell(kind, message)


class Inbox(asyncio.Queue[Inbound]):
    """An inbox that makes something happen when it is empty; a controller that waits for nothing is stuck."""

    def __init__(self, advance: Callable[[], bool]) -> None:
        super().__init__()
        self._advance = advance

    async def get(self) -> Inbound:
        while self.empty():
            assert self._advance(), "nothing can happen any more, and the run has not ended"
        return await super().get()


class OutlastingPeers(world.FakePeers):
    """Peers of one controller with the services of the run."""

    def __init__(self, watch: Callable[[PeerId, msg.Message], None], services: Services) -> None:
        super().__init__(watch)
        self.inbox: Any = Inbox(services.advance)
        self._outlasting = services
        alive = {PeerKind.GATEWAY: services.gateway, PeerKind.RUNNER: services.runner}
        self.survivors = {kind for kind, process in alive.items() if process is not None}
        services.tell = lambda kind, message: self.inbox.put_nowait(Said((kind, 0), message))
        for kind in sorted(self.survivors, key=lambda kind: services.dice.random()):
            self._reconnect(kind)

    def _reconnect(self, kind: PeerKind) -> None:
        """As the real processes do: hello, what is held, and what the runner has reported."""
        self.inbox.put_nowait(Connected((kind, 0), False))
        gateway, runner = self._outlasting.gateway, self._outlasting.runner
        if kind is PeerKind.GATEWAY and gateway is not None:
            self.inbox.put_nowait(Said((kind, 0), msg.Holding(tuple(gateway.open | gateway.sealed))))
        elif runner is not None:
            self.inbox.put_nowait(Said((kind, 0), msg.Holding(tuple(runner.reports))))
            for report in [report for said in runner.reports.values() for report in said]:
                self.inbox.put_nowait(Said((kind, 0), report))

    async def launch(self, kind: PeerKind, index: int) -> None:
        if kind is PeerKind.GATEWAY:
            self._outlasting.gateway = Gateway()
        elif kind is PeerKind.RUNNER:
            self._outlasting.runner = Runner()
        await super().launch(kind, index)

    def send(self, kind: PeerKind, index: int, message: msg.Message) -> None:
        services = self._outlasting
        if kind is PeerKind.RUNNER:
            self._watch((kind, index), message)
            assert services.runner is not None
            services.runner.obey(message)
            if isinstance(message, msg.StartExecution):
                services.started.append((message.execution, message.attempt))
        elif kind is PeerKind.GATEWAY and isinstance(message, msg.OpenExecution | msg.CloseExecution):
            self._watch((kind, index), message)
            assert services.gateway is not None
            services.gateway.obey(message)
        else:
            super().send(kind, index, message)
