"""The schema, its documentation and the groups of conf/ agree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gyre_hpc.composition import compose, conf_dir
from gyre_hpc.config import RunConfig
from gyre_hpc.config_keys import field_docs, known_keys, reference, section_type
from gyre_hpc.hydra_app import GROUPS, help_text

ROOT = Path(__file__).resolve().parents[2]
CHOICES = sorted(
    f"{path.parent.name}={path.stem}" for path in conf_dir().glob("*/*.yaml") if path.parent.name in GROUPS
)


def test_every_key_says_what_it_means() -> None:
    keys = {key for key, item in known_keys(RunConfig).items() if section_type(item) is None}
    rows = {key: meaning for key, _, meaning in reference(RunConfig)}
    assert set(rows) == keys
    assert [key for key, meaning in rows.items() if len(meaning) < 8] == []


def test_every_section_says_what_it_is() -> None:
    sections = [section_type(item) for item in known_keys(RunConfig).values()]
    assert all(section.__doc__ for section in sections if section is not None)


def test_a_meaning_is_the_string_under_the_field() -> None:
    assert field_docs(RunConfig)["seed"] == "Seed of everything drawn in the run."


def test_the_reference_page_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "tools" / "make_config_reference.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_help_lists_every_group_choice_and_key() -> None:
    text = help_text()
    for choice in CHOICES:
        group, name = choice.split("=")
        assert f"  {group}: " in text and name in text
    for key, _, _ in reference(RunConfig):
        assert f"  {key} = " in text


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_of_every_group_composes(choice: str) -> None:
    assert compose([choice]).model.path


def test_every_group_of_conf_is_known() -> None:
    of_the_simulator = {"simulate"}
    assert {path.parent.name for path in conf_dir().glob("*/*.yaml")} == set(GROUPS) | of_the_simulator


def test_the_quickstart_is_the_measured_recipe() -> None:
    run = compose(["experiment=quickstart"])
    assert (run.objective.kind, run.schedule.steps_per_burst, run.objective.eps) == ("grpo", 1, 0.1)
    assert run.cluster.cells == 3 and run.schedule.extra_dispatch == 0.0
    assert run.gateway.max_calls > 0


def test_an_override_wins_over_the_experiment() -> None:
    assert compose(["experiment=quickstart", "schedule.steps=3"]).schedule.steps == 3


def test_importing_the_schema_imports_nothing_heavy() -> None:
    probe = (
        "import sys, gyre_hpc.config, gyre_hpc.hydra_app, gyre_hpc.cli;"
        "print([m for m in ('torch', 'h5py', 'mpi4py', 'plotly', 'aiohttp') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
