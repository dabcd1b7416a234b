"""Batches: ready groups fill slots in order; a batch closes when each slot is consumed or can never be.

A slot is not bound at dispatch. The next group is the one with the oldest stamp, then the earliest ready; a slot is kept
free for a pending group that the next burst would find too stale, because writing off the slow ones would favour short
executions. A batch closes short only when no live group is left to fill it. The join window closes when nothing is
unclaimed and the batch cannot grow, and re-opens if claims return; so does a closed batch.
"""

from __future__ import annotations

from msgspec.structs import replace

from gyre_hpc.errors import IllegalTransition
from gyre_hpc.records import GroupId, Version
from gyre_hpc.schedule.ledger import await_no_forecast, withdraw
from gyre_hpc.schedule.policies import policy_of
from gyre_hpc.schedule.protocol import (
    BatchDone,
    CloseBatch,
    CloseJoinWindow,
    GroupDead,
    GroupReady,
    MicroSteps,
    WriteOff,
)
from gyre_hpc.schedule.state import Batch, Cell, CellRole, Committed, Group, GroupStatus, Phase, State
from gyre_hpc.schedule.turn import Turn

LIVE = (GroupStatus.PENDING, GroupStatus.READY)


def group_ready(turn: Turn, event: GroupReady) -> None:
    """A pending group may be taken; repeats and written-off groups change nothing."""
    group = _closed_group(turn.state, event.group)
    if group is None or group.status is not GroupStatus.PENDING:
        return
    rank = turn.state.next_rank
    turn.set_groups(replace(group, status=GroupStatus.READY, micro_steps=event.micro_steps, rank=rank))
    turn.update(next_rank=rank + 1)
    await_no_forecast(turn, group.id)
    if event.micro_steps == 0:
        _blame(turn, f"group {event.group}: equal rewards or no accepted target")


def group_dead(turn: Turn, event: GroupDead) -> None:
    """A group that cannot be trained uses no slot. Raises IllegalTransition once a batch holds it."""
    group = _closed_group(turn.state, event.group)
    if group is None:
        return
    if group.status not in LIVE:
        raise IllegalTransition(
            f"group {group.id}: {group.status} -> dead", fix="report a group dead before a batch takes it"
        )
    write_off(turn, group, event.reason)


def write_off(turn: Turn, group: Group, reason: str) -> None:
    """The group leaves the ledger; what still runs of it is withdrawn."""
    withdraw(turn, group)
    await_no_forecast(turn, group.id)
    turn.drop_groups((group,))
    turn.emit(WriteOff(group.id, reason))
    _blame(turn, f"group {group.id}: {reason}")


def write_off_stale(turn: Turn) -> None:
    """Write off live groups whose consumption at the present step would exceed `max_staleness`."""
    limit, oldest = turn.state.settings.staleness_limit, turn.state.oldest_stamp
    if oldest is None or turn.state.age(oldest) <= limit:
        return
    for group in turn.state.with_status(*LIVE):
        steps = turn.state.staleness(group)
        if steps > limit:
            write_off(turn, group, f"{steps} steps old, schedule.max_staleness={limit}")


def _closed_group(state: State, id_: GroupId) -> Group | None:
    """The group, None if it was written off. Raises IllegalTransition if it is unknown or executions still run."""
    group = state.groups.get(id_)
    if group is None:
        if not 0 <= id_ < state.next_group:
            raise IllegalTransition(f"group {id_}: never dispatched", fix="report only dispatched groups")
        return None
    running = [execution for execution in group.executions if execution in state.executions]
    if running:
        raise IllegalTransition(
            f"group {id_}: {group.status} -> final, but executions {running} have not terminated",
            fix="report Terminated for every execution before the group's outcome",
        )
    return group


def _blame(turn: Turn, reason: str) -> None:
    turn.update(void_reasons=(*turn.state.void_reasons, reason))


def micro_steps(turn: Turn, event: MicroSteps) -> None:
    """The caller's claims ledger. Returned claims re-open the window, and the batch if it was closed."""
    batch = turn.state.open_batch
    if batch is None or turn.state.restoring or _overtaken(event, batch):
        return
    if min(event.unclaimed, event.open) < 0 or event.unclaimed + event.open > batch.micro_steps:
        raise IllegalTransition(
            f"batch {batch.index}: {event.unclaimed} unclaimed + {event.open} open micro-steps,"
            f" but its groups have {batch.micro_steps}",
            fix="count the micro-steps of exactly the groups in state.open_batch.groups",
        )
    changed = turn.set_batch(batch, unclaimed=event.unclaimed, open=event.open)
    turn.set_batch(
        changed,
        window_open=batch.window_open or event.unclaimed > 0,
        closed=batch.closed and changed.idle,
    )


def _overtaken(event: MicroSteps, batch: Batch) -> bool:
    other_batch = event.batch is not None and event.batch != batch.index
    return other_batch or (event.groups is not None and event.groups != len(batch.groups))


