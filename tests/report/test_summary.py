"""Every number of summary.json against a run small enough to count by hand (`runs.counted`)."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from gyre_hpc.report import metrics as m
from gyre_hpc.report.spans import role_spans
from gyre_hpc.report.summary import Summary, idle_shares, summarise
from gyre_hpc.report.tables import kv_cache
from tests.report import runs


@pytest.fixture
def summary(tmp_path: Path) -> Summary:
    return summarise(runs.write(tmp_path / "metrics.jsonl", runs.counted()))


def test_scores_are_those_of_the_first_and_the_last_evaluation(summary: Summary) -> None:
    assert (summary.score_before, summary.score_after, summary.score_se) == (0.3, 0.7, 0.04)
    assert [point.version for point in summary.evaluations] == [0, 3, 5]


def test_one_evaluation_is_a_before_without_an_after(tmp_path: Path) -> None:
    lines = [m.Evaluated(1.0, 0, 0.3, 0.05, 10, 0)]
    summary = summarise(runs.write(tmp_path / "metrics.jsonl", lines))
    assert (summary.score_before, summary.score_after, summary.score_se) == (0.3, None, None)


def test_steps_and_bursts(summary: Summary) -> None:
    assert (summary.steps, summary.bursts, summary.void_bursts) == (5, 5, 1)
    assert summary.tokens_trained == 1000 + 1001 + 1002 + 1003 + 1004
    assert summary.training_score == (0.0, 0.2, None, pytest.approx(0.6), 0.8)


def test_role_switches_count_both_ways_and_no_death(summary: Summary) -> None:
    there, back = 3 + 2 + 3 + 2 + 3, 3 + 2 + 3 + 1 + 0
    assert summary.role_switches == there + back


def test_a_resume_is_no_role_switch(tmp_path: Path) -> None:
    lines = [m.Opened(0.0), m.RoleChange(1.0, 0, "training"), m.Opened(9.0), m.RoleChange(10.0, 0, "rollout")]
    assert summarise(runs.write(tmp_path / "metrics.jsonl", lines)).role_switches == 0


def test_joins_into_a_running_batch_leave_out_the_first_of_each_batch(summary: Summary) -> None:
    assert summary.joins_mid_batch == 5 + 3


def test_mean_seconds_of_a_switch_by_direction(summary: Summary) -> None:
    assert summary.switch_seconds == {"to_training": 2.0, "to_rollout": 2.0}


def test_executions_by_closing_reason(summary: Summary) -> None:
    assert summary.executions == {"completed": 3, "harness_timeout": 1, "infrastructure": 1}


def test_calls_and_tokens_are_sums_over_executions(summary: Summary) -> None:
    assert (summary.calls, summary.calls_rerouted, summary.calls_lost) == (21, 3, 1)
    assert (summary.tokens_sampled, summary.tokens_recomputed, summary.calls_unknown) == (160, 10, 2)


def test_what_publications_and_moves_cost_is_summed_and_the_oldest_kv_named(tmp_path: Path) -> None:
    kept = {
        "prompt_tokens": 90,
        "tokens_cached": 60,
        "tokens_sampled": 40,
        "tokens_on_old_kv": 10,
        "kv_lag": 1,
    }
    lines = [
        m.Published(1.0, 1, 2.0, 3),
        m.Published(2.0, 2, 4.0, 0),
        runs.ended(3.0, 1, 0, calls_over_versions=2, pages_due=5, pages_found=4, **kept),
        runs.ended(3.0, 2, 0, calls_over_versions=1, **(kept | {"kv_lag": 2})),
    ]
    summary = summarise(runs.write(tmp_path / "metrics.jsonl", lines))
    assert (summary.publications, summary.publication_s, summary.publication_cuts) == (2, 3.0, 3)
    assert (summary.prompt_tokens, summary.tokens_cached, summary.calls_over_versions) == (180, 120, 3)
    assert (summary.tokens_on_old_kv, summary.kv_lag) == (20, 2)
    assert (summary.pages_due, summary.pages_found) == (5, 4)
    table = kv_cache(summary)
    for words in ("2, 3.00 s each", "3, 3", "120 of 180 (67%)", "4 of 5", "20 (25%)"):
        assert words in table


def test_staleness_is_the_mean_over_consumed_groups(summary: Summary) -> None:
    assert summary.staleness_mean == pytest.approx(2 / 10)


def test_faults_and_wall_time(summary: Summary) -> None:
    assert (summary.faults, summary.wall_s) == (1, 122.5)


def test_idle_share_by_role_and_cause(summary: Summary) -> None:
    shares = summary.idle_share
    assert set(shares) == {"rollout", "training", "all"}
    assert shares["rollout"] == pytest.approx({"total": 0.4, "tools": 0.3, "no_work": 0.1})
    assert shares["training"] == pytest.approx({"total": 0.2, "no_micro_steps": 0.2})
    assert shares["all"] == pytest.approx(
        {
            "total": 0.5,
            "tools": 0.15,
            "no_work": 0.05,
            "no_micro_steps": 0.05,
            "switching": 0.1,
            "loading": 0.025,
            "starting": 0.125,
        }
    )


def test_a_partly_busy_line_counts_its_idle_part() -> None:
    assert idle_shares([m.Busy(1.0, 0, "rollout", 10.0, 8.0, "tools")])["rollout"]["total"] == pytest.approx(
        0.2
    )


def test_absent_is_none_and_never_zero(tmp_path: Path) -> None:
    summary = summarise(tmp_path / "metrics.jsonl")
    assert (summary.score_before, summary.score_after, summary.score_se) == (None, None, None)
    assert (summary.staleness_mean, summary.idle_share, summary.steps) == (None, {}, 0)
    assert summary.publication_s is None


def test_role_spans_of_a_cell_follow_each_other_without_gap() -> None:
    spans = [span for span in role_spans(runs.counted(), 130.0) if span[0] == 1]
    assert spans[0] == (1, "starting", 0.0, 1.0)
    assert all(before[3] == after[2] for before, after in pairwise(spans))
    assert spans[-1] == (1, "training", 110.0, 130.0)


def test_no_role_is_drawn_between_two_controllers() -> None:
    lines = [m.Opened(0.0), m.RoleChange(1.0, 0, "rollout"), m.Burst(5.0, 0, 1)]
    lines += [m.Opened(100.0), m.RoleChange(103.0, 0, "idle")]
    expected = [(0, "starting", 0.0, 1.0), (0, "rollout", 1.0, 5.0), (0, "starting", 100.0, 103.0)]
    assert role_spans(lines, 110.0) == [*expected, (0, "idle", 103.0, 110.0)]


def test_a_step_that_a_restored_core_undid_does_not_count(tmp_path: Path) -> None:
    def step(version: int) -> m.Step:
        return m.Step(float(version), version, 0.5, 1, 4, 2, 100, (0,), {}, 1.0)

    lines = [m.Opened(0.0), step(1), step(2), m.Opened(5.0), m.Restored(6.0, 1), step(3)]
    writer = m.MetricsWriter(tmp_path / "metrics.jsonl")
    for line in lines:
        writer.write(line)
    writer.close()
    found = summarise(tmp_path / "metrics.jsonl")
    assert (found.steps, found.tokens_trained) == (2, 200)


def test_the_row_of_a_guest_begins_when_it_comes_and_ends_when_it_is_gone() -> None:
    words = ["starting", "rollout", "lost", m.GONE]
    lines = [m.Opened(0.0), *(m.RoleChange(10.0 * at, 3, word) for at, word in enumerate(words, start=1))]
    assert role_spans(lines, 100.0) == [
        (3, "starting", 10.0, 20.0),
        (3, "rollout", 20.0, 30.0),
        (3, "lost", 30.0, 40.0),
    ]
