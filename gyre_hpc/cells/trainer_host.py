"""The trainer of a cell in a thread of its own: the event loop never waits for tensor work.

One thread runs one operation at a time in the order of the calls. The trainer is made when the cell starts, because
its imports take seconds. A gradient that is open when the cell must leave training, or write a checkpoint, is set aside
in host memory and put back, never lost (core only: satellites hand theirs over first).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy.typing as npt

from gyre_hpc.config import RunConfig
from gyre_hpc.layout import RunLayout
from gyre_hpc.models.shape import read_shape
from gyre_hpc.records import Version
from gyre_hpc.trajectories.micro_steps import MicroStep

if TYPE_CHECKING:
    from gyre_hpc.training.trainer import Trainer

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
Result = TypeVar("Result")


class TrainerHost:
    """The trainer of one cell. `version` is what its weights are: 0 is the run's starting model."""

    def __init__(self, config: RunConfig, layout: RunLayout) -> None:
        self._config = config
        self._layout = layout
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gyre-trainer")
        self._trainer: Trainer | None = None
        self._untouched = False
        self._aside: Arrays | None = None
        self.version = Version(0)
        self.layout_digest = ""

    def begin(self) -> asyncio.Future[object]:
        """Make the trainer in the background; operations queue behind it and meet its errors. Done once it holds no device memory."""
        made: asyncio.Future[object] = asyncio.wrap_future(self._thread.submit(self._ready))
        made.add_done_callback(lambda done: done.cancelled() or done.exception())
        return made

    def close(self) -> None:
        """Take no further operation; one that runs is not waited for."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    @cached_property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient of the run's model. Raises MissingInput, ConfigError."""
        return read_shape(self._layout.model).float32_bytes

    def leaving_bytes(self, *, keeps_gradient: bool) -> int:
        """Host memory that `leave` takes: for an open gradient, if it is kept, and for what lies on a device."""
        trainer = self._trainer
        if trainer is None:
            return 0
        return trainer.offload_bytes + (self.gradient_bytes if keeps_gradient and trainer.has_gradient else 0)

    # ---- roles --------------------------------------------------------------------------------------------------

    async def leave(self) -> None:
        """Give up device memory; an open gradient is set aside."""
        await self._run(self._leave)

    async def enter(self) -> None:
        """Take device memory back, and a gradient that was set aside."""
        await self._run(self._enter)

    async def load_weights(self, arrays: Mapping[str, Array], version: Version) -> None:
        """Replace the weights. A gradient of older weights is dropped: whoever needed it has it."""
        await self._run(lambda: self._load_weights(arrays, version))

    async def restore_from(self, folder: Path, version: Version, *, resident: bool) -> Arrays:
        """Drop the gradient, load a checkpoint folder or starting model, return the weights.

        `resident`: device memory is held already.
        """
        await self._run(self._clear)
        return await self._run(lambda: self._borrowing(resident, lambda: self._restore(folder, version)))

    # ---- training -----------------------------------------------------------------------------------------------

    async def micro_step(self, step: MicroStep) -> tuple[dict[str, float], float]:
        """Accumulate one micro-step; returns its metrics and seconds, pace included."""
        return await self._run(lambda: self._micro_step(step))

    async def take_gradient(self, consume: Callable[[Mapping[str, Array]], Result]) -> Result:
        """Hand the open gradient to `consume` (which copies it), then clear it."""
        return await self._run(lambda: self._take_gradient(consume))

    async def clear(self) -> None:
        """Drop the open gradient."""
        await self._run(self._clear)

    async def commit(
        self, contributions: Sequence[Mapping[str, Array]], executions: int, version: Version
    ) -> dict[str, float]:
        """Add the contributions in order to the open gradient, scale by 1/executions, step; returns the metrics."""
        return await self._run(lambda: self._commit(contributions, executions, version))

    async def publish(self, checkpoint: Path | None, version: Version, *, resident: bool) -> Arrays:
        """The weights, after writing them with the optimizer to `checkpoint` if given."""
        return await self._run(lambda: self._borrowing(resident, lambda: self._publish(checkpoint, version)))

    # ---- in the thread ------------------------------------------------------------------------------------------

    async def _run(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _ready(self) -> Trainer:
        if self._trainer is None:
            from gyre_hpc.training.trainer import Trainer

            self._trainer = Trainer(
                self._layout.model, self._config.trainer, self._config.objective, seed=self._config.seed
            )
            self._untouched = True
            self.layout_digest = self._trainer.layout_digest()
            self._trainer.offload()
        return self._trainer

    def _leave(self) -> None:
        trainer = self._ready()
        if trainer.has_gradient:
            self._aside = {name: array.copy() for name, array in trainer.gradient().items()}
            trainer.clear()
        trainer.offload()

    def _enter(self) -> None:
        trainer = self._ready()
        trainer.restore()
        if self._aside is not None:
            trainer.add(self._aside)
            self._aside = None

    def _borrowing(self, resident: bool, work: Callable[[], Result]) -> Result:
        """Run `work` with device memory and no open gradient, then put both back as they were."""
        trainer, gradient = self._ready(), None
        if not resident:
            trainer.restore()
        if trainer.has_gradient:
            gradient = {name: array.copy() for name, array in trainer.gradient().items()}
            trainer.clear()
        result = work()
        if gradient is not None:
            self._ready().add(gradient)
        if not resident:
            self._ready().offload()
        return result

    def _load_weights(self, arrays: Mapping[str, Array], version: Version) -> None:
        trainer = self._ready()
        self._clear()
        trainer.load_weights(arrays)
        self.version, self._untouched = version, False

    def _restore(self, folder: Path, version: Version) -> Arrays:
        trainer = self._ready()
        if folder != self._layout.model:
            trainer.load_checkpoint(folder)
        elif not self._untouched:
            self._trainer = None
            trainer = self._ready()
            trainer.restore()
        self.version, self._untouched = version, False
        return trainer.weights()

    def _micro_step(self, step: MicroStep) -> tuple[dict[str, float], float]:
        began = time.monotonic()
        metrics = self._ready().accumulate(step)
        if self._config.trainer.tokens_per_s > 0:
            time.sleep(max(0.0, began + step.tokens / self._config.trainer.tokens_per_s - time.monotonic()))
        return metrics, time.monotonic() - began

    def _take_gradient(self, consume: Callable[[Mapping[str, Array]], Result]) -> Result:
        trainer = self._ready()
        result = consume(trainer.gradient())
        trainer.clear()
        return result

    def _clear(self) -> None:
        self._aside = None
        if self._ready().has_gradient:
            self._ready().clear()

    def _commit(
        self, contributions: Sequence[Mapping[str, Array]], executions: int, version: Version
    ) -> dict[str, float]:
        trainer = self._ready()
        for arrays in contributions:
            trainer.add(arrays)
        metrics = trainer.step(executions, version)
        self.version, self._untouched = version, False
        return metrics

    def _publish(self, checkpoint: Path | None, version: Version) -> Arrays:
        trainer = self._ready()
        if checkpoint is not None:
            checkpoint.parent.mkdir(parents=True, exist_ok=True)
            trainer.save_checkpoint(checkpoint, version)
        return trainer.weights()