def batch_done(turn: Turn, event: BatchDone) -> None:
    """The batch is committed: its groups are consumed, and if it stepped the version rises."""
    state = turn.state
    batch = state.open_batch
    if batch is None or not batch.closed:
        if state.restoring:
            return
        raise IllegalTransition(
            f"batch {batch.index if batch else None}: open -> committed, but no close_batch is awaited",
            fix="report BatchDone once per CloseBatch, before returned claims re-open the batch",
        )
    version = Version(state.version + 1) if event.stepped else None
    done = Committed(batch.index, version, batch.groups)
    turn.set_status(tuple(state.groups[id_] for id_ in batch.groups), GroupStatus.CONSUMED)
    turn.update(
        version=state.version if version is None else version,
        burst=replace(state.burst, committed=(*state.burst.committed, done)),
        open_batch=None,
    )
    write_off_stale(turn)


def open_batch(turn: Turn) -> Batch:
    """Open the next batch of the burst."""
    batch = Batch(turn.state.next_batch, turn.state.settings.batch_groups)
    turn.update(open_batch=batch, next_batch=batch.index + 1)
    return batch


def void_batch(turn: Turn) -> None:
    """The open batch never happened: its groups are ready again."""
    batch = turn.state.open_batch
    if batch is None:
        return
    turn.set_status(tuple(turn.state.groups[id_] for id_ in batch.groups), GroupStatus.READY)
    turn.update(open_batch=None)


def fill(turn: Turn, batch: Batch) -> Batch:
    """Take ready groups in order while slots are free."""
    groups = takeable(turn.state, batch)
    if not groups:
        return batch
    turn.set_status(groups, GroupStatus.TAKEN)
    fresh = sum([group.micro_steps for group in groups])
    return turn.set_batch(
        batch,
        groups=batch.groups + tuple([group.id for group in groups]),
        micro_steps=batch.micro_steps + fresh,
        unclaimed=batch.unclaimed + fresh,
        window_open=True,
    )


def takeable(state: State, batch: Batch) -> tuple[Group, ...]:
    """The ready groups that take the next slots, in order: as many as need not wait for a pending group's last chance."""
    if not state.ready or not policy_of(state).may_take(state, batch):
        return ()
    taken: list[Group] = []
    spare = slots_left(state, batch) - _pending_last_chances(state)
    for id_ in state.ready[: batch.slots - len(batch.groups)]:
        group = state.groups[id_]
        if len(taken) >= spare and not _last_chance(state, group.version):
            break
        taken.append(group)
    return tuple(taken)


def slots_left(state: State, batch: Batch) -> int:
    """Free slots of this batch and the later ones of the burst."""
    later = state.burst.planned - len(state.burst.committed) - 1
    return batch.slots - len(batch.groups) + later * batch.slots


def _last_chance(state: State, stamp: Version) -> bool:
    """Whether the next burst would find groups with this stamp too stale."""
    ahead = state.burst.planned - len(state.burst.committed)
    return state.age(stamp) + ahead > state.settings.staleness_limit


def _pending_last_chances(state: State) -> int:
    return sum([count for stamp, count in state.pending.items() if _last_chance(state, stamp)])


def can_grow(state: State, batch: Batch) -> bool:
    """Whether another group may still take a slot."""
    return len(batch.groups) < batch.slots and any_live(state)


def any_live(state: State) -> bool:
    """Whether a group may still take a slot of some batch."""
    return bool(state.pending or state.ready)


def close(turn: Turn, batch: Batch) -> None:
    """Close the window, then the batch, as far as the claims allow. `batch` cannot grow."""
    if batch.window_open and batch.unclaimed == 0:
        batch = turn.set_batch(batch, window_open=False)
        turn.emit(CloseJoinWindow())
    if batch.idle and not batch.closed and (batch.micro_steps == 0 or core_trains(turn.state)):
        turn.set_batch(batch, closed=True)
        turn.emit(CloseBatch())


def core_trains(state: State) -> bool:
    """Whether the core can step."""
    core = core_cell(state)
    return core is not None and core.role is CellRole.TRAINING


def core_cell(state: State) -> Cell | None:
    """The live core."""
    return None if state.core is None else state.cell(state.core)


def supply(state: State) -> int:
    """Micro-steps a further cell could take in this burst; 1 if the core is only needed to step."""
    batch = state.open_batch
    if state.phase is not Phase.BURST or state.restoring or batch is None:
        return 0
    later = 0
    if state.burst.planned - len(state.burst.committed) > 1 and policy_of(state).may_take(state, batch):
        later = sum([state.groups[id_].micro_steps for id_ in state.ready])
    waits_for_core = (
        batch.idle and batch.micro_steps > 0 and not core_trains(state) and not can_grow(state, batch)
    )
    return batch.unclaimed + later + waits_for_core
