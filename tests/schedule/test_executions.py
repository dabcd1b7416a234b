"""The map of live executions reads like a dict, is never changed in place, and shares what did not change."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gyre_hpc.records import ExecutionId, GroupId
from gyre_hpc.schedule.executions import CHUNK, Execution, Executions, Stage

ids = st.integers(0, 3 * CHUNK).map(ExecutionId)
stages = st.builds(Execution, group=st.just(GroupId(0)), stage=st.sampled_from(Stage))
changes = st.lists(st.one_of(ids, st.dictionaries(ids, stages, max_size=5)), max_size=30)


def contents(executions: Executions) -> dict[ExecutionId, Execution]:
    return {id_: executions[id_] for id_ in executions}


@given(changes=changes)
def test_it_holds_what_a_dict_would_hold_and_old_ones_stay_as_they_were(
    changes: list[ExecutionId | dict[ExecutionId, Execution]],
) -> None:
    plain: dict[ExecutionId, Execution] = {}
    chunked = Executions()
    history: list[tuple[Executions, dict[ExecutionId, Execution]]] = []
    for change in changes:
        history.append((chunked, dict(plain)))
        if isinstance(change, dict):
            plain |= change
            chunked = chunked | change
        elif change in plain:
            del plain[change]
            chunked = chunked.without(change)
    for old, expected in [*history, (chunked, plain)]:
        assert contents(old) == expected and len(old) == len(expected)
        assert all(old.get(id_) == expected.get(id_) for id_ in map(ExecutionId, range(3 * CHUNK)))
        assert all(old.chunks.values()), "an empty chunk would make equal maps differ"
        assert msgspec.json.decode(msgspec.json.encode(old), type=Executions) == old


def test_a_change_copies_one_chunk() -> None:
    many = Executions() | {ExecutionId(id_): Execution(GroupId(0)) for id_ in range(4 * CHUNK)}
    fewer = many.without(ExecutionId(CHUNK))
    shared = [index for index in many.chunks if many.chunks[index] is fewer.chunks[index]]
    assert shared == [0, 2, 3]
