"""Which task a query names."""

from __future__ import annotations

import pytest

from gyre_hpc.config import TasksConfig
from gyre_hpc.errors import ConfigError
from gyre_hpc.executions.tasks import task_source


def test_a_query_names_family_and_seed() -> None:
    assert task_source(TasksConfig(family="patchkit")).task("patchkit:1000003").id == "patchkit:1000003"


@pytest.mark.parametrize("query", ["other:1", "patchkit:", "patchkit:x", "patchkit:-1", "1"])
def test_a_query_of_another_shape_is_refused(query: str) -> None:
    with pytest.raises(ConfigError, match="patchkit:1000000"):
        task_source(TasksConfig()).task(query)


def test_a_family_can_be_named_by_its_factory() -> None:
    name = "tests.executions.toy_family/ToyFamily"
    assert task_source(TasksConfig(family=name)).task(f"{name}:4").id == "toy:4"


@pytest.mark.parametrize(
    ("name", "said"), [("patchkid", "tasks.family=patchkit"), ("no.such/Family", "no.such")]
)
def test_an_unknown_family_is_named(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        task_source(TasksConfig(family=name))


def test_a_family_that_cannot_be_made_names_its_keys() -> None:
    with pytest.raises(ConfigError, match="max_modules"):
        task_source(TasksConfig(max_modules=1))
