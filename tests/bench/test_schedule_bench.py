"""What the bench reads off runs, and when it refuses to compare them."""

from __future__ import annotations

import dataclasses

import pytest

from gyre_hpc.bench import paced, schedule
from gyre_hpc.bench.schedule import Entrant, InvalidRun, Measured
from gyre_hpc.errors import ConfigError
from gyre_hpc.report import metrics as m

ENTRANT = Entrant("gyre", (), warm_up=2)


def step(t: float, version: int, staleness: tuple[int, ...]) -> m.Step:
    return m.Step(t, version, 0.5, len(staleness), 8, 8, 100, staleness, {}, 1.0)


def synthetic(steps: int = 6) -> paced.Run:
    """Two steps a burst; a burst takes 10 s, but the first one 50 s; stale by 9 in the warm-up, then 0 and 1."""
    lines: list[m.AnyMetric] = []
    for version in range(1, steps + 1):
        burst = (version - 1) // 2
        stale = (9, 9) if version <= 2 else ((version - 1) % 2, (version - 1) % 2)
        end = 50.0 + 10.0 * burst
        lines.append(step(end - 5 + 4 * ((version - 1) % 2), version, stale))
        if version % 2 == 0:
            lines += [
                m.Busy(end, 0, "rollout", 6.0, 6.0, ""),
                m.Busy(end, 0, "training", 2.0, 0.0, "no_micro_steps"),
            ]
            lines.append(m.Burst(end, burst, version))
    loads = [paced.Load(step_at(second), 0.6 * second, 0.5 * second, 2.0 * second) for second in range(80)]
    return paced.Run(lines, loads)


def step_at(second: int) -> int:
    return sum(second >= end - 5 + 4 * part for end in (50, 60, 70) for part in (0, 1))


def test_the_steady_state_runs_from_publication_to_publication() -> None:
    seen = schedule.observe(ENTRANT, synthetic(), steps=4)
    assert seen.seconds_per_step == pytest.approx(5.0)
    assert seen.staleness == 0.5
    assert seen.cpu_share == pytest.approx(0.3)
    assert seen.own_cpu_share == pytest.approx(0.25)
    assert seen.device_time == {"rollout busy": 0.75, "training no_micro_steps": 0.25}


def test_a_run_that_took_too_few_steps_is_invalid() -> None:
    with pytest.raises(InvalidRun, match="gyre: 4 steps"):
        schedule.observe(ENTRANT, synthetic(4), steps=4)


def test_a_run_cut_short_counts_with_the_whole_bursts_it_made() -> None:
    cut = dataclasses.replace(synthetic(5), cut=True)
    seen = schedule.observe(ENTRANT, cut, steps=4)
    assert seen.seconds_per_step == pytest.approx(5.0)
    assert seen.staleness == 0.5
    assert seen.span == "steps 3 to 4 of 6: its time was over"
    assert schedule.observe(ENTRANT, synthetic(), steps=4).span == "steps 3 to 6"


def test_a_run_cut_in_its_first_burst_is_invalid() -> None:
    cut = dataclasses.replace(synthetic(3), cut=True)
    with pytest.raises(InvalidRun, match="needs 2, 6"):
        schedule.observe(ENTRANT, cut, steps=4)


def test_a_ratio_is_bounded_by_what_any_schedule_could_take() -> None:
    ours, *others = results()
    found = schedule.figures([dataclasses.replace(ours, bound_s=4.0, span="steps 4 to 12"), *others])
    assert found["colocate_over_gyre"].bound == pytest.approx(6.5 / 4.0)
    assert found["seconds_per_step_gyre"].bound == 4.0
    assert found["seconds_per_step_gyre"].against == "steps 4 to 12"
    assert schedule.figures(results())["colocate_over_gyre"].bound is None


