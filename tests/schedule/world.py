"""A random world around the schedule: it carries out decisions and answers with plausible events in random order.

The world keeps its own truth (who runs, who trains, which micro-steps are claimed) and checks what a caller would trip
over; the laws in `laws.py` look at every turn. Everything is drawn from one seed, so a failing world can be replayed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from gyre_hpc.records import CellId, ClosingReason, ExecutionId, GroupId, Version
from gyre_hpc.schedule.machine import decide, initial_state
from gyre_hpc.schedule.protocol import (
    AllCellsLost,
    AnyDecision,
    AnyEvent,
    BatchDone,
    CellAdded,
    CellKind,
    CellLost,
    CellReady,
    CellRoutable,
    CellUnroutable,
    CloseBatch,
    CoreRestored,
    Dispatch,
    EvaluationDue,
    Forecast,
    GroupDead,
    GroupReady,
    Launch,
    Launched,
    LaunchEvaluation,
    MicroSteps,
    Outcome,
    Publish,
    Published,
    RestoreCore,
    Role,
    Started,
    Stop,
    Terminated,
    Tick,
    ToRollout,
    ToTraining,
    Withdraw,
    WriteOff,
)
from gyre_hpc.schedule.settings import Settings
from gyre_hpc.schedule.state import Phase, State

GUESTS = (CellKind.SATELLITE, CellKind.ROLLOUT)
GUEST = 2000
"""Ids of guests are above this."""


@dataclass(frozen=True)
class Nature:
    """What may go wrong, and how groups turn out."""

    losses: int = 0
    """Cells that may be lost."""
    flickers: int = 0
    """Times a cell may become unroutable."""
    growth: int = 0
    """Cells that may be added beyond replacements."""
    guests: int = 0
    """Cells of other jobs that may come; each may vanish at any time, and never comes back under its id."""
    dead: float = 0.0
    """Share of groups with too few valid outcomes."""
    flat: float = 0.0
    """Share of groups with equal rewards: no micro-step."""
    noise: float = 0.0
    """Chance of a repeated or early event at each moment."""
    periodic: float = 0.0
    """Chance of a held-out evaluation after a publication."""
    checkpoint_every: int = 1
    fifo: bool = False
    """Executions end in the order of their ids."""
    forecasts: tuple[float, ...] = (0.0, 1.0, 5.0, 7.5)
    """What groups may be expected to take."""
    late_forecasts: float = 0.0
    """Chance that something else happens between a dispatch and its forecast."""


@dataclass
class Claims:
    """The caller's claims ledger of one batch."""

    batch: int
    groups: int = 0
    unclaimed: list[str] = field(default_factory=list)
    open: dict[str, CellId] = field(default_factory=dict)
    done: dict[str, CellId] = field(default_factory=dict)


@dataclass(frozen=True)
class Turned:
    """One turn of the machine, as the laws see it."""

    before: State
    event: AnyEvent
    after: State
    decisions: tuple[AnyDecision, ...]
    world: World

    def of(self, *kinds: type) -> list[AnyDecision]:
        return [decision for decision in self.decisions if isinstance(decision, kinds)]


Law = Callable[[Turned], None]
Action = tuple[float, Callable[[], None]]


