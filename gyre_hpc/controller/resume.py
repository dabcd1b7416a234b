"""How a controller takes up the executions of the one before it.

All processes of the earlier controller are gone, so what was running is launched again under the same id, what had ended
but was not assessed is assessed, and what was withdrawn ends. Outcomes stand as they are journaled: nothing that is
finished runs or counts a second time.
"""

from __future__ import annotations

from collections.abc import Callable

from gyre_hpc.config import TasksConfig
from gyre_hpc.controller import queries
from gyre_hpc.controller.executions import Execution, ExecutionTable
from gyre_hpc.controller.history import History
from gyre_hpc.layout import RunLayout
from gyre_hpc.records import ExecutionId, GroupId
from gyre_hpc.schedule.state import Stage
from gyre_hpc.shards.manifest import read_manifest
from gyre_hpc.transport.messages import ExecutionOutcome


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
    closed, sealed = history.closed.get(id), history.sealed.get(id)
    execution.outcome = history.outcomes.get(id)
    execution.terminated = id in history.terminated
    execution.launched = id in history.launched
    execution.withdrawn = id in history.state.executions and history.state.executions[id].withdrawn
    if execution.terminated:
        execution.closed = closed if closed and closed.attempt == execution.attempt else None
        execution.sealed = sealed if sealed and sealed.attempt == execution.attempt else None


def go_on(table: ExecutionTable, history: History) -> None:
    """Launch, assess or end what the earlier controller left open. Launches wait for the gateway."""
    running = {id for evaluation in history.state.evaluations for id in evaluation.running}
    for id, execution in sorted(table.executions.items()):
        live = history.state.executions.get(id)
        if execution.outcome is not None:
            continue
        if execution.terminated:
            table.close_again(execution, history.terminated[id])
        elif execution.withdrawn:
            table.repeat(execution)
        elif id in running or (live is not None and live.stage is not Stage.QUEUED):
            table.launch(id)


def not_at_rest(layout: RunLayout, history: History) -> dict[ExecutionId, ExecutionOutcome]:
    """Outcomes whose execution no shard holds."""
    sealed = {
        (entry.execution, entry.attempt)
        for line in read_manifest(layout)
        for entry in line.executions
        if not entry.superseded
    }
    return {id: outcome for id, outcome in history.outcomes.items() if (id, outcome.attempt) not in sealed}
