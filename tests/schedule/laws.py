"""The laws of the schedule, each a check of one turn of the machine. `ALL` is what every world must obey."""

from __future__ import annotations

from collections import Counter

from msgspec.structs import replace

from gyre_hpc.schedule.machine import decide
from gyre_hpc.schedule.protocol import (
    CellKind,
    CloseBatch,
    Dispatch,
    EndBurst,
    Forecast,
    Launch,
    LaunchEvaluation,
    Publish,
    Published,
    Terminated,
    Tick,
    ToRollout,
    ToTraining,
    WriteOff,
)
from gyre_hpc.schedule.settings import LaunchOrder, PolicyName
from gyre_hpc.schedule.state import IN_TRAINING, CellRole, GroupStatus, Phase, serves

from .world import Law, Turned


def counters_are_ordered(turn: Turned) -> None:
    """f <= p <= d, and none of them ever falls."""
    before, after = turn.before, turn.after
    assert 0 <= after.terminated <= after.launched <= after.dispatched
    assert before.terminated <= after.terminated
    assert before.launched <= after.launched
    assert before.dispatched <= after.dispatched


def executions_terminate_once(turn: Turned) -> None:
    """f counts distinct terminated training executions; w the others."""
    ended = set(turn.world.ended)
    assert turn.after.terminated == len(ended)
    assert turn.after.waterlevel == len(turn.after.executions)
    if not isinstance(turn.event, Terminated):
        assert turn.after.terminated == turn.before.terminated


def waterlevel_never_rises_inside_a_burst(turn: Turned) -> None:
    """w rises with a dispatch only, and a dispatch is made at the start and at the end of a burst only."""
    if not turn.of(Dispatch):
        assert turn.after.waterlevel <= turn.before.waterlevel
    else:
        assert turn.of(EndBurst) or turn.before.phase in (Phase.WAITING, Phase.ENDING)


def training_cells_are_a_prefix(turn: Turned) -> None:
    """Cells joining or training come first in the order; the core leads it."""
    flags = [cell.role in IN_TRAINING for cell in turn.after.cells]
    assert flags == sorted(flags, reverse=True)
    if turn.after.core is not None:
        assert turn.after.cells[0].id == turn.after.core


def guests_keep_their_place(turn: Turned) -> None:
    """Cells that only serve are never asked to train and come last; the core is one of the run's own cells."""
    cells = turn.after.cells
    serving = [cell for cell in cells if cell.kind in (CellKind.ROLLOUT, CellKind.STANDALONE)]
    assert all(cell.role in (CellRole.STARTING, CellRole.ROLLOUT) for cell in serving)
    assert cells[len(cells) - len(serving) :] == tuple(serving)
    core = None if turn.after.core is None else turn.after.cell(turn.after.core)
    assert core is None or core.kind is CellKind.OWN


def no_return_inside_a_burst(turn: Turned) -> None:
    """A cell returns at the end of a burst, or late because its switch outlasted it, or after a capacity loss."""
    late = {cell.id for cell in turn.before.cells if cell.role is CellRole.RECALLED}
    for decision in turn.of(ToRollout):
        assert isinstance(decision, ToRollout)
        assert turn.of(EndBurst) or decision.cell in late or turn.world.capacity_lost


def waterlevel_fits_after_a_join(turn: Turned) -> None:
    """w + e <= C_R after every decision to train."""
    if turn.of(ToTraining):
        assert turn.after.waterlevel + turn.after.evaluating <= turn.after.rollout_capacity


def launches_fit(turn: Turned) -> None:
    """Running executions never exceed C_R when something is launched; queued ones wait only for want of capacity."""
    after = turn.after
    running = after.launched - after.terminated + after.evaluating
    if turn.of(Launch, LaunchEvaluation):
        assert running <= after.rollout_capacity
    if not turn.of(ToTraining) and not after.finished:
        assert not after.queued or running >= after.rollout_capacity


def evaluations_wait_for_training(turn: Turned) -> None:
    """Held-out executions start only while no training execution is queued."""
    if turn.of(LaunchEvaluation):
        assert not turn.after.queued and not turn.after.unforecast


