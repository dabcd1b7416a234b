"""What a person who mistypes a key or a value is told: the key, the reason, and what would do."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gyre_hpc.composition import compose, conf_dir
from gyre_hpc.config import RunConfig, load_run_config, save_run_config
from gyre_hpc.config_keys import known_keys, nearest_key
from gyre_hpc.errors import ConfigError, MissingInput


def refusal(*overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        compose(list(overrides))
    assert caught.value.exit_code == 2
    return caught.value


@pytest.mark.parametrize(
    ("override", "key", "meant"),
    [
        ("sede=3", "sede", "seed"),
        ("schdule=gyre", "schdule", "schedule"),
        ("schedule.polcy=gyre", "schedule.polcy", "schedule.policy"),
        ("shedule.polcy=gyre", "shedule.polcy", "schedule.policy"),
        ("cluster.cell.rankz=2", "cluster.cell.rankz", "cluster.cell.ranks"),
        ("+schedule.stepz=1", "schedule.stepz", "schedule.steps"),
        ("learning_rate=1e-3", "learning_rate", "trainer.learning_rate"),
        ("nowhere.learning_rate=1e-3", "nowhere.learning_rate", "trainer.learning_rate"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_valid_name(override: str, key: str, meant: str) -> None:
    error = refusal(override)
    assert f"'{key}': no such key" in error.message
    assert error.fix == f"did you mean '{meant}'?"


def test_a_key_like_no_other_is_answered_with_what_its_section_has() -> None:
    assert refusal("+cluster.cell.zzz=1").fix == "cluster.cell has: ranks, nodes, cpus_per_rank, mem, gres"
    assert "--help" in refusal("+zzz=1").fix


def test_every_valid_key_is_nearest_to_itself_and_to_its_typo() -> None:
    for key in known_keys(RunConfig):
        assert nearest_key(RunConfig, key) == key
        assert nearest_key(RunConfig, f"{key}_") == key


def test_an_entry_of_a_mapping_is_added_with_a_plus() -> None:
    assert refusal("harness.env.DEBUG=1").fix == "to add an entry: +harness.env.DEBUG=VALUE"
    assert compose(["+harness.env.DEBUG=1"]).harness.env == {"DEBUG": "1"}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("schedule.steps=abc", "a whole number"),
        ("seed=1.5", "a whole number"),
        ("schedule.steps=null", "a whole number"),
        ("trainer.learning_rate=fast", "a number"),
        ("trust_tasks=maybe", "true or false"),
        ("tasks.readonly=3", "a list of texts, as in [a,b]"),
        ("harness.env=[1]", "a mapping of texts, as in {a: b}"),
    ],
)
def test_a_value_of_the_wrong_type_names_key_value_and_type(override: str, expected: str) -> None:
    key = override.partition("=")[0]
    error = refusal(override)
    assert error.message.startswith(f"{override}: ")
    assert error.fix == f"{key} is {expected}"
    assert "object_type" not in str(error)


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("schedule.policy=gyr", "did you mean schedule.policy=gyre?"),
        ("objective.kind=grp", "did you mean objective.kind=grpo?"),
        ("harness.dialect=openai", "did you mean harness.dialect=openai-chat?"),
        ("tasks.sandbox=docker", "did you mean tasks.sandbox="),
        ("engine.kind=vllm", "did you mean engine.kind=sglang?"),
    ],
)
def test_a_wrong_choice_lists_the_allowed_ones(override: str, hint: str) -> None:
    error = refusal(override)
    assert error.message.startswith(f"{override} is not one of ")
    assert error.fix.startswith(hint)


def test_a_wrong_choice_of_a_group_lists_what_conf_has() -> None:
    error = refusal("schedule=gyyre")
    assert error.message == "schedule=gyyre: no such choice"
    assert error.fix == "did you mean schedule=gyre? choices of schedule: async, colocate, gyre"
    assert "quickstart" in refusal("experiment=quickstrat").fix
    assert "engine=3" in refusal("engine=3").message


def test_what_is_no_override_at_all_is_answered_with_the_form() -> None:
    assert refusal("schedule.steps").fix.startswith("write KEY=VALUE")


def test_a_sweep_without_the_flag_is_told_the_flag() -> None:
    assert "--multirun" in refusal("schedule=gyre,async").message


def test_a_required_value_that_is_missing_is_named() -> None:
    assert refusal("~model").message == "model.path: a value is required"


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of conf/ that a test may damage."""
    folder = tmp_path / "conf"
    shutil.copytree(conf_dir(), folder)
    monkeypatch.setenv("GYRE_CONF", str(folder))
    return folder


def test_an_unknown_key_in_a_file_of_conf_names_the_file(conf: Path) -> None:
    (conf / "experiment" / "mine.yaml").write_text("# @package _global_\nobjective:\n  clip_hi: 0.3\n")
    error = refusal("experiment=mine")
    assert error.message == "conf/experiment/mine.yaml: config key 'objective.clip_hi': no such key"
    assert error.fix == "did you mean 'objective.clip_high'?"


def test_broken_yaml_names_file_and_line(conf: Path) -> None:
    (conf / "experiment" / "mine.yaml").write_text("schedule: [\n")
    assert '/experiment/mine.yaml", line 2' in refusal("experiment=mine").message


def test_a_folder_without_configuration_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GYRE_CONF", str(tmp_path))
    with pytest.raises(MissingInput, match=str(tmp_path)) as caught:
        compose([])
    assert "GYRE_CONF" in caught.value.fix


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nmodel: {path: x, pth: y}\n", "config key 'model.pth': no such key"),
        ("model: {path: x}\nschedule: {steps: many}\n", "schedule.steps: "),
        ("model: {path: x}\nschedule: {policy: greedy}\n", "schedule.policy=greedy is not one of"),
        ("- 1\n- 2\n", "not a mapping"),
        ("a: [\n", "line 2"),
    ],
)
def test_a_damaged_frozen_configuration_names_the_file_and_the_key(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_run_config(tmp_path)
    assert caught.value.message.startswith(f"{tmp_path}/config.yaml: ")
    assert message in caught.value.message


def test_a_folder_without_a_frozen_configuration_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(MissingInput, match=f"{tmp_path}/config.yaml"):
        load_run_config(tmp_path)


def test_what_was_frozen_is_what_is_loaded(tmp_path: Path) -> None:
    config = compose(["experiment=quickstart", "seed=3", "+harness.env.A=b", "tasks.readonly=[/opt]"])
    save_run_config(config, tmp_path)
    assert load_run_config(tmp_path) == config
