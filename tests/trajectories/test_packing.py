"""From a group to micro-steps: the laws of weights and advantages, and what packing may and may not move."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_hpc.bench.tree import call_record
from gyre_hpc.config import RunConfig
from gyre_hpc.errors import ConfigError
from gyre_hpc.records import CallRecord, ExecutionId, GroupId, LeafRole
from gyre_hpc.trajectories.micro_steps import MicroStep
from gyre_hpc.trajectories.packing import Packing
from gyre_hpc.trajectories.process import Attempt, ProcessedGroup, Settings, process_group
from gyre_hpc.trajectories.strands import Strands
from gyre_hpc.trajectories.tree import Tree, build_tree

GROUP = GroupId(4)
LIMIT = 80
ROOMY = Settings(seed=1, j_max=5, eps=0.1, std=True, packing=Packing(LIMIT, 4))


def with_packing(
    settings: Settings, tokens: int = LIMIT, micro_steps: int = 4, rows: bool = False
) -> Settings:
    return replace(settings, packing=Packing(tokens, micro_steps, rows))


def tree_of(calls: list[CallRecord]) -> Tree:
    strands = Strands()
    for call in calls:
        strands.add(call)
    return build_tree(strands)


@st.composite
def attempts(draw: st.DrawFn) -> list[Attempt]:
    """A group of executions whose paths are at most LIMIT tokens long."""
    found: list[Attempt] = []
    for execution in range(draw(st.integers(2, 5))):
        calls: list[CallRecord] = []
        for ordinal in range(draw(st.integers(1, 7))):
            base = np.zeros(0, np.int32)
            if calls and draw(st.integers(0, 4)):
                earlier = draw(st.sampled_from(calls))
                base = np.concatenate([earlier.prompt_ids, earlier.output_ids])
            delta = draw(st.lists(st.integers(0, 50), min_size=1, max_size=5))
            output = draw(st.lists(st.integers(0, 50), max_size=6))
            prompt = np.concatenate([base, np.array(delta, np.int32)])
            role = draw(st.sampled_from(LeafRole))
            calls.append(
                call_record(ordinal, prompt, np.array(output, np.int32), role=role, execution=execution)
            )
        score = draw(st.sampled_from([None, 0.0, 0.25, 1.0]))
        found.append(
            Attempt(ExecutionId(execution), score, "overall_timeout" if score is None else "", tree_of(calls))
        )
    return found


def presented(group: ProcessedGroup) -> dict[tuple[int, tuple[int, ...], int], list[tuple[float, ...]]]:
    """Per (execution, context, target): weight, advantage, log-prob, version. The context is what the target's row sees."""
    found = defaultdict(list)
    for step in group.micro_steps:
        for at in range(step.targets):
            row = int(step.row[at])
            sees = (step.tin <= step.tin[row]) & (step.tin[row] < step.tout) & (step.pos <= step.pos[row])
            key = (
                int(step.path_execution[step.path[at]]),
                tuple(step.ids[sees].tolist()),
                int(step.target[at]),
            )
            columns = (step.weight, step.advantage, step.behaviour_logprob, step.version)
            found[key].append(tuple(float(column[at]) for column in columns))
    return {key: sorted(rows) for key, rows in found.items()}


def path_targets(group: ProcessedGroup) -> list[tuple[int, ...]]:
    """Target ids of every path, as a sorted list: T_j however the paths are laid out."""
    return sorted(
        tuple(s.target[s.path == path].tolist()) for s in group.micro_steps for path in range(s.paths)
    )


@settings(max_examples=60, deadline=None)
@given(attempts(), st.integers(1, 6))
def test_each_executions_weight_is_one_for_any_j_max(group: list[Attempt], j_max: int) -> None:
    processed = process_group(GROUP, group, replace(ROOMY, j_max=j_max))
    weight: dict[int, float] = defaultdict(float)
    for step in processed.micro_steps:
        step.validate()
        for path, execution in enumerate(step.path_execution.tolist()):
            weight[execution] += float(step.weight[step.path == path].sum())
    assert all(total == pytest.approx(1.0, rel=1e-5) for total in weight.values())


