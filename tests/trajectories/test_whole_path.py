"""From recorded calls to micro-steps against the oracle: which tokens are trained, once, with what context."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_hpc.records import CallRecord, Delivery, ExecutionId, GroupId
from gyre_hpc.trajectories.micro_steps import MicroStep
from gyre_hpc.trajectories.packing import Packing
from gyre_hpc.trajectories.process import Attempt, ProcessedGroup, Settings, process_group
from gyre_hpc.trajectories.strands import Strands
from gyre_hpc.trajectories.tree import build_tree
from tests.trajectories.histories import histories, name_of
from tests.trajectories.oracle import Name, Oracle, relative

EPS = 0.1


@dataclass
class Closed:
    """One execution of the group: its calls by ordinal, as they arrived, and its score."""

    calls: list[CallRecord]
    arrived: list[CallRecord]
    score: float | None


@st.composite
def groups(draw: st.DrawFn) -> list[Closed]:
    found = []
    for execution in range(draw(st.integers(2, 4))):
        calls = draw(histories(execution)) if draw(st.integers(0, 9)) < 9 else []
        order = draw(st.permutations(calls))
        early = [
            replace(call, delivery=Delivery.NONE, accepted=False) for call in order if draw(st.booleans())
        ]
        score = draw(st.sampled_from([float(execution), None, 0.25, 1.0]))
        found.append(Closed(calls, early + order, score))
    return found


def processed(group: list[Closed], j_max: int, packing: Packing) -> ProcessedGroup:
    attempts = []
    for execution, closed in enumerate(group):
        strands = Strands()
        for call in closed.arrived:
            strands.add(call)
        attempts.append(Attempt(ExecutionId(execution), closed.score, "excluded", build_tree(strands)))
    return process_group(GroupId(3), attempts, Settings(7, j_max, EPS, True, packing))


@dataclass(frozen=True)
class Trained:
    """One target as training sees it."""

    context: tuple[int, ...]
    position: int
    id: int
    weight: float
    advantage: float
    version: int


def trained(step: MicroStep) -> dict[int, list[tuple[int, Name, Trained]]]:
    """Targets of a micro-step by execution: (path, name, what training sees)."""
    found: dict[int, list[tuple[int, Name, Trained]]] = defaultdict(list)
    for at in range(step.targets):
        row = int(step.row[at])
        sees = (step.tin <= step.tin[row]) & (step.tin[row] < step.tout) & (step.pos <= step.pos[row])
        path = int(step.path[at])
        target = Trained(
            tuple(step.ids[sees].tolist()),
            int(step.pos[row]),
            int(step.target[at]),
            float(step.weight[at]),
            float(step.advantage[at]),
            int(step.version[at]),
        )
        found[int(step.path_execution[path])].append(
            (path, name_of(float(step.behaviour_logprob[at])), target)
        )
    return found


def by_execution(
    group: ProcessedGroup,
) -> tuple[dict[int, dict[Name, Trained]], dict[int, list[frozenset[Name]]]]:
    """Per execution: every target by name (each named once), and the sets of targets of its paths."""
    targets: dict[int, dict[Name, Trained]] = defaultdict(dict)
    paths: dict[int, list[frozenset[Name]]] = defaultdict(list)
    for step in group.micro_steps:
        step.validate()
        for execution, rows in trained(step).items():
            members: dict[int, set[Name]] = defaultdict(set)
            for path, name, target in rows:
                assert name not in targets[execution], f"{name} of execution {execution} is trained twice"
                targets[execution][name] = target
                members[path].add(name)
            paths[execution] += map(frozenset, members.values())
    return targets, paths


def valid(group: list[Closed]) -> dict[int, float]:
    """Rewards of the executions that count."""
    return {e: closed.score for e, closed in enumerate(group) if closed.score is not None and closed.calls}


def longest(group: list[Closed]) -> int:
    return max((len(c.prompt_ids) + len(c.output_ids) for closed in group for c in closed.calls), default=1)


@settings(max_examples=120)
@given(groups(), st.integers(1, 6), st.integers(0, 60), st.integers(1, 5), st.booleans())
def test_exactly_the_tokens_of_the_design_are_trained_once_in_the_context_they_were_sampled_in(
    group: list[Closed], j_max: int, room: int, micro_steps: int, rows: bool
) -> None:
    found = processed(group, j_max, Packing(longest(group) + room, micro_steps, rows))
    rewards = valid(group)
    assert (found.valid, found.rewards) == (len(rewards), tuple(rewards.values()))
    targets, paths = by_execution(found)
    if len(rewards) < 2 or len(set(rewards.values())) == 1:
        assert not found.micro_steps
        return
    assert found.paths_cut == 0
    advantage = dict(zip(rewards, relative(list(rewards.values()), EPS), strict=True))
    for execution in rewards:
        oracle = Oracle.of(group[execution].calls)
        assert oracle.explains(paths[execution], j_max)
        for name, target in targets[execution].items():
            token = oracle.targets()[name]
            before = [above.id for above in token.path()[:-1]]
            call = oracle.calls[token.call]
            sampled_behind = [*call.prompt_ids.tolist(), *call.output_ids.tolist()[: token.place]]
            assert list(target.context) == before == sampled_behind
            assert (target.position, target.id) == (len(before) - 1, token.id)
            assert target.version == token.call
            assert target.weight == pytest.approx(1 / len(targets[execution]))
            assert target.advantage == pytest.approx(advantage[execution], rel=1e-5)
    assert set(targets) <= set(rewards)


@settings(max_examples=60)
@given(groups(), st.integers(0, 6), st.booleans())
def test_paths_that_must_be_cut_train_the_same_tokens_and_see_the_end_of_their_context(
    group: list[Closed], room: int, rows: bool
) -> None:
    whole, _ = by_execution(processed(group, 5, Packing(longest(group), 1, rows)))
    answers = [len(call.output_ids) for closed in group for call in closed.calls]
    parts, _ = by_execution(processed(group, 5, Packing(max(answers, default=0) + 1 + room, 1, rows)))
    assert {e: set(names) for e, names in parts.items()} == {e: set(names) for e, names in whole.items()}
    for execution, names in parts.items():
        for name, part in names.items():
            full = whole[execution][name]
            assert part.context and full.context[-len(part.context) :] == part.context
            assert replace(part, context=full.context) == full
