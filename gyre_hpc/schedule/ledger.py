"""The ledger: every execution is dispatched, launched and terminated once (d, p, f), held-out ones apart (e).

f <= p <= d always. d rises only in `dispatch`, so w = d - f never rises inside a burst. p rises when a launch is
decided, because from then on the slot is taken; withdrawing a queued execution raises p and f together when its
termination arrives. Retried model calls never touch these numbers.

The queue is in launch order: by id, or with `longest_first` by descending forecast, ties by id. There a dispatched group
is queued when its forecast comes; held-out executions and joins wait for it too.
"""

from __future__ import annotations

import math
from bisect import bisect_right

from msgspec.structs import replace

from gyre_hpc.errors import IllegalTransition
from gyre_hpc.records import ExecutionId, GroupId
from gyre_hpc.schedule.protocol import (
    Dispatch,
    DispatchedGroup,
    EvaluationDue,
    Forecast,
    Launch,
    Launched,
    LaunchEvaluation,
    Outcome,
    Terminated,
    Withdraw,
)
from gyre_hpc.schedule.settings import LaunchOrder
from gyre_hpc.schedule.state import Evaluation, Execution, Group, GroupStatus, Phase, Stage, State
from gyre_hpc.schedule.turn import Turn


def dispatch(turn: Turn) -> None:
    """Fill the queue to (phi + mu) * B groups, or to what the remaining steps still need."""
    state = turn.state
    settings = state.settings
    needed = (settings.steps - state.steps_done) * settings.batch_groups
    live = sum(state.pending.values()) + len(state.ready)
    count = min(settings.queue_groups, needed) - live
    if count <= 0:
        return
    groups = tuple(_mint(state, offset) for offset in range(count))
    ids = tuple(id_ for group in groups for id_ in group.executions)
    owner: dict[ExecutionId, Execution] = {}
    for group in groups:
        owner |= dict.fromkeys(group.executions, Execution(group.id))
    at_once = settings.launch_order is LaunchOrder.FIFO
    turn.set_groups(*groups)
    turn.update(
        dispatched=state.dispatched + len(ids),
        next_group=GroupId(state.next_group + count),
        next_execution=ExecutionId(state.next_execution + len(ids)),
        queued=state.queued + ids if at_once else state.queued,
        unforecast=() if at_once else state.unforecast + tuple(group.id for group in groups),
        executions=state.executions | owner,
    )
    minted = tuple(DispatchedGroup(group.id, group.executions) for group in groups)
    turn.emit(Dispatch(minted, state.published))


def _mint(state: State, offset: int) -> Group:
    size = state.settings.executions_dispatched
    first = state.next_execution + offset * size
    ids = tuple(ExecutionId(first + i) for i in range(size))
    return Group(GroupId(state.next_group + offset), state.published, ids)


def forecast(turn: Turn, event: Forecast) -> None:
    """Queue the executions of groups that waited for it. Raises IllegalTransition for a group never dispatched."""
    told = dict(reversed(event.groups))
    for id_, seconds in told.items():
        if not 0 <= id_ < turn.state.next_group or not 0 <= seconds < math.inf:
            raise IllegalTransition(
                f"group {id_}: waiting -> a forecast of {seconds} s, but groups from {turn.state.next_group} on"
                " are not dispatched and a forecast is at least 0 s",
                fix="report a Forecast for groups of state.unforecast, in finite seconds",
            )
    heard = tuple(id_ for id_ in turn.state.unforecast if id_ in told)
    if not heard:
        return
    turn.set_groups(*(replace(turn.state.groups[id_], forecast=told[id_]) for id_ in heard))
    turn.update(unforecast=tuple(id_ for id_ in turn.state.unforecast if id_ not in told))
    turn.update(queued=_in_launch_order(turn.state, turn.state.queued + _startable(turn.state, heard)))


def _startable(state: State, groups: tuple[GroupId, ...]) -> tuple[ExecutionId, ...]:
    members = (id_ for group in groups for id_ in state.groups[group].executions)
    return tuple(id_ for id_ in members if id_ in state.executions and not state.executions[id_].withdrawn)


def _in_launch_order(state: State, ids: tuple[ExecutionId, ...]) -> tuple[ExecutionId, ...]:
    def place(id_: ExecutionId) -> tuple[float, ExecutionId]:
        return -(state.groups[state.executions[id_].group].forecast or 0.0), id_

    return tuple(sorted(ids, key=place))


def await_no_forecast(turn: Turn, group: GroupId) -> None:
    """The group needs none any more."""
    if group in turn.state.unforecast:
        turn.update(unforecast=tuple(id_ for id_ in turn.state.unforecast if id_ != group))


def spare_capacity(state: State) -> int:
    """C_R - (p - f) - e, never below 0."""
    running = state.launched - state.terminated + state.evaluating
    return max(0, state.rollout_capacity - running)


