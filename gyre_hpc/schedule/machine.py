"""`decide(state, event) -> (state, decisions)`: the whole schedule, a pure function.

The controller and the simulator are its callers. An event first states a fact (`_absorb`), then the rules run in one fixed
order (`_settle`): restore the core, begin, move the burst, give way after a loss, launch, join, finish. Launches come
before joins, so queued work always outranks a cell's leave. The same events from the same state give the same state
and decisions; a caller that replays its journal stands where it stood. Events a race may deliver late (repeats, events of
lost cells or written-off groups) change nothing; an event no correct caller can send raises IllegalTransition and
names both states.
"""

from __future__ import annotations

from gyre_hpc.records import CellId
from gyre_hpc.schedule import batches, burst, cells, ledger
from gyre_hpc.schedule.policies import POLICIES
from gyre_hpc.schedule.protocol import (
    AllCellsLost,
    AnyDecision,
    AnyEvent,
    BatchDone,
    CellAdded,
    CellLost,
    CellReady,
    CellRoutable,
    CellUnroutable,
    CoreRestored,
    EvaluationDue,
    Forecast,
    GroupDead,
    GroupReady,
    Launched,
    MicroSteps,
    Outcome,
    Published,
    Started,
    Terminated,
    Tick,
)
from gyre_hpc.schedule.settings import Settings
from gyre_hpc.schedule.state import Cell, Phase, State
from gyre_hpc.schedule.turn import Turn

__all__ = ["decide", "initial_state"]


def initial_state(settings: Settings) -> State:
    """The state before any event: all configured cells are starting, cell 0 is the core, version 0 is served;
    the last `standalone` never train."""
    order = tuple(
        Cell(CellId(index), capacity, kind=settings.kind_of(CellId(index)))
        for index, capacity in enumerate(settings.capacities)
    )
    turn = Turn(State(settings=settings, cells=order, core=CellId(0)))
    reserved = POLICIES[settings.policy].reserved(turn.state)
    turn.set_order(order, tuple(cell.id for cell in reserved))
    return turn.state


def decide(state: State, event: AnyEvent) -> tuple[State, tuple[AnyDecision, ...]]:
    """The state after `event`, and what the caller must do now, in order. Raises IllegalTransition."""
    if state.phase is Phase.STOPPED:
        return state, ()
    turn = Turn(state)
    _absorb(turn, event)
    _settle(turn)
    return turn.state, tuple(turn.decisions)


def _absorb(turn: Turn, event: AnyEvent) -> None:
    match event:
        case Terminated():
            ledger.terminated(turn, event)
        case Started():
            turn.update(started=True)
        case Launched():
            ledger.launched(turn, event)
        case Forecast():
            ledger.forecast(turn, event)
        case Outcome():
            ledger.outcome(turn, event)
        case EvaluationDue():
            ledger.evaluation_due(turn, event)
        case GroupReady():
            batches.group_ready(turn, event)
        case GroupDead():
            batches.group_dead(turn, event)
        case MicroSteps():
            batches.micro_steps(turn, event)
        case BatchDone():
            batches.batch_done(turn, event)
        case Published():
            burst.published(turn, event)
        case AllCellsLost():
            cells.all_cells_lost(turn)
        case Tick():
            pass
        case _:
            _absorb_cell(turn, event)


def _absorb_cell(
    turn: Turn, event: CellReady | CellUnroutable | CellRoutable | CellLost | CellAdded | CoreRestored
) -> None:
    match event:
        case CellReady():
            cells.cell_ready(turn, event)
        case CellUnroutable():
            cells.cell_unroutable(turn, event)
        case CellRoutable():
            cells.cell_routable(turn, event)
        case CellLost():
            cells.cell_lost(turn, event)
        case CellAdded():
            cells.cell_added(turn, event)
        case CoreRestored():
            burst.core_restored(turn, event)


def _settle(turn: Turn) -> None:
    if not turn.state.started:
        return
    cells.restore_core(turn)
    burst.begin(turn)
    burst.progress(turn)
    cells.give_way(turn)
    ledger.launch(turn)
    cells.join(turn)
    burst.finish(turn)
