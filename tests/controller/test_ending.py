"""Why a run ends early and how its job is handed back: every pair of signal and state of the job has one meaning."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_hpc.controller.ending.ending import (
    LEAVE_S,
    Cause,
    Ending,
    How,
    how,
    judge_signal,
    judge_step,
    leave_at,
    revised,
    save_s,
)
from gyre_hpc.launch.job.lifetime import Job, Site

RUNNING = Job("RUNNING", start=0.0, end=1000.0)
PREEMPTED = replace(RUNNING, preempted=100.0, end=130.0)
COMPLETING = replace(RUNNING, state="COMPLETING")
TIMED_OUT = replace(COMPLETING, reason="TimeLimit")


@pytest.mark.parametrize(
    ("signal", "job", "ending"),
    [
        ("SIGUSR2", RUNNING, Ending(Cause.WALLTIME, "SIGUSR2", 1000.0)),
        ("SIGUSR2", None, Ending(Cause.WALLTIME, "SIGUSR2")),
        ("SIGTERM", RUNNING, Ending(Cause.ASKED, "SIGTERM")),
        ("SIGTERM", None, Ending(Cause.ASKED, "SIGTERM", 105.0)),
        ("SIGINT", RUNNING, Ending(Cause.ASKED, "SIGINT")),
        ("SIGTERM", COMPLETING, Ending(Cause.KILLED, "SIGTERM", 105.0)),
        ("SIGTERM", TIMED_OUT, Ending(Cause.TIMED_OUT, "SIGTERM", 105.0)),
        ("SIGUSR2", PREEMPTED, Ending(Cause.PREEMPTION, "SIGUSR2", 130.0)),
    ],
)
def test_a_signal_to_the_batch_process(signal: str, job: Job | None, ending: Ending) -> None:
    assert judge_signal(signal, job, 100.0, 5.0) == ending


def test_sigterm_in_a_step_is_a_preemption_a_kill_or_that_steps_business() -> None:
    assert judge_step(PREEMPTED, 100.0, 5.0) == Ending(Cause.PREEMPTION, "SIGTERM", 130.0)
    assert judge_step(COMPLETING, 100.0, 5.0) == Ending(Cause.KILLED, "SIGTERM", 105.0)
    assert judge_step(RUNNING, 100.0, 5.0) is None
    assert judge_step(None, 100.0, 5.0) is None, "unknown never means an end"


def test_the_end_of_a_grace_time_that_cancels_is_still_a_preemption() -> None:
    ended = replace(PREEMPTED, state="COMPLETING")
    assert judge_step(ended, 100.0, 5.0, "CANCEL") == Ending(Cause.PREEMPTION, "SIGTERM", 105.0)
    assert judge_step(ended, 100.0, 5.0, "REQUEUE") == Ending(Cause.KILLED, "SIGTERM", 105.0)


endings = st.builds(Ending, st.sampled_from(Cause), st.just("SIGTERM"), st.none() | st.floats(0, 1e4))


def test_a_kill_that_is_told_again_gives_no_more_time() -> None:
    killed = Ending(Cause.KILLED, "SIGTERM", 105.0)
    assert revised(killed, replace(killed, end=109.0)) == killed
    assert revised(killed, replace(killed, end=101.0)).end == 101.0
    walltime = Ending(Cause.WALLTIME, "SIGUSR2", 1000.0)
    assert revised(walltime, Ending(Cause.ASKED, "SIGTERM", 105.0)) == replace(walltime, end=105.0)
    assert revised(walltime, Ending(Cause.ASKED, "SIGTERM")) == walltime


@given(endings, endings)
def test_a_later_word_never_gives_more_time_nor_takes_back_a_persons_end(
    earlier: Ending, heard: Ending
) -> None:
    counts = revised(earlier, heard)
    if heard.cause not in (Cause.KILLED, Cause.TIMED_OUT) and earlier.end is not None:
        assert counts.end is not None and counts.end <= earlier.end
    if not earlier.cause.hands_back:
        assert not counts.cause.hands_back
    if heard.cause is Cause.KILLED:
        assert counts == (heard if counts.end == heard.end else earlier) and counts.cause is Cause.KILLED
    assert revised(None, heard) == heard


ALLOWED = Site(requeue_exit=(75,))


@pytest.mark.parametrize(
    ("job", "site", "cause", "mode", "way"),
    [
        (RUNNING, ALLOWED, Cause.WALLTIME, "REQUEUE", How.EXIT),
        (RUNNING, Site(), Cause.WALLTIME, "REQUEUE", How.SCONTROL),
        (replace(RUNNING, het=True), ALLOWED, Cause.WALLTIME, "", How.SCONTROL),
        (replace(RUNNING, requeue=False), ALLOWED, Cause.WALLTIME, "", How.SUCCESSOR),
        (PREEMPTED, ALLOWED, Cause.PREEMPTION, "CANCEL", How.SUCCESSOR),
        (PREEMPTED, ALLOWED, Cause.PREEMPTION, "REQUEUE", How.EXIT),
        (RUNNING, ALLOWED, Cause.WALLTIME, "CANCEL", How.EXIT),
        (None, Site(), Cause.NOTHING_FITS, "", How.SCONTROL),
    ],
)
def test_the_way_back_is_the_first_that_the_site_allows(
    job: Job | None, site: Site, cause: Cause, mode: str, way: How
) -> None:
    assert how("auto", True, cause, job, site, mode) is way


@given(st.sampled_from(Cause), st.sampled_from(["auto", "exit", "scontrol", "successor"]), st.booleans())
def test_what_a_person_or_slurm_ended_and_what_was_not_wanted_is_never_handed_back(
    cause: Cause, by: str, requeue: bool
) -> None:
    way = how(by, requeue, cause, RUNNING, ALLOWED, "")
    assert (way is How.NOT) == (not requeue or cause in (Cause.ASKED, Cause.KILLED))
    if cause is Cause.TIMED_OUT and requeue:
        assert way is How.SUCCESSOR, "Slurm never starts it again"
    elif way is not How.NOT and by != "auto":
        assert way == by


@given(st.floats(0, 1e4), st.floats(0, 1e3))
def test_the_checkpoint_begins_early_enough_or_at_once(end: float, checkpoint_s: float) -> None:
    begin = leave_at(Ending(Cause.WALLTIME, "SIGUSR2", end), checkpoint_s, 1.5)
    assert begin is not None and begin + 1.5 * checkpoint_s + LEAVE_S <= end + 1e-6
    assert save_s(checkpoint_s, 1.5) >= 1.5 * checkpoint_s
    for cause in (Cause.KILLED, Cause.TIMED_OUT, Cause.ASKED, Cause.NOTHING_FITS):
        assert leave_at(Ending(cause, "SIGTERM", end), checkpoint_s, 1.5) is None