def evaluations_run_alone_at_both_ends(turn: Turned) -> None:
    """Nothing is dispatched before the first evaluation has ended nor after the last publication."""
    settings = turn.after.settings
    if turn.before.phase is Phase.WAITING and turn.of(Dispatch):
        assert not turn.after.evaluations
        assert turn.after.evaluated_first or not settings.evaluate_first
    if turn.after.phase is Phase.ENDING:
        assert not turn.of(Dispatch, Launch)
        assert not turn.after.groups


def queue_is_filled_at_dispatch(turn: Turned) -> None:
    """A dispatch brings the ledger to (phi + mu) * B groups, or to what the remaining steps need."""
    for dispatch in turn.of(Dispatch):
        assert isinstance(dispatch, Dispatch)
        settings, state = turn.after.settings, turn.after
        live = state.with_status(GroupStatus.PENDING, GroupStatus.READY, GroupStatus.TAKEN)
        needed = (settings.steps - state.steps_done) * settings.batch_groups
        assert len(live) == min(settings.queue_groups, needed)
        assert dispatch.version == state.published
        assert all(len(group.executions) == settings.executions_dispatched for group in dispatch.groups)


def batches_fill_their_slots(turn: Turned) -> None:
    """A batch closes with B groups, or short when no live group is left."""
    batch = turn.after.open_batch
    if turn.of(CloseBatch):
        assert batch is not None and 0 < len(batch.groups) <= batch.slots
        live = turn.after.with_status(GroupStatus.PENDING, GroupStatus.READY)
        assert len(batch.groups) == batch.slots or not live
        assert not batch.window_open and batch.idle


def groups_are_fresh_enough(turn: Turned) -> None:
    """No group in a batch is staler than max_staleness."""
    batch = turn.after.open_batch
    if batch is not None:
        ages = [turn.after.staleness(turn.after.groups[group]) for group in batch.groups]
        assert all(0 <= age <= turn.after.settings.staleness_limit for age in ages)


def versions_only_rise(turn: Turned) -> None:
    """Versions are never used twice and only taken steps are published."""
    assert turn.before.version <= turn.after.version
    assert turn.before.published <= turn.after.published <= turn.after.version
    for publish in turn.of(Publish):
        assert isinstance(publish, Publish) and publish.version == turn.after.version > turn.after.published


def steps_are_never_exceeded(turn: Turned) -> None:
    """The run takes the configured steps and not one more."""
    assert 0 <= turn.after.steps_done <= turn.after.settings.steps


def nothing_trains_without_a_core(turn: Turned) -> None:
    """Between the core's loss and core_restored nothing joins, closes or is published."""
    if turn.after.restoring:
        assert not turn.of(ToTraining, CloseBatch, Publish)
        assert turn.after.open_batch is None


def void_bursts_publish_nothing(turn: Turned) -> None:
    """A burst ends with a publication exactly when it took a step, and only void bursts in a row are counted."""
    if turn.after.published > turn.before.published:
        assert turn.after.void_bursts == 0
    for end in turn.of(EndBurst):
        assert isinstance(end, EndBurst)
        assert (end.version is not None) == isinstance(turn.event, Published)


def groups_leave_by_consumption_or_write_off(turn: Turned) -> None:
    """A group leaves the ledger only when it is written off or its burst has ended."""
    gone = set(turn.before.groups) - set(turn.after.groups)
    written_off = {decision.group for decision in turn.of(WriteOff) if isinstance(decision, WriteOff)}
    for group in gone - written_off:
        assert turn.of(EndBurst)
        held = turn.before.groups[group]
        committed = {id_ for batch in turn.before.burst.committed for id_ in batch.groups}
        batch = turn.before.open_batch
        assert held.status is GroupStatus.CONSUMED or (batch is not None and group in batch.groups)
        assert group in committed or batch is not None


def pools_switch_as_their_policy_says(turn: Turned) -> None:
    """colocate moves every cell that trains at once; async never moves a cell while no fault happened."""
    policy = turn.after.settings.policy
    if policy is PolicyName.COLOCATE and turn.of(ToTraining):
        assert all(cell.role in IN_TRAINING for cell in turn.after.cells if cell.trains)
    nature = turn.world.nature
    faultless = nature.losses == nature.flickers == nature.guests == 0
    if policy is PolicyName.ASYNC and faultless:
        assert not turn.of(ToRollout)
        assert not turn.of(ToTraining) or turn.before.phase is Phase.WAITING


