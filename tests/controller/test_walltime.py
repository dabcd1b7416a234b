"""The launch rule: what fits starts as ever, what does not is clipped or held, and nothing is held for ever."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gyre_hpc.controller.executions.walltime import HOLD, RUN, Durations, permit
from gyre_hpc.records import ClosingReason, ExecutionId, GroupId
from gyre_hpc.transport.messages import ExecutionOutcome

SECONDS = st.floats(0.1, 1e6)
POLICIES = st.sampled_from(["clip", "hold"])


@given(POLICIES, SECONDS, st.floats(-1e5, 1e6), SECONDS)
def test_what_starts_ends_before_the_drain_is_expected_to_begin(
    policy: str, need: float, left: float, span: float
) -> None:
    given_ = permit(policy, need, left, span)
    if need <= left:
        assert given_ == RUN
    if given_.start and given_.limit_s:
        assert 0 < given_.limit_s <= left < need
    if left <= 0:
        assert given_ == HOLD


@given(POLICIES, SECONDS, SECONDS)
def test_whatever_it_needs_an_execution_can_start_at_the_start_of_a_job(
    policy: str, need: float, span: float
) -> None:
    assert permit(policy, need, span, span).start


def test_the_policy_decides_about_what_would_fit_into_another_job() -> None:
    assert permit("clip", 100, 50, 1000).limit_s == 50
    assert permit("hold", 100, 50, 1000) == HOLD
    assert permit("clip", 100, 9, 1000) == HOLD, "the score of a start says nothing"


@given(st.lists(SECONDS, min_size=1, max_size=50))
def test_nine_of_ten_durations_are_at_most_the_percentile(seconds: list[float]) -> None:
    durations = Durations()
    durations.add(seconds)
    p90 = durations.p90()
    assert p90 in seconds
    assert sum(second <= p90 for second in seconds) >= 0.9 * len(seconds)
    assert sum(second < p90 for second in seconds) < 0.9 * len(seconds)


def test_what_was_cut_short_says_nothing_about_durations() -> None:
    durations = Durations()
    outcome = ExecutionOutcome(ExecutionId(1), 1, GroupId(1), "q", ClosingReason.COMPLETED, 7.0, False, None)
    for reason in (ClosingReason.WALLTIME, ClosingReason.INFRASTRUCTURE, ClosingReason.CANCELLED_SURPLUS):
        durations.ended(msgspec.structs.replace(outcome, reason=reason))
    assert durations.p90() is None
    durations.ended(outcome)
    assert durations.p90() == 7.0
