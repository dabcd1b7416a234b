"""patchkit tasks: what a workspace looks like, how it is scored, and why no constant edit wins."""

from __future__ import annotations

import itertools
import json
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_hpc.executions.patchkit import PatchkitFamily, PatchkitTask
from gyre_hpc.executions.patchkit.family import CONSTANTS, HIDDEN_INPUTS, PHRASES, apply

FAMILY = PatchkitFamily(max_modules=6)


def _score(task: PatchkitTask, workspace: Path, hidden: Path) -> tuple[float, str]:
    command = [part.format(workspace=workspace) for part in task.evaluator(hidden)]
    answer = json.loads(
        subprocess.run(command, capture_output=True, check=True, timeout=60, text=True).stdout
    )
    return answer["score"], answer["evidence"]


def _several_unwritten(minimum: int, given_modules: int = 1) -> PatchkitTask:
    tasks = (FAMILY.task(seed) for seed in itertools.count(700_000))
    return next(
        t for t in tasks if len(t.unwritten) >= minimum and len(t.modules) - len(t.unwritten) >= given_modules
    )


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    workspace, hidden = tmp_path / "workspace", tmp_path / "hidden"
    workspace.mkdir()
    hidden.mkdir()
    return workspace, hidden


@given(st.integers(min_value=0, max_value=2**31))
def test_a_task_is_a_function_of_its_seed_and_has_work_to_do(seed: int) -> None:
    task = FAMILY.task(seed)
    assert task == FAMILY.task(seed)
    assert 2 <= len(task.modules) <= 6
    assert task.unwritten
    assert all(f" {m.name}" in task.instruction for m in task.modules)


def test_sizes_are_heavy_tailed() -> None:
    sizes = [len(FAMILY.task(seed).modules) for seed in range(2000)]
    assert 0.4 < sizes.count(2) / len(sizes) < 0.65
    assert 0.1 < sizes.count(6) / len(sizes) < 0.25


def test_max_modules_outside_the_names_is_refused() -> None:
    with pytest.raises(ValueError, match="max_modules=9"):
        PatchkitFamily(max_modules=9)


def test_doing_nothing_scores_zero_and_each_finished_module_earns_its_share(
    folders: tuple[Path, Path],
) -> None:
    workspace, hidden = folders
    task = _several_unwritten(2)
    task.prepare(workspace)
    task.hidden(hidden)
    assert _score(task, workspace, hidden)[0] == 0.0
    for done, module in enumerate(task.unwritten, start=1):
        path = workspace / f"{module.name}.py"
        path.write_text(path.read_text().replace("None", f"x {module.operator} {module.constant}"))
        score, evidence = _score(task, workspace, hidden)
        assert score == pytest.approx(done / len(task.unwritten))
        assert f"{module.name} 4/4" in evidence


def test_breaking_a_given_module_takes_credit_away_but_never_below_zero(folders: tuple[Path, Path]) -> None:
    workspace, hidden = folders
    task = _several_unwritten(2)
    task.prepare(workspace)
    task.hidden(hidden)
    given_module = next(m for m in task.modules if m.written)
    (workspace / f"{given_module.name}.py").write_text("def f(x):\n    return None\n")
    assert _score(task, workspace, hidden)[0] == 0.0
    for module in task.unwritten:
        (workspace / f"{module.name}.py").write_text(
            f"def f(x):\n    return x {module.operator} {module.constant}\n"
        )
    score, evidence = _score(task, workspace, hidden)
    assert score == pytest.approx(1 - 1 / len(task.unwritten))
    assert f"{given_module.name} 0/4 given" in evidence


@pytest.mark.parametrize(
    "hostile",
    ["import os\nos._exit(0)\n", "print('{\"score\": 1.0}')\nf = lambda x: 10**400000\n", "def f(x):\n"],
)
def test_a_module_that_exits_prints_or_does_not_parse_costs_only_its_own_cases(
    folders: tuple[Path, Path], hostile: str
) -> None:
    workspace, hidden = folders
    task = _several_unwritten(2, given_modules=0)
    task.prepare(workspace)
    task.hidden(hidden)
    first, *others = task.unwritten
    (workspace / f"{first.name}.py").write_text(hostile)
    for module in others:
        (workspace / f"{module.name}.py").write_text(
            f"def f(x):\n    return x {module.operator} {module.constant}\n"
        )
    assert _score(task, workspace, hidden)[0] == pytest.approx(len(others) / len(task.unwritten))


def test_the_visible_check_names_every_module_and_only_those_asked_for(folders: tuple[Path, Path]) -> None:
    workspace, _ = folders
    task = _several_unwritten(1)
    task.prepare(workspace)

    def check(*names: str) -> list[str]:
        run = subprocess.run(
            ["sh", "check", *names], cwd=workspace, capture_output=True, timeout=60, text=True
        )
        return run.stdout.splitlines()

    assert check() == [f"{m.name} {'ok' if m.written else 'FAIL'}" for m in task.modules]
    module = task.unwritten[0]
    edit = f"sed -i '3s/.*/    return x {module.operator} {module.constant}/' {module.name}.py"
    subprocess.run(["bash", "-c", edit], cwd=workspace, check=True, timeout=60)
    assert check(module.name) == [f"{module.name} ok"]


def test_hidden_inputs_are_not_in_the_workspace(folders: tuple[Path, Path]) -> None:
    workspace, _ = folders
    task = FAMILY.task(700_001)
    task.prepare(workspace)
    names: dict[str, dict[str, tuple[float, tuple[tuple[int, int], ...]]]] = {}
    exec((workspace / "cases.py").read_text(), names)
    shown = {x for _, cases in names["tests"].values() for x, _ in cases}
    assert not shown & set(HIDDEN_INPUTS)


def test_no_constant_edit_is_worth_much() -> None:
    def worth(operator: str, constant: int) -> float:
        scores = []
        for seed in range(700_000, 700_300):
            unwritten = FAMILY.task(seed).unwritten
            hits = [apply(operator, x, constant) == m.expected(x) for m in unwritten for x in HIDDEN_INPUTS]
            scores.append(sum(hits) / len(hits))
        return sum(scores) / len(scores)

    assert max(worth(o, c) for o in PHRASES for c in CONSTANTS) < 0.13