def launches_follow_the_order(turn: Turned) -> None:
    """Launched executions come before those that stay queued: by id, or by descending forecast with ties by id."""
    after = turn.after
    longest_first = after.settings.launch_order is LaunchOrder.LONGEST_FIRST
    order = [*_launched(turn), *after.queued]
    forecasts = {id_: after.groups[after.executions[id_].group].forecast for id_ in order}
    assert all((seconds is not None) is longest_first for seconds in forecasts.values())
    assert order == sorted(order, key=lambda id_: (-(forecasts[id_] or 0.0), id_))


def a_forecast_changes_only_the_order(turn: Turned) -> None:
    """Members, stamps and the ledger stay; a repeat, or any forecast under fifo, does no more than a tick."""
    before, after = turn.before, turn.after
    if not isinstance(turn.event, Forecast):
        return
    if not {group for group, _ in turn.event.groups} & set(before.unforecast):
        assert (after, turn.decisions) == decide(before, Tick(0.0))
        return
    assert {id_: replace(group, forecast=None) for id_, group in before.groups.items()} == {
        id_: replace(group, forecast=None) for id_, group in after.groups.items()
    }
    assert set(before.executions) == set(after.executions)
    assert set(before.queued) <= set(after.queued) | set(_launched(turn))


def _launched(turn: Turned) -> list[int]:
    return [id_ for launch in turn.of(Launch) if isinstance(launch, Launch) for id_ in launch.ids]


def every_group_is_queued_once_forecast(turn: Turned) -> None:
    """Pending groups wait for a forecast exactly until it comes; none waits under fifo, or once it is not pending."""
    after = turn.after
    longest_first = after.settings.launch_order is LaunchOrder.LONGEST_FIRST
    pending = after.with_status(GroupStatus.PENDING)
    waiting = [group.id for group in pending if longest_first and group.forecast is None]
    assert list(after.unforecast) == waiting


def joins_come_one_at_a_time_unless_they_may_overlap(turn: Turned) -> None:
    """Without overlap at most one cell is on its way to training under gyre, and all before it have joined."""
    settings = turn.after.settings
    if settings.policy is PolicyName.GYRE and not settings.overlap_joins:
        joining = [cell for cell in turn.after.cells if cell.role is CellRole.JOINING]
        assert len(joining) <= 1
        assert not turn.of(ToTraining) or turn.after.trainers == tuple(
            cell.id for cell in turn.after.cells if cell.role is CellRole.TRAINING
        )


def what_is_counted_agrees_with_what_is_there(turn: Turned) -> None:
    """C_R, the pending and ready groups and the order of groups follow from cells and groups."""
    after = turn.after
    serving = [cell.capacity for cell in after.cells if serves(cell) and cell.id not in after.reserved]
    assert after.rollout_capacity == after.settings.pool + sum(serving)
    assert after.pending == Counter(group.version for group in after.with_status(GroupStatus.PENDING))
    ready = sorted(after.with_status(GroupStatus.READY), key=lambda group: (group.version, group.rank))
    assert after.ready == tuple(group.id for group in ready)
    assert list(after.groups) == sorted(after.groups)
    taken = {group.id for group in after.with_status(GroupStatus.TAKEN)}
    assert taken == (set(after.open_batch.groups) if after.open_batch is not None else set())


ALL: tuple[Law, ...] = (
    counters_are_ordered,
    executions_terminate_once,
    waterlevel_never_rises_inside_a_burst,
    training_cells_are_a_prefix,
    guests_keep_their_place,
    no_return_inside_a_burst,
    waterlevel_fits_after_a_join,
    launches_fit,
    evaluations_wait_for_training,
    evaluations_run_alone_at_both_ends,
    queue_is_filled_at_dispatch,
    batches_fill_their_slots,
    groups_are_fresh_enough,
    versions_only_rise,
    steps_are_never_exceeded,
    nothing_trains_without_a_core,
    void_bursts_publish_nothing,
    groups_leave_by_consumption_or_write_off,
    pools_switch_as_their_policy_says,
    launches_follow_the_order,
    a_forecast_changes_only_the_order,
    every_group_is_queued_once_forecast,
    joins_come_one_at_a_time_unless_they_may_overlap,
    what_is_counted_agrees_with_what_is_there,
)