def launch(turn: Turn) -> None:
    """Launch queued executions into spare capacity; held-out ones only when no training execution waits."""
    state = turn.state
    ids = state.queued[: spare_capacity(state)] if state.queued else ()
    if ids:
        started = {id_: replace(state.executions[id_], stage=Stage.LAUNCHED) for id_ in ids}
        turn.update(
            queued=state.queued[len(ids) :],
            launched=state.launched + len(ids),
            executions=state.executions | started,
        )
        turn.emit(Launch(ids))
    if state.evaluations and not turn.state.queued and not state.unforecast:
        _launch_evaluations(turn)


def _launch_evaluations(turn: Turn) -> None:
    kept: list[Evaluation] = []
    spare = spare_capacity(turn.state)
    for evaluation in turn.state.evaluations:
        ids = evaluation.queued[:spare]
        spare -= len(ids)
        rest = evaluation.queued[len(ids) :]
        kept.append(replace(evaluation, queued=rest, running=evaluation.running + ids))
        if ids:
            turn.emit(LaunchEvaluation(ids, evaluation.version))
    turn.update(evaluations=tuple(kept))


def launched(turn: Turn, event: Launched) -> None:
    """Mark harnesses as running. Raises IllegalTransition for an execution that was never launched."""
    running: dict[ExecutionId, Execution] = {}
    for id_ in event.ids:
        execution = turn.state.executions.get(id_)
        if execution is None:
            _check_minted(turn.state, id_)
            continue
        if execution.stage is Stage.QUEUED:
            raise IllegalTransition(
                f"execution {id_}: queued -> running, but no launch was decided",
                fix="report Launched only for ids of a Launch decision",
            )
        running[id_] = replace(execution, stage=Stage.RUNNING)
    turn.update(executions=turn.state.executions | running)


def terminated(turn: Turn, event: Terminated) -> None:
    """Raise f once (and p with it if the execution was never launched), or lower e; repeats change nothing."""
    state = turn.state
    execution = state.executions.get(event.id)
    if execution is None:
        _check_minted(state, event.id)
        _evaluation_terminated(turn, event.id)
        return
    never_launched = execution.stage is Stage.QUEUED
    turn.update(
        executions=state.executions.without(event.id),
        queued=tuple(id_ for id_ in state.queued if id_ != event.id) if never_launched else state.queued,
        launched=state.launched + never_launched,
        terminated=state.terminated + 1,
    )


def _evaluation_terminated(turn: Turn, id_: ExecutionId) -> None:
    kept = []
    for evaluation in turn.state.evaluations:
        left = replace(
            evaluation,
            queued=tuple(other for other in evaluation.queued if other != id_),
            running=tuple(other for other in evaluation.running if other != id_),
        )
        if left.queued or left.running:
            kept.append(left)
    turn.update(evaluations=tuple(kept))


def _check_minted(state: State, id_: ExecutionId) -> None:
    if not 0 <= id_ < state.next_execution:
        raise IllegalTransition(
            f"execution {id_}: never minted (next id is {state.next_execution})",
            fix="report only ids that a decision of this run named",
        )


def evaluation_due(turn: Turn, event: EvaluationDue) -> None:
    """Mint held-out executions; they wait for spare capacity."""
    state = turn.state
    first = state.next_execution
    ids = tuple(ExecutionId(first + i) for i in range(event.executions))
    if ids:
        turn.update(evaluations=(*state.evaluations, Evaluation(event.version, ids)))
    turn.update(
        next_execution=ExecutionId(first + len(ids)),
        evaluated_first=state.evaluated_first or state.phase is Phase.WAITING,
        evaluated_last=state.evaluated_last or state.phase is Phase.ENDING,
    )


def outcome(turn: Turn, event: Outcome) -> None:
    """Count a valid outcome; at N of them the group's surplus is withdrawn."""
    settings = turn.state.settings
    group = _group_of(turn.state, event.id) if settings.oversample and event.valid else None
    if group is not None and group.status is GroupStatus.PENDING and event.id not in group.valid:
        counted = replace(group, valid=(*group.valid, event.id))
        turn.set_groups(counted)
        if len(counted.valid) >= settings.executions_per_group:
            withdraw(turn, counted)


def _group_of(state: State, id_: ExecutionId) -> Group | None:
    """The group this execution was minted for: groups and their executions stand in id order."""
    groups = list(state.groups.values())
    place = bisect_right(groups, id_, key=lambda group: group.executions[0]) - 1
    return groups[place] if place >= 0 and id_ in groups[place].executions else None


def withdraw(turn: Turn, *groups: Group) -> None:
    """End what still waits or runs of these groups: queued executions never start, running ones are cancelled."""
    state = turn.state
    members = (id_ for group in groups for id_ in group.executions)
    live = {id_: state.executions[id_] for id_ in members if id_ in state.executions}
    ids = tuple(id_ for id_, execution in live.items() if not execution.withdrawn)
    if not ids:
        return
    ended = {id_: replace(live[id_], withdrawn=True) for id_ in ids}
    turn.update(
        executions=state.executions | ended,
        queued=tuple(id_ for id_ in state.queued if id_ not in ended),
    )
    turn.emit(Withdraw(ids))
