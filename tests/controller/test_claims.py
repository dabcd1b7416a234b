"""The claims ledger: every micro-step is unclaimed, claimed or done, and loss returns all of a cell's work."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_hpc.controller.training.claims import ClaimsLedger
from gyre_hpc.errors import ProtocolViolation
from gyre_hpc.records import CellId, GroupId, Version
from gyre_hpc.transport.messages import Manifest, MicroStepRef, RegionKind


def ref(group: int, index: int, version: int = 0) -> MicroStepRef:
    manifest = Manifest(
        RegionKind.MICRO_STEPS, f"{group}.{index}", version, "", "processor-0", "127.0.0.1:1", ()
    )
    return MicroStepRef(f"{group}.{index}", GroupId(group), Version(version), 10, 5, manifest)


def ledger_with(*groups: tuple[int, int, int]) -> ClaimsLedger:
    ledger = ClaimsLedger(0)
    for group, count, version in groups:
        ledger.add_group(GroupId(group), tuple(ref(group, index, version) for index in range(count)))
    return ledger


def test_the_oldest_version_is_claimed_first() -> None:
    ledger = ledger_with((1, 1, 7), (2, 1, 3))
    first = ledger.claim(CellId(0))
    assert first is not None and first.version == 3


def test_the_last_micro_steps_of_a_version_are_small() -> None:
    ledger = ClaimsLedger(0)
    for group, version, tokens in ((0, 3, 10), (1, 3, 90), (2, 1, 20), (3, 3, 40), (4, 3, 90)):
        ledger.add_group(GroupId(group), (msgspec.structs.replace(ref(group, 0, version), tokens=tokens),))
    claimed = [ledger.claim(CellId(0)) for _ in range(5)]
    assert [one.group for one in claimed if one is not None] == [2, 1, 4, 3, 0]


def test_losing_a_cell_returns_claimed_and_done_work() -> None:
    ledger = ledger_with((1, 3, 0))
    done = ledger.claim(CellId(1))
    assert done is not None
    ledger.done(CellId(1), done.id)
    ledger.claim(CellId(1))
    assert ledger.return_claims(CellId(1)) == 2
    assert (ledger.unclaimed, ledger.open, ledger.workers()) == (3, 0, ())


def test_done_without_a_claim_is_a_violation() -> None:
    ledger = ledger_with((1, 1, 0))
    with pytest.raises(ProtocolViolation, match=r"1\.0"):
        ledger.done(CellId(0), "1.0")


def test_a_group_is_added_once() -> None:
    ledger = ledger_with((1, 2, 0), (1, 2, 0))
    assert ledger.unclaimed == 2


@given(st.lists(st.tuples(st.sampled_from(["claim", "done", "lose"]), st.integers(0, 3)), max_size=60))
def test_nothing_is_lost_or_doubled(steps: list[tuple[str, int]]) -> None:
    ledger = ledger_with((1, 5, 0), (2, 4, 1))
    held: dict[int, list[str]] = {cell: [] for cell in range(4)}
    for action, cell in steps:
        if action == "claim":
            got = ledger.claim(CellId(cell))
            if got is not None:
                held[cell].append(got.id)
        elif action == "done" and held[cell]:
            ledger.done(CellId(cell), held[cell].pop())
        elif action == "lose":
            ledger.return_claims(CellId(cell))
            held[cell] = []
    done = [name for _, names in ledger.owners() for name in names]
    assert len(done) == len(set(done))
    assert ledger.unclaimed + ledger.open + len(done) == 9


def test_a_micro_step_that_lies_nowhere_is_withheld_until_it_is_published_again() -> None:
    ledger = ledger_with((1, 1, 0))
    claimed = ledger.claim(CellId(0))
    assert claimed is not None
    ledger.withhold(CellId(0), claimed.id)
    assert (ledger.unclaimed, ledger.open, ledger.claim(CellId(1))) == (1, 0, None)
    ledger.replace_refs((claimed,))
    assert ledger.claim(CellId(1)) is None
    moved = msgspec.structs.replace(
        claimed, manifest=msgspec.structs.replace(claimed.manifest, address="127.0.0.1:2")
    )
    ledger.replace_refs((moved,))
    assert ledger.claim(CellId(1)) == moved
