"""Keys that depend on each other: each impossible combination is refused by key, each limit case is accepted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gyre_hpc.config import RunConfig
from gyre_hpc.config_checks import AT_LEAST, CHOICES, validate
from gyre_hpc.config_keys import known_keys
from gyre_hpc.controller.executions.queries import heldout_query, training_query
from gyre_hpc.errors import ConfigError
from gyre_hpc.records import GroupId, KvPolicy


def config(**values: object) -> RunConfig:
    """A valid configuration with these values, `section__key=value`."""
    result = RunConfig()
    result.model.path = "package:patchkit"
    for name, value in values.items():
        *sections, key = name.split("__")
        target: object = result
        for section in sections:
            target = getattr(target, section)
        assert hasattr(target, key)
        setattr(target, key, value)
    return result


def refusal(**values: object) -> str:
    with pytest.raises(ConfigError) as caught:
        validate(config(**values))
    assert caught.value.fix
    return str(caught.value)


def test_every_policy_that_may_be_configured_says_whether_calls_run_on() -> None:
    kept = {name: KvPolicy(name).keeps_calls for name in CHOICES["engine.kv_policy"]}
    assert kept == {"strict": False, "keep_execution": True}


def test_the_checked_keys_exist() -> None:
    assert {*AT_LEAST, *CHOICES} <= set(known_keys(RunConfig))


@pytest.mark.parametrize("key", AT_LEAST)
def test_a_value_below_the_least_is_refused_by_key(key: str) -> None:
    name = key.replace(".", "__")
    assert f"{key}={AT_LEAST[key] - 1} must be at least" in refusal(**{name: AT_LEAST[key] - 1})


@pytest.mark.parametrize("key", CHOICES)
def test_every_listed_choice_is_accepted_and_nothing_else(key: str) -> None:
    name = key.replace(".", "__")
    for choice in CHOICES[key]:
        validate(config(**{name: choice}))
    assert f"{key}=zzz is not one of" in refusal(**{name: "zzz"})


def test_phi_times_b_is_an_integer() -> None:
    validate(config(schedule__batch_groups=4, schedule__extra_dispatch=1.25))
    assert "phi*B = 1.2" in refusal(schedule__batch_groups=4, schedule__extra_dispatch=0.3)


def test_async_leaves_a_cell_for_each_role() -> None:
    validate(config(schedule__policy="async", cluster__cells=2, schedule__training_cells=1))
    assert "cluster.cells >= 2" in refusal(schedule__policy="async", cluster__cells=1)
    assert "training_cells=3" in refusal(
        schedule__policy="async", cluster__cells=3, schedule__training_cells=3
    )


def test_the_longest_path_fits_a_micro_step() -> None:
    validate(config(model__max_context=2048, trainer__tokens_per_micro_step=2048))
    assert "trainer.tokens_per_micro_step=2048" in refusal(
        model__max_context=2049, trainer__tokens_per_micro_step=2048
    )


def test_the_longest_call_fits_the_pool() -> None:
    assert "engine.pool_tokens=2047" in refusal(model__max_context=2048, engine__pool_tokens=2047)


def test_the_overall_limit_lies_beyond_the_harness_limit() -> None:
    text = refusal(harness__timeout_s=150.0, harness__overall_timeout_s=150.0)
    assert "harness.overall_timeout_s=150.0" in text and "set harness.overall_timeout_s=300" in text


def test_a_replay_weight_needs_tokens() -> None:
    validate(config(objective__replay_weight=0.5, objective__replay_tokens=512))
    assert "objective.replay_weight=0.5" in refusal(objective__replay_weight=0.5)


@pytest.mark.parametrize("seed", [0, 1, 40])
def test_held_out_tasks_are_never_training_tasks(seed: int) -> None:
    run = config(seed=seed)
    first = run.tasks.train_seed + seed * 100_000
    heldout = {heldout_query(run.tasks, position) for position in range(run.tasks.heldout)}
    assert heldout.isdisjoint(training_query(run.tasks, seed, GroupId(group)) for group in range(1000))
    for start in (first, first + 99_999, first - run.tasks.heldout + 1):
        assert "overlap the training tasks" in refusal(seed=seed, tasks__heldout_seed=start)
    for start in (first - run.tasks.heldout, first + 100_000):
        validate(replace(run, tasks=replace(run.tasks, heldout_seed=start)))


def test_a_channel_is_not_given_up_while_others_join() -> None:
    assert "transport.silent_s=5 must be more" in refusal(transport__silent_s=5.0, transport__join_s=5.0)
