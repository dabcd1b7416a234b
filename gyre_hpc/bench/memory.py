"""Memory of a run's processes while it goes on, and how it grows with something that is counted.

Memory is the proportional set size (PSS): a page that several processes map counts once in all. Files in memory that nobody maps
(weights, regions) are in no process's; they are counted by their folder. Growth is a least-squares
slope over the means of equal blocks, so that its standard error knows how much memory swings between neighbours.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import psutil

from gyre_hpc.kv.page_store import SUFFIX

MIB: Final = 2**20
BLOCK: Final = 512
"""Bytes of what stat counts as a block, whatever the file system."""
KINDS: Final = {
    "leader": "gyre_hpc.cells.leader",
    "engine": "gyre_hpc.engines.torch.server",
    "gateway": "gyre_hpc.gateway.process",
    "processor": "gyre_hpc.controller.processor",
    "runner": "gyre_hpc.executions.runner",
}
"""Kind of process -> the module on its command line. The run's first process is the controller."""
BLOCKS = 10


def memory_by_kind(run: psutil.Process) -> dict[str, float]:
    """MiB of the controller and of all its processes of each kind."""
    found = dict.fromkeys(("controller", *KINDS), 0.0)
    for process in [run, *run.children(recursive=True)]:
        try:
            kind = "controller" if process == run else _kind(process.cmdline())
            if kind:
                found[kind] += process.memory_full_info().pss / MIB
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def files_mib(folder: Path) -> float:
    """MiB of the files below, less the pages of KV stores: those fill up to `engine.kv_store_mib` and stay there."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += 0 if name.endswith(SUFFIX) else os.stat(os.path.join(root, name)).st_blocks * BLOCK
    return total / MIB


def _kind(command: Sequence[str]) -> str:
    return next((kind for kind, module in KINDS.items() if module in command), "")


def growth(counts: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """(slope of `values` over `counts`, its standard error). Needs 2 * BLOCKS samples; raises ValueError for fewer."""
    if len(counts) < 2 * BLOCKS:
        raise ValueError(f"{len(counts)} samples; a slope with its error needs {2 * BLOCKS}")
    x, y = (
        np.array([block.mean() for block in np.array_split(np.asarray(one, float), BLOCKS)])
        for one in (counts, values)
    )
    spread = ((x - x.mean()) ** 2).sum()
    slope = ((x - x.mean()) * (y - y.mean())).sum() / spread
    rest = y - y.mean() - slope * (x - x.mean())
    return float(slope), float(np.sqrt((rest**2).sum() / (BLOCKS - 2) / spread))


def growth_by_kind(
    counts: Sequence[float], samples: Sequence[Mapping[str, float]]
) -> dict[str, tuple[float, float]]:
    """(slope, standard error) of each kind of process and of `all` together."""
    kinds = {kind: [sample[kind] for sample in samples] for kind in samples[0]}
    kinds["all"] = [sum(sample.values()) for sample in samples]
    return {kind: growth(counts, values) for kind, values in kinds.items()}