@settings(max_examples=60, deadline=None)
@given(attempts(), st.integers(1, 8), st.integers(50, 4000))
def test_representing_the_same_calls_otherwise_changes_nothing(
    group: list[Attempt], micro_steps: int, tokens: int
) -> None:
    reference = process_group(GROUP, group, ROOMY)
    for rows in (False, True):
        other = process_group(GROUP, group, with_packing(ROOMY, max(tokens, LIMIT), micro_steps, rows))
        assert presented(other) == presented(reference)
        assert path_targets(other) == path_targets(reference)
        assert (other.rewards, other.trained_tokens, other.paths) == (
            reference.rewards,
            reference.trained_tokens,
            reference.paths,
        )


@settings(max_examples=60, deadline=None)
@given(attempts(), st.integers(1, 8), st.booleans())
def test_micro_steps_keep_to_their_size_and_number(
    group: list[Attempt], micro_steps: int, rows: bool
) -> None:
    processed = process_group(GROUP, group, with_packing(ROOMY, LIMIT, micro_steps, rows))
    assert all(step.tokens <= LIMIT for step in processed.micro_steps)
    assert len(processed.micro_steps) >= min(micro_steps, processed.paths)
    assert [step.id for step in processed.micro_steps] == [
        f"4.{i}" for i in range(len(processed.micro_steps))
    ]
    assert processed.paths_cut == 0


@settings(max_examples=50, deadline=None)
@given(attempts())
def test_processing_is_reproducible_and_independent_of_order(group: list[Attempt]) -> None:
    first, second = (process_group(GROUP, order, ROOMY) for order in (group, group[::-1]))
    for a, b in zip(first.micro_steps, second.micro_steps, strict=True):
        for name, array in a.to_arrays().items():
            np.testing.assert_array_equal(array, b.to_arrays()[name])


def test_advantages_come_from_valid_rewards_only() -> None:
    calls = [call_record(0, np.array([1], np.int32), np.array([2], np.int32))]
    scores = [1.0, 0.0, None]
    group = [
        Attempt(ExecutionId(e), score, "infrastructure", tree_of(calls)) for e, score in enumerate(scores)
    ]
    processed = process_group(GROUP, group, ROOMY)
    assert (processed.valid, processed.rewards) == (2, (1.0, 0.0))
    found = {int(s.path_execution[0]): float(s.advantage[0]) for s in processed.micro_steps}
    assert found == pytest.approx({0: 0.5 / 0.6, 1: -0.5 / 0.6})


def test_a_group_with_fewer_than_two_valid_executions_is_dead_and_says_why() -> None:
    calls = [call_record(0, np.array([1], np.int32), np.array([2], np.int32))]
    group = [
        Attempt(ExecutionId(0), 1.0, "", tree_of(calls)),
        Attempt(ExecutionId(1), 0.0, "", None),
        Attempt(ExecutionId(2), None, "overall_timeout", tree_of(calls)),
    ]
    processed = process_group(GROUP, group, ROOMY)
    assert (processed.valid, processed.micro_steps) == (1, [])
    assert processed.reason == "1 of 3 executions valid: 1 no model call, 1 overall_timeout"


def test_equal_rewards_consume_the_group_without_work() -> None:
    calls = [call_record(0, np.array([1], np.int32), np.array([2], np.int32))]
    group = [Attempt(ExecutionId(e), 0.5, "", tree_of(calls)) for e in range(3)]
    processed = process_group(GROUP, group, ROOMY)
    assert (processed.valid, processed.micro_steps, processed.reason) == (3, [], "")


def long_chain(turns: int) -> Tree:
    """Turns of 10 tokens: 4 of context, 6 sampled."""
    context, calls = np.zeros(0, np.int32), []
    for turn in range(turns):
        prompt = np.concatenate([context, np.arange(4, dtype=np.int32) + 100 * turn])
        output = np.arange(6, dtype=np.int32) + 100 * turn + 50
        calls.append(call_record(turn, prompt, output))
        context = np.concatenate([prompt, output])
    return tree_of(calls)


def cut_group(limit: int) -> ProcessedGroup:
    group = [Attempt(ExecutionId(e), float(e), "", long_chain(turns)) for e, turns in enumerate((6, 2))]
    return process_group(GROUP, group, with_packing(ROOMY, limit, 1))


def test_a_path_too_long_is_cut_behind_a_call_into_paths_of_their_own() -> None:
    whole, cut = cut_group(100), cut_group(35)
    assert (whole.paths, whole.paths_cut, cut.paths, cut.paths_cut) == (2, 0, 3, 1)
    assert all(step.tokens <= 35 for step in cut.micro_steps)
    parts = [t for t in path_targets(cut) if t[0] in (50, 350) and len(t) > 12]
    assert [len(part) for part in parts] == [18, 18]
    assert sum(float(s.weight.sum()) for s in cut.micro_steps) == pytest.approx(2.0)
    assert whole.trained_tokens == cut.trained_tokens


