"""How a controller takes up the executions of the one before it.

What gateway and runner still hold goes on under the number of its attempt, if both have what they need of it; all else of
the earlier controller is gone, so what was running is launched again under the same id, what had ended but was not assessed
is assessed, and what was withdrawn ends. Outcomes stand as they are journaled: nothing that is finished runs or counts a
second time.
"""

from __future__ import annotations

from collections.abc import Callable, Container

from gyre_hpc.config import TasksConfig
from gyre_hpc.controller.executions import queries
from gyre_hpc.controller.executions.executions import Execution, ExecutionTable
from gyre_hpc.controller.journal.history import History
from gyre_hpc.controller.peers.adoption import Holdings
from gyre_hpc.layout import RunLayout
from gyre_hpc.records import ExecutionId, GroupId
from gyre_hpc.schedule.state import Stage
from gyre_hpc.shards.manifest import read_manifest
from gyre_hpc.transport.messages import ExecutionClosed, ExecutionOutcome, ExecutionSealed, ForgetExecution

NOTHING = Holdings()


def register_executions(
    table: ExecutionTable, history: History, tasks: TasksConfig, query: Callable[[GroupId], str]
) -> None:
    """Every execution that is not finished, or whose group lives in the schedule, as far as it had come."""
    for group in history.state.groups.values():
        for id in group.executions:
            table.register(id, group.id, query(group.id))
    for evaluation in history.state.evaluations:
        for id in evaluation.running:
            table.register(id, None, queries.heldout_query(tasks, history.evaluations.position(id)))
    for id, (attempt, group_id, text) in history.attempts.items():
        if id not in history.outcomes or group_id in history.state.groups:
            table.register(id, group_id, text).attempt = attempt
    for execution in table.executions.values():
        _restore(execution, history)


def _restore(execution: Execution, history: History) -> None:
    id = execution.id
    execution.outcome = history.outcomes.get(id)
    execution.terminated = id in history.terminated
    execution.launched = id in history.launched
    execution.withdrawn = id in history.state.executions and history.state.executions[id].withdrawn
    if execution.terminated:
        execution.closed, execution.sealed = _ends(execution, history)


def go_on(
    table: ExecutionTable, history: History, tell: Callable[[str], None], holdings: Holdings = NOTHING
) -> None:
    """Go on with, launch, assess or end what the earlier controller left open. Launches wait for the gateway.

    Tells of attempts that ended with it.
    """
    running = {id for evaluation in history.state.evaluations for id in evaluation.running}
    kept = {id for id, item in table.executions.items() if _goes_on(item, history, holdings)}
    _return_the_rest(table, holdings, kept)
    cut = [it for it in table.unfinished() if not (it.terminated or it.withdrawn or it.id in kept)]
    for id, execution in sorted(table.executions.items()):
        live = history.state.executions.get(id)
        if execution.outcome is not None:
            continue
        if execution.terminated:
            table.close_again(execution, history.terminated[id])
        elif id in kept:
            table.take_up(execution, *_ends(execution, history))
        elif execution.withdrawn:
            table.repeat(execution)
        elif id in running or (live is not None and live.stage is not Stage.QUEUED):
            table.launch(id)
    if cut:
        most = max(cut, key=lambda item: item.attempt)
        tell(
            f"{len(cut)} executions ended with the controller before this one and are started again; of execution"
            f" {most.id} ({most.query}) {history.attempts[most.id][0]} attempts"
        )


def _goes_on(execution: Execution, history: History, holdings: Holdings) -> bool:
    if execution.attempt == 0 or execution.terminated or execution.outcome is not None:
        return False
    closed, sealed = _ends(execution, history)
    attempt = (execution.id, execution.attempt)
    return holdings.keeps(attempt, closed=closed is not None, sealed=sealed is not None)


def _ends(execution: Execution, history: History) -> tuple[ExecutionClosed | None, ExecutionSealed | None]:
    """What the journal has of the end of the current attempt."""
    closed, sealed = history.closed.get(execution.id), history.sealed.get(execution.id)
    return (
        closed if closed and closed.attempt == execution.attempt else None,
        sealed if sealed and sealed.attempt == execution.attempt else None,
    )


def _return_the_rest(table: ExecutionTable, holdings: Holdings, kept: Container[ExecutionId]) -> None:
    """End at the survivors what does not go on there; what is terminated may still be assessed."""
    for id, attempt in holdings.attempts():
        execution = table.executions.get(id)
        current = execution is not None and execution.attempt == attempt and execution.outcome is None
        if execution is None or not current or not (id in kept or execution.terminated):
            table.end_at_survivors(id, attempt)
        if execution is None or execution.outcome is not None:
            table.hooks.runner(ForgetExecution(id))


def not_at_rest(layout: RunLayout, history: History) -> dict[ExecutionId, ExecutionOutcome]:
    """Outcomes whose execution no shard holds."""
    sealed = {
        (entry.execution, entry.attempt)
        for line in read_manifest(layout)
        for entry in line.executions
        if not entry.superseded
    }
    return {id: outcome for id, outcome in history.outcomes.items() if (id, outcome.attempt) not in sealed}