class World:
    """Drives one run to its end."""

    def __init__(self, settings: Settings, nature: Nature, seed: int, laws: tuple[Law, ...] = ()) -> None:
        self.settings, self.nature, self.laws = settings, nature, laws
        self.rng = random.Random(seed)
        self.pace = {
            name: self.rng.choice((0.2, 1.0, 5.0)) for name in ("rollout", "switch", "train", "score")
        }
        self.state = initial_state(settings)
        self.journal: list[AnyEvent] = []
        self.decided: list[tuple[AnyDecision, ...]] = []
        self.soon: list[tuple[str, AnyEvent]] = [
            ("switch", CellReady(CellId(index), Role.ROLLOUT)) for index in range(len(settings.capacities))
        ]
        self.running: list[ExecutionId] = []
        self.ended: list[ExecutionId] = []
        self.evaluations: set[ExecutionId] = set()
        self.group_of: dict[ExecutionId, GroupId] = {}
        self.members: dict[GroupId, set[ExecutionId]] = {}
        self.sizes: dict[GroupId, int] = {}
        self.claims: Claims | None = None
        self.closing = self.recount = False
        self.checkpoint = Version(0)
        self.publications = 0
        self.losses, self.flickers, self.growth = nature.losses, nature.flickers, nature.growth
        self.guests = nature.guests
        self.capacity_lost = False
        self.staleness: list[tuple[Version, int]] = []

    # ---- the loop ---------------------------------------------------------------------------------------------

    def run(self, limit: int = 50_000) -> World:
        """To the Stop decision; AssertionError if nothing can happen any more."""
        self.tell(Started())
        if self.settings.evaluate_first:
            self.tell(EvaluationDue(Version(0), self.rng.randint(1, 6)))
        for _ in range(limit):
            if self.state.finished:
                return self
            actions = self._actions()
            assert actions, f"deadlock: {self.state}"
            weights = [weight for weight, _ in actions]
            self.rng.choices([act for _, act in actions], weights)[0]()
        raise AssertionError(f"no end after {limit} events: {self.state}")

    def tell(self, event: AnyEvent) -> None:
        """One turn of the machine, checked by the laws, and its decisions carried out."""
        before = self.state
        self.state, decisions = decide(before, event)
        self.journal.append(event)
        self.decided.append(decisions)
        if isinstance(event, CellLost | AllCellsLost | CellUnroutable):
            self.capacity_lost = True
        grown = self._sync_claims()
        for decision in decisions:
            self._carry_out(decision)
        turned = Turned(before, event, self.state, decisions, self)
        for law in self.laws:
            law(turned)
        if any(isinstance(decision, Dispatch) for decision in decisions):
            self._forecast(late=self.rng.random() < self.nature.late_forecasts)
        if any(isinstance(decision, Dispatch) for decision in decisions):
            self.capacity_lost = False
        if self.claims is not None and (grown or self.recount):
            self.recount = False
            self._report()
        self._evaluate(before)

    def _actions(self) -> list[Action]:
        actions: list[Action] = [
            (self.pace[kind], lambda item=item: self._deliver(item))
            for item in self.soon
            for kind in (item[0],)
        ]
        if self.running:
            actions.append((self.pace["rollout"] * len(self.running), self._terminate))
        actions += self._training_actions() + self._fault_actions()
        return actions

    def _deliver(self, item: tuple[str, AnyEvent]) -> None:
        self.soon.remove(item)
        self.tell(item[1])

    def _forecast(self, *, late: bool) -> None:
        """What the schedule waits for, as its state says."""
        waiting = self.state.unforecast
        if not waiting:
            return
        event = Forecast(tuple((group, self.rng.choice(self.nature.forecasts)) for group in waiting))
        if late:
            self.soon.append(("score", event))
        else:
            self.tell(event)

    # ---- decisions --------------------------------------------------------------------------------------------

    def _carry_out(self, decision: AnyDecision) -> None:
        match decision:
            case Dispatch():
                for group in decision.groups:
                    self.members[group.group] = set(group.executions)
                    self.group_of |= dict.fromkeys(group.executions, group.group)
            case Launch() | LaunchEvaluation():
                assert not set(decision.ids) & set(self.running), "launched twice"
                self.running += decision.ids
                if isinstance(decision, LaunchEvaluation):
                    self.evaluations |= set(decision.ids)
                self.soon.append(("rollout", Launched(decision.ids)))
            case Withdraw():
                self.running += [id_ for id_ in decision.ids if id_ not in self.running]
            case ToTraining():
                self.soon.append(("switch", CellReady(decision.cell, Role.TRAINING)))
            case ToRollout():
                self._flush(decision.cell)
                self.soon.append(("switch", CellReady(decision.cell, Role.ROLLOUT)))
            case CloseBatch():
                self._close()
            case Publish():
                self._publish(decision.version)
            case WriteOff():
                self.members.pop(decision.group, None)
                if self.rng.random() < self.nature.noise:
                    self.soon.append(("score", GroupReady(decision.group, 3)))
            case RestoreCore():
                self._restore(decision.cell)
            case Stop():
                assert self.state.finished

    def _close(self) -> None:
        batch = self.state.open_batch
        assert batch is not None and self.claims is not None and self.claims.groups == len(batch.groups)
        assert not self.claims.unclaimed and not self.claims.open, "closed over open claims"
        self.closing = True

    def _publish(self, version: Version) -> None:
        self.publications += 1
        if self.publications % self.nature.checkpoint_every == 0:
            self.checkpoint = version
        self.soon.append(("train", Published(version)))

    def _restore(self, cell: CellId) -> None:
        assert self.state.cell(cell) is not None, "a dead cell cannot be the core"
        self.soon = [item for item in self.soon if not isinstance(item[1], CoreRestored)]
        self.soon.append(("switch", CoreRestored(self.checkpoint)))

    # ---- rollout ----------------------------------------------------------------------------------------------

    def _terminate(self) -> None:
        index = (
            self.running.index(min(self.running))
            if self.nature.fifo
            else self.rng.randrange(len(self.running))
        )
        id_ = self.running.pop(index)
        reason = self.rng.choice(
            (ClosingReason.COMPLETED, ClosingReason.HARNESS_TIMEOUT, ClosingReason.FAILED)
        )
        self._end(id_, reason)
        if self.rng.random() < self.nature.noise:
            self.tell(Terminated(id_, ClosingReason.INFRASTRUCTURE))

    def _end(self, id_: ExecutionId, reason: ClosingReason) -> None:
        if id_ not in self.evaluations:
            self.ended.append(id_)
        self.tell(Terminated(id_, reason))
        group = self.group_of.get(id_)
        if group is None or group not in self.members:
            return
        if self.settings.oversample:
            self.tell(Outcome(id_, valid=self.rng.random() < 0.9))
        if group not in self.members:
            return
        self.members[group].discard(id_)
        if not self.members[group]:
            self._score(group)

    def _score(self, group: GroupId) -> None:
        fate = self.rng.random()
        if fate < self.nature.dead:
            self.soon.append(("score", GroupDead(group, "fewer than 2 valid outcomes")))
            return
        self.sizes[group] = 0 if fate < self.nature.dead + self.nature.flat else self.rng.randint(1, 5)
        ready = GroupReady(group, self.sizes[group])
        if self.nature.fifo:
            self.tell(ready)
        else:
            self.soon.append(("score", ready))

    # ---- training ---------------------------------------------------------------------------------------------

    def _sync_claims(self) -> bool:
        """Follow the open batch; True if groups were added, so that the schedule must hear of it."""
        batch = self.state.open_batch
        if batch is None:
            self.claims, self.closing = None, False
            return False
        if self.claims is None or self.claims.batch != batch.index:
            self.claims, self.closing = Claims(batch.index), False
        fresh = batch.groups[self.claims.groups :]
        self.claims.groups = len(batch.groups)
        self.claims.unclaimed += [f"{group}.{i}" for group in fresh for i in range(self.sizes[group])]
        return bool(fresh)

    def _evaluate(self, before: State) -> None:
        if (
            self.state.phase is Phase.ENDING
            and before.phase is not Phase.ENDING
            and self.settings.evaluate_last
        ):
            self.tell(EvaluationDue(self.state.published, self.rng.randint(1, 6)))
        elif self.state.published > before.published and self.rng.random() < self.nature.periodic:
            self.tell(EvaluationDue(self.state.published, self.rng.randint(1, 4)))

    def _report(self) -> None:
        assert self.claims is not None
        report = self._counts()
        self.tell(report)
        if self.rng.random() < self.nature.noise:
            self.soon.append(
                ("train", replace(report, unclaimed=0, open=0, groups=len(self.state.groups) + 1))
            )

    def _counts(self) -> MicroSteps:
        assert self.claims is not None
        claims = self.claims
        return MicroSteps(len(claims.unclaimed), len(claims.open), claims.batch, claims.groups)

    def _training_actions(self) -> list[Action]:
        claims, trainers = self.claims, self.state.trainers
        if claims is None or self.state.restoring:
            return []
        if self.closing:
            return [(self.pace["train"], self._commit)] if not claims.done or self._core_trains() else []
        actions: list[Action] = []
        busy = set(claims.open.values())
        idle = [cell for cell in trainers if cell not in busy]
        if claims.unclaimed and idle:
            actions.append((self.pace["train"] * len(idle), lambda: self._claim(self.rng.choice(idle))))
        if claims.open:
            actions.append((self.pace["train"] * len(claims.open), self._step_done))
        return actions

    def _core_trains(self) -> bool:
        return self.state.core in self.state.trainers

    def _claim(self, cell: CellId) -> None:
        assert self.claims is not None
        self.claims.open[self.claims.unclaimed.pop(0)] = cell
        self._report()

    def _step_done(self) -> None:
        assert self.claims is not None
        step = self.rng.choice(list(self.claims.open))
        self.claims.done[step] = self.claims.open.pop(step)
        self._report()

    def _commit(self) -> None:
        assert self.claims is not None and self.state.open_batch is not None
        groups = [self.state.groups[id_] for id_ in self.state.open_batch.groups]
        self.staleness += [(self.state.version, self.state.staleness(group)) for group in groups]
        assert len(self.claims.done) == sum(self.sizes[group.id] for group in groups), "micro-steps lost"
        self.closing = False
        self.tell(BatchDone(stepped=bool(self.claims.done)))

    def _flush(self, cell: CellId) -> None:
        """The cell leaves training: its open claims return, its done ones are in the core's gradient."""
        if self.claims is not None and self._return_claims(cell, with_done=False):
            self.recount = True
        if self.claims is not None and self.state.core is not None:
            mine = [step for step, owner in self.claims.done.items() if owner == cell]
            self.claims.done |= dict.fromkeys(mine, self.state.core)

    def _return_claims(self, cell: CellId, *, with_done: bool) -> bool:
        assert self.claims is not None
        holders = (self.claims.open, self.claims.done) if with_done else (self.claims.open,)
        returned = [(held, step) for held in holders for step, owner in held.items() if owner == cell]
        for held, step in returned:
            del held[step]
            self.claims.unclaimed.append(step)
        return bool(returned)

    # ---- faults -----------------------------------------------------------------------------------------------

    def _fault_actions(self) -> list[Action]:
        cells = self.state.cells
        actions: list[Action] = []
        unroutable = [cell.id for cell in cells if not cell.routable]
        if unroutable:
            actions.append((0.3, lambda: self._recover(self.rng.choice(unroutable))))
        guests = [cell.id for cell in cells if cell.kind in GUESTS]
        if not any(cell.kind is CellKind.OWN for cell in cells):
            actions.append((1.0, self._add))
        elif self.growth:
            actions.append((0.02, self._grow))
        if self.guests:
            actions.append((0.1, self._welcome))
        if guests:
            actions.append((0.03, lambda: self._lose(self.rng.choice(guests))))
        if self.losses and cells:
            actions.append((0.05, lambda: self._lose(self.rng.choice(cells).id)))
            actions.append((0.005, self._lose_all))
        if self.flickers and cells:
            actions.append((0.05, lambda: self._flicker(self.rng.choice(cells).id)))
        if self.nature.noise and self.rng.random() < self.nature.noise and actions_exist(self):
            actions.append((0.5, self._noise))
        return actions

    def _lose(self, cell: CellId) -> None:
        lost = self.state.cell(cell)
        assert lost is not None
        own = lost.kind not in GUESTS
        self.losses -= own
        self.soon = [item for item in self.soon if getattr(item[1], "cell", None) != cell]
        was_core = cell == self.state.core
        returned = self.claims is not None and not was_core and self._return_claims(cell, with_done=True)
        self.closing = self.closing and not returned
        if was_core:
            self.claims, self.closing = None, False
            self.soon = [item for item in self.soon if not isinstance(item[1], CoreRestored)]
        self.tell(CellLost(cell))
        if returned and self.claims is not None:
            self._report()
        if own and self.rng.random() < 0.6:
            self.growth += 1

    def _lose_all(self) -> None:
        """The controller ended and resumes; the cells ended with it."""
        self.losses -= 1
        self.soon = [
            item
            for item in self.soon
            if not isinstance(item[1], CellReady | CoreRestored | Published | Forecast)
        ]
        self.claims, self.closing = None, False
        self.growth += sum(cell.kind not in GUESTS for cell in self.state.cells)
        self.tell(AllCellsLost())
        self._forecast(late=False)

    def _add(self) -> None:
        live = {cell.id for cell in self.state.cells}
        cell = CellId(next(index for index in range(1000) if index not in live))
        known = cell < len(self.state.settings.capacities)
        kind = self.state.settings.kind_of(cell) if known else CellKind.OWN
        self.tell(CellAdded(cell, self.rng.randint(1, 8), kind))
        if self.rng.random() < 0.5:
            self.tell(CellReady(cell, Role.ROLLOUT))

    def _welcome(self) -> None:
        """A guest, under an id that no cell has had."""
        self.guests -= 1
        kind = self.rng.choice((CellKind.SATELLITE, CellKind.ROLLOUT))
        cell = CellId(GUEST + self.nature.guests - self.guests)
        self.tell(CellAdded(cell, self.rng.randint(1, 8), kind))

    def _grow(self) -> None:
        self.growth -= 1
        self._add()

    def _flicker(self, cell: CellId) -> None:
        self.flickers -= 1
        self.tell(CellUnroutable(cell, "suspect"))

    def _recover(self, cell: CellId) -> None:
        self.tell(CellRoutable(cell))

    def _noise(self) -> None:
        self.tell(self.rng.choice(_noise_events(self)))


def actions_exist(world: World) -> bool:
    """Noise alone must not hide a deadlock."""
    return bool(world.soon or world.running or world._training_actions())


def _noise_events(world: World) -> list[AnyEvent]:
    """Events that must change nothing, and a queued execution that ends before its launch."""
    state = world.state
    events: list[AnyEvent] = [Tick(1.0), Published(state.published), CellLost(CellId(999))]
    events += [Terminated(id_, ClosingReason.COMPLETED) for id_ in world.ended[-3:]]
    events += [GroupReady(group.id, 1) for group in state.groups.values() if group.rank >= 0][:2]
    told = [group for group in state.groups if group not in state.unforecast]
    events += [Forecast(tuple((group, 3.0) for group in told))]
    return events