def test_a_later_part_sees_the_whole_calls_before_it_that_fit_at_their_own_positions() -> None:
    step = next(s for s in cut_group(45).micro_steps if 550 in s.target.tolist())
    root = next(s for s in step.segments() if 550 in step.ids[s.start : s.end])
    assert step.pos[root.start] == 20
    assert step.ids[root.start] == 200


def test_a_cut_never_falls_inside_an_answer() -> None:
    first, answer = np.arange(4, dtype=np.int32), np.arange(50, 60, dtype=np.int32)
    half = np.concatenate([first, answer[:5], np.array([99], np.int32)])
    long = np.concatenate([first, answer, np.array([100], np.int32)])
    calls = [
        call_record(0, first, answer),
        call_record(1, half, np.array([98], np.int32), accepted=False),
        call_record(2, long, np.arange(70, 76, dtype=np.int32)),
    ]
    group = [Attempt(ExecutionId(e), float(e), "", tree_of(calls)) for e in range(2)]
    processed = process_group(GROUP, group, with_packing(ROOMY, 13, 1))
    assert path_targets(processed) == sorted([tuple(range(50, 60)), tuple(range(70, 76))] * 2)


def test_a_later_part_starts_inside_a_context_that_is_too_long_for_it() -> None:
    context, calls = np.zeros(0, np.int32), []
    for turn in range(3):
        prompt = np.concatenate([context, np.arange(30, dtype=np.int32)])
        context = np.concatenate([prompt, np.arange(6, dtype=np.int32) + 50 + 10 * turn])
        calls.append(call_record(turn, prompt, context[-6:]))
    group = [Attempt(ExecutionId(e), float(e), "", tree_of(calls)) for e in range(2)]
    processed = process_group(GROUP, group, with_packing(ROOMY, 20, 1))
    assert [step.tokens for step in processed.micro_steps] == [20] * 6
    assert path_targets(processed) == sorted([tuple(range(b, b + 6)) for b in (50, 60, 70)] * 2)


def test_what_does_not_fit_together_gets_its_own_micro_step() -> None:
    prompt = np.arange(50, dtype=np.int32)
    calls = [call_record(0, prompt, np.arange(10, dtype=np.int32))]
    group = [Attempt(ExecutionId(e), float(e), "", tree_of(calls)) for e in range(3)]
    processed = process_group(GROUP, group, with_packing(ROOMY, 100, 1))
    assert [step.tokens for step in processed.micro_steps] == [60, 60, 60]


def test_an_answer_longer_than_a_micro_step_is_refused_with_the_key() -> None:
    with pytest.raises(ConfigError, match="tokens_per_micro_step=6"):
        cut_group(6)


def test_paths_of_one_execution_share_their_prefix_and_rows_do_not() -> None:
    prefix = np.arange(20, dtype=np.int32)
    calls = [call_record(i, prefix, np.array([50 + i], np.int32)) for i in range(3)]
    group = [Attempt(ExecutionId(e), float(e), "", tree_of(calls)) for e in range(2)]

    def tokens(rows: bool) -> int:
        steps: list[MicroStep] = process_group(GROUP, group, with_packing(ROOMY, 1000, 1, rows)).micro_steps
        return sum(step.tokens for step in steps)

    assert (tokens(rows=False), tokens(rows=True)) == (2 * 23, 2 * 3 * 21)


def test_context_behind_the_last_target_is_not_computed() -> None:
    prompt = np.arange(4, dtype=np.int32)
    long = np.concatenate([prompt, np.array([9], np.int32), np.arange(30, dtype=np.int32)])
    lost = call_record(1, long, np.array([3], np.int32), accepted=False)
    calls = [call_record(0, prompt, np.array([9], np.int32)), lost]
    group = [Attempt(ExecutionId(e), float(e), "", tree_of(calls)) for e in range(2)]
    assert [s.tokens for s in process_group(GROUP, group, ROOMY).micro_steps] == [5, 5]


def test_settings_come_from_the_run_configuration() -> None:
    run = RunConfig()
    run.trainer.packing = "rows"
    assert Settings.of(run) == Settings(0, 5, 0.1, True, Packing(4096, 4, rows=True))
