"""Bursts: batches between two dispatches; one publication at the end, or none if no step was taken.

A burst runs `planned` batches, fewer if groups run out. Its end, in this order: end_burst, dispatch, a fresh batch with
the groups that are ready already, then the return of training cells (who stays depends on that batch and on w after the
dispatch). A burst without a step is void: no publication, the same dispatch; too many in a row stop the run. After the
last publication nothing is dispatched: held-out executions run alone, then the run stops.
"""

from __future__ import annotations

from msgspec.structs import replace

from gyre_hpc.errors import IllegalTransition
from gyre_hpc.records import Version
from gyre_hpc.schedule.batches import any_live, can_grow, close, fill, open_batch, supply
from gyre_hpc.schedule.cells import recall
from gyre_hpc.schedule.ledger import dispatch, withdraw
from gyre_hpc.schedule.policies import Turning, policy_of
from gyre_hpc.schedule.policies.base import in_training
from gyre_hpc.schedule.protocol import CoreRestored, EndBurst, Publish, Published, Stop
from gyre_hpc.schedule.state import Burst, GroupStatus, Phase, State
from gyre_hpc.schedule.turn import Turn


def begin(turn: Turn) -> None:
    """The first dispatch: once the first evaluation has run alone and cells bound for training are under way."""
    state = turn.state
    if state.phase is not Phase.WAITING or state.evaluations or state.reserved:
        return
    if state.evaluated_first or not state.settings.evaluate_first:
        _next_burst(turn)


def _next_burst(turn: Turn) -> None:
    dispatch(turn)
    state = turn.state
    planned = min(state.settings.steps_per_burst, state.settings.steps - state.steps_done)
    turn.update(phase=Phase.BURST, burst=Burst(state.burst.index + 1, planned), evaluated_last=False)


def progress(turn: Turn) -> None:
    """Move the burst as far as it goes without a further event."""
    while turn.state.phase is Phase.BURST and not turn.state.restoring:
        batch = turn.state.open_batch
        if batch is None:
            if not _batch_wanted(turn.state):
                _finish(turn)
                continue
            batch = open_batch(turn)
        batch = fill(turn, batch)
        if can_grow(turn.state, batch):
            return
        if batch.groups:
            close(turn, batch)
            return
        turn.update(open_batch=None)


def _batch_wanted(state: State) -> bool:
    """Whether one more batch is planned and some group could fill it."""
    return len(state.burst.committed) < state.burst.planned and any_live(state)


def _finish(turn: Turn) -> None:
    if turn.state.burst.steps:
        turn.update(phase=Phase.PUBLISHING)
        turn.emit(Publish(turn.state.version))
    else:
        _end_void(turn)


def published(turn: Turn, event: Published) -> None:
    """The awaited version is served: the burst ends. Repeats and versions of a lost core change nothing."""
    state = turn.state
    if event.version > state.version:
        raise IllegalTransition(
            f"version {event.version}: published, but only {state.version} steps were taken",
            fix="report Published with the version of the Publish decision",
        )
    if state.phase is not Phase.PUBLISHING or state.restoring or event.version != state.version:
        return
    turn.update(published=event.version, void_bursts=0, void_reasons=())
    _end(turn, event.version)
    if turn.state.steps_done >= turn.state.settings.steps:
        _wind_up(turn)
        return
    _next_burst(turn)
    progress(turn)
    _return(turn, Turning.PUBLISHED)


def _end(turn: Turn, version: Version | None) -> None:
    """Drop what the burst consumed."""
    turn.emit(EndBurst(version))
    turn.drop_groups(turn.state.with_status(GroupStatus.CONSUMED))
    turn.update(burst=replace(turn.state.burst, committed=()))


def _end_void(turn: Turn) -> None:
    turn.update(void_bursts=turn.state.void_bursts + 1)
    _end(turn, None)
    state = turn.state
    if state.void_bursts >= state.settings.max_void_bursts:
        reasons = "; ".join(state.void_reasons) or "no group became ready"
        stop(turn, f"{state.void_bursts} bursts in a row without a step: {reasons}")
        return
    _next_burst(turn)
    _return(turn, Turning.VOID)


def _wind_up(turn: Turn) -> None:
    """All steps are published; no group is left, because a dispatch never exceeds what the steps need."""
    turn.update(phase=Phase.ENDING)
    finish(turn)
    if not turn.state.finished:
        _return(turn, Turning.LAST)


def _return(turn: Turn, turning: Turning) -> None:
    state = turn.state
    kept = {cell.id for cell in policy_of(state).stays(state, turning, supply(state))}
    recall(turn, tuple(cell for cell in in_training(state) if cell.id not in kept))
    turn.update(short=False)


def finish(turn: Turn) -> None:
    """Stop once the last executions have ended and the last evaluation has run."""
    state = turn.state
    if state.phase is not Phase.ENDING or state.restoring or state.waterlevel or state.evaluations:
        return
    if state.evaluated_last or not state.settings.evaluate_last:
        stop(turn, "")


def stop(turn: Turn, reason: str) -> None:
    """End the run; what still runs is withdrawn."""
    withdraw(turn, *turn.state.with_status(GroupStatus.PENDING))
    turn.update(phase=Phase.STOPPED, stop_reason=reason)
    turn.emit(Stop(reason))


def core_restored(turn: Turn, event: CoreRestored) -> None:
    """Steps above the checkpoint are undone; groups this burst consumed in them are ready again."""
    state = turn.state
    if not state.restoring or not 0 <= event.version <= state.version or event.version in state.undone:
        raise IllegalTransition(
            f"core: {'restoring' if state.restoring else 'sound'} -> restored at version {event.version}"
            f" (version {state.version}, undone {list(state.undone)})",
            fix="report CoreRestored once per RestoreCore, with the version of the checkpoint",
        )
    lost = [
        batch
        for batch in state.burst.committed
        if batch.version is not None and batch.version > event.version
    ]
    kept = tuple(batch for batch in state.burst.committed if batch not in lost)
    newly = (Version(v) for v in range(event.version + 1, state.version + 1) if v not in state.undone)
    turn.set_status(tuple(state.groups[id_] for batch in lost for id_ in batch.groups), GroupStatus.READY)
    turn.update(
        restoring=False,
        undone=(*state.undone, *newly),
        burst=replace(state.burst, committed=kept),
        phase=Phase.BURST if state.phase is Phase.PUBLISHING else state.phase,
    )
    if state.phase is Phase.ENDING and turn.state.steps_done < state.settings.steps:
        _next_burst(turn)