def test_each_step_of_a_row_is_told_once_with_the_time_left(caplog: pytest.LogCaptureFixture) -> None:
    told = schedule.Progress("row 2 of 6, colocate", 12)
    for steps, seconds in ((0, 1.0), (0, 2.0), (3, 30.0), (3, 31.0), (6, 60.0)):
        told(steps, seconds)
    assert [record.message for record in caplog.records] == [
        "row 2 of 6, colocate: step 3 of 12 after 30 s",
        "row 2 of 6, colocate: step 6 of 12 after 60 s, 60 s left",
    ]


def test_less_than_a_step_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 steps"):
        schedule.run(steps=0)


def results(**changes: float) -> list[Measured]:
    gyre = Measured("gyre", 5.0, 1.0, 0.4, 0.3, {}, {})
    colocate = dataclasses.replace(gyre, name="colocate", seconds_per_step=6.5)
    other = dataclasses.replace(gyre, name="async", seconds_per_step=6.0, staleness=1.1)
    return [gyre, colocate, dataclasses.replace(other, **changes)]


def test_figures_are_ratios_of_wall_time_per_step() -> None:
    found = schedule.figures(results())
    assert found["colocate_over_gyre"].value == pytest.approx(1.3)
    assert found["async_over_gyre"].value == pytest.approx(1.2)
    assert found["staleness_async"].value == 1.1
    assert found["cpu_share"].value == 0.4
    assert (found["colocate_over_gyre"].aim, found["async_over_gyre"].aim) == (1.3, 1.4)


def test_idle_time_is_told_by_role_and_cause() -> None:
    shares = {"rollout busy": 0.5, "rollout no_calls": 0.1, "training no_micro_steps": 0.4}
    result = dataclasses.replace(results()[0], device_time=shares)
    assert result.idle.value == pytest.approx(0.5)
    assert result.idle.against == "training no_micro_steps 40.0%, rollout no_calls 10.0%"


def test_rows_of_the_ladder_are_named_and_come_in_its_order() -> None:
    assert [one.name for one in schedule.chosen("async,gyre")] == ["gyre", "async"]
    assert schedule.chosen("") == schedule.ENTRANTS
    with pytest.raises(ConfigError, match="no row asink"):
        schedule.chosen("gyre,asink")


@pytest.mark.parametrize("entrant", schedule.ENTRANTS, ids=lambda one: one.name)
def test_a_steady_state_is_whole_bursts(entrant: Entrant) -> None:
    assert entrant.warm_up % entrant.burst == 0
    assert entrant.measured(9) % entrant.burst == 0 and 8 <= entrant.measured(9) <= 9


def test_runs_of_different_staleness_are_not_compared() -> None:
    with pytest.raises(InvalidRun, match="staleness differs"):
        schedule.figures(results(staleness=1.3))


def test_a_busy_machine_makes_the_measurement_invalid() -> None:
    with pytest.raises(InvalidRun, match="81% busy"):
        schedule.figures(results(cpu_share=0.81))


@pytest.mark.full
@pytest.mark.parametrize(
    "entrant", schedule.chosen("gyre,colocate_pool_whole,async_whole"), ids=lambda one: one.name
)
def test_each_policy_runs_live_on_paced_cells(entrant: Entrant) -> None:
    """Executions of a second, two groups a step: the machinery, not the ratios."""
    script = paced.Script(mean_s=1.0, turn_s=0.5, answer_tokens=2)
    tiny = ["schedule.batch_groups=2", "schedule.executions_per_group=2", "harness.timeout_s=3"]
    tiny += ["trainer.tokens_per_s=2000"]
    (seen,) = schedule.measure([entrant], 3, script, tiny)
    assert seen.seconds_per_step > 0
    assert seen.staleness == pytest.approx(1.0, abs=0.5)
    assert sum(seen.device_time.values()) == pytest.approx(1.0)
    assert {"rollout", "training"} <= {name.split()[0] for name in seen.device_time}
    assert seen.own_cpu_share > 0
    assert not set(seen.reasons) - {"completed", "harness_timeout"}
