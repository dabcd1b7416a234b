"""The regions that a cell offers: a satellite's gradients, each until its batch is committed or void, and the core's weights, of
which the newest stay as long as a burst may refer to them. Called by cell.py.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

import numpy.typing as npt

from gyre_hpc.records import Version
from gyre_hpc.transport.messages import Manifest, RegionKind
from gyre_hpc.transport.regions import RegionServer

Array = npt.NDArray[Any]
WEIGHTS_NAME: Final = "policy"
BESIDE_BURST: Final = 2
"""Weights kept beyond one for each step of a burst: those it began with and those it ends with among them."""


class Offers:
    """What others may pull from this cell. `layout` of a call is the digest of the trainer's flat buffers."""

    def __init__(self, regions: RegionServer, steps_per_burst: int) -> None:
        self._regions = regions
        self._kept = steps_per_burst + BESIDE_BURST
        self._gradients: dict[int, Manifest] = {}
        self._weights: deque[Manifest] = deque()

    def gradient(self, batch: int, version: Version, layout: str, arrays: Mapping[str, Array]) -> Manifest:
        """This cell's contribution to the batch; callable from any thread. Raises StorageFull."""
        manifest = self._regions.publish(RegionKind.GRADIENT, f"batch-{batch}", version, layout, arrays)
        self._gradients[batch] = manifest
        return manifest

    def drop_gradient(self, batch: int) -> None:
        """Nobody will pull it any more; nothing where the cell offers none."""
        manifest = self._gradients.pop(batch, None)
        if manifest is not None:
            self._regions.drop(manifest)

    async def weights(self, version: Version, layout: str, arrays: Mapping[str, Array]) -> Manifest:
        """The core's weights of this version. Raises StorageFull."""
        manifest = await asyncio.to_thread(
            self._regions.publish, RegionKind.WEIGHTS, WEIGHTS_NAME, version, layout, arrays
        )
        self._weights.append(manifest)
        while len(self._weights) > self._kept:
            self._regions.drop(self._weights.popleft())
        return manifest
