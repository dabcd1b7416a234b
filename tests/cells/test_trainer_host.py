"""A trainer's turns in a cell, taken twice or in any order: an open gradient is in it once, whatever happened in between."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_hpc.cells.trainer_host import TrainerHost
from gyre_hpc.config import RunConfig
from gyre_hpc.errors import IllegalTransition
from gyre_hpc.layout import RunLayout
from gyre_hpc.records import Version

Arrays = Mapping[str, npt.NDArray[Any]]


class Trainer:
    """Refuses what training.trainer.Trainer refuses; its gradient is lost when it is off-loaded, as on a device."""

    def __init__(self) -> None:
        self.total, self.open, self.offloaded, self.saved = 0.0, False, True, 0
        self.offload_bytes = 0

    @property
    def has_gradient(self) -> bool:
        return self.open

    def gradient(self) -> dict[str, npt.NDArray[Any]]:
        return {"grad": np.array([self.total])}

    def add(self, arrays: Arrays) -> None:
        self._require(not self.offloaded)
        self.total, self.open = self.total + float(arrays["grad"][0]), True

    def clear(self) -> None:
        self.total, self.open = 0.0, False

    def offload(self) -> None:
        self._require(not self.open)
        self.total, self.offloaded = 0.0, True

    def restore(self) -> None:
        self.offloaded = False

    def save_checkpoint(self, folder: Path, version: Version) -> None:
        self._require(not self.offloaded and not self.open)
        self.saved += 1

    def weights(self) -> dict[str, npt.NDArray[Any]]:
        self._require(not self.offloaded)
        return {"w": np.zeros(1)}

    @staticmethod
    def _require(legal: bool) -> None:
        if not legal:
            raise IllegalTransition("a trainer would refuse this")


def host(folder: Path) -> tuple[TrainerHost, Trainer]:
    made, trainer = TrainerHost(RunConfig(), RunLayout(folder)), Trainer()
    made._trainer = cast(Any, trainer)
    return made, trainer


async def test_leaving_and_entering_twice_neither_drops_nor_doubles_the_open_gradient(tmp_path: Path) -> None:
    made, trainer = host(tmp_path)
    await made.enter()
    trainer.add({"grad": np.array([7.0])})
    await made.leave()
    await made.leave()
    assert trainer.offloaded and not trainer.open
    await made.enter()
    await made.enter()
    assert (trainer.total, trainer.open) == (7.0, True)
    made.close()


@pytest.mark.parametrize("resident", [True, False])
async def test_a_checkpoint_in_the_middle_of_a_batch_leaves_its_gradient_where_it_was(
    tmp_path: Path, resident: bool
) -> None:
    made, trainer = host(tmp_path)
    await made.enter()
    trainer.add({"grad": np.array([7.0])})
    if not resident:
        await made.leave()
    await made.publish(tmp_path / "checkpoints" / "v", Version(1), resident=resident)
    assert trainer.saved == 1 and trainer.offloaded is not resident
    await made.enter()
    assert trainer.total == 7.0
    made.close()


TURNS = st.lists(st.sampled_from(["work", "leave", "enter", "publish", "clear"]), max_size=12)


@settings(deadline=None)
@given(turns=TURNS)
def test_whatever_its_turns_the_gradient_is_what_was_worked_since_it_was_cleared(turns: list[str]) -> None:
    asyncio.run(_take(turns))


async def _take(turns: list[str]) -> None:
    made, trainer = host(Path("unused"))
    await made.enter()
    inside, expected = True, 0.0
    for turn in turns:
        if turn == "work" and inside:
            trainer.add({"grad": np.array([1.0])})
            expected += 1.0
        elif turn == "leave":
            await made.leave()
            inside = False
        elif turn == "enter":
            await made.enter()
            inside = True
        elif turn == "publish":
            await made.publish(None, Version(1), resident=inside)
        elif turn == "clear":
            await made.clear()
            expected = 0.0
    await made.enter()
    assert trainer.total == expected
    made.close()
