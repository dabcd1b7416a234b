"""Where executions go whose cell leaves: the last to leave rollout that has room; without room, the least loaded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gyre_hpc.gateway.routing import Cell, RouteTable
from gyre_hpc.records import CellId, Version


def table(*cells: tuple[int, int, int]) -> RouteTable:
    """Cells of (place, capacity, calls that run)."""
    made = RouteTable()
    for id, (place, capacity, calls) in enumerate(cells):
        made.route(Cell(CellId(id), f"http://{id}", capacity, Version(0), place=place))
        made.cells[CellId(id)].running = {f"{id}.{call}" for call in range(calls)}
    return made


def test_the_standalone_pool_fills_up_first_and_then_the_cells_latest_in_the_order() -> None:
    routes = table((0, 4, 4), (1, 4, 3), (2, 4, 3), (3, 4, 2))
    found = [routes.reserve(CellId(0)) for _ in range(4)]
    assert [cell.id for cell in found if cell is not None] == [3, 3, 2, 1]


def test_without_room_the_least_loaded_takes_more() -> None:
    routes = table((0, 4, 4), (1, 4, 6), (2, 4, 5))
    found = routes.reserve(CellId(0))
    assert found is not None and found.id == 2


def test_an_execution_without_a_home_goes_to_the_least_loaded_cell() -> None:
    routes = table((0, 4, 1), (1, 4, 0), (2, 4, 3))
    chosen = routes.choose(None)
    assert chosen is not None and chosen.id == 1
    routes.block(CellId(0))
    moved = routes.choose(CellId(0))
    assert moved is not None and moved.id == 2


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5), st.integers(0, 7)), min_size=2, max_size=6))
def test_nobody_is_sent_to_a_full_cell_while_another_has_room(cells: list[tuple[int, int, int]]) -> None:
    routes = table(*cells)
    for _ in range(10):
        others = [cell for cell in routes.cells.values() if cell.id != 0]
        room = {cell.id for cell in others if len(cell.running) + cell.reserved < cell.capacity}
        latest = max((cell.place for cell in others if cell.id in room), default=0)
        chosen = routes.reserve(CellId(0))
        assert chosen is not None and chosen.id != 0
        assert not room or (chosen.id in room and chosen.place == latest)
