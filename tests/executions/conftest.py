"""A launcher, and the two sandboxes every behaviour of executions must hold in."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from gyre_hpc.executions.launcher import Launcher
from gyre_hpc.executions.sandbox import Sandbox
from tests.executions.alive import Alive


@pytest_asyncio.fixture
async def launcher() -> AsyncIterator[Launcher]:
    launcher = Launcher()
    yield launcher
    await launcher.close()


@pytest.fixture(params=["host", pytest.param("namespaces", marks=pytest.mark.userns)])
def sandbox(request: pytest.FixtureRequest, tmp_path: Path) -> Sandbox:
    return Sandbox(request.param == "namespaces", tmp_path)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "attempt" / "workspace"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def alive(tmp_path: Path) -> Iterator[Alive]:
    pipe = Alive(tmp_path / "alive")
    yield pipe
    pipe.close()
