"""One cell is one torch world: tensor-parallel groups live inside a cell and no group ever spans two.

`join_cell` initialises torch.distributed and megatron's parallel state once per process, without environment
variables and without a fixed port: a cell of one rank uses an in-process store, ranks of a larger cell meet in a file
store in a folder of their own. Joining, leaving or losing another cell never touches these groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gyre_hpc.errors import ConfigError, IllegalTransition
from gyre_hpc.training import host_backend

_RENDEZVOUS_LIMIT = timedelta(minutes=5)
"""Ranks of a cell start together; a rank missing for this long has failed."""


@dataclass(frozen=True)
class CellWorld:
    """A rank's place in its cell."""

    rank: int = 0
    size: int = 1
    tensor_parallel: int = 1


_joined: CellWorld | None = None


def join_cell(world: CellWorld | None = None, rendezvous: Path | None = None) -> CellWorld:
    """Join the cell's torch world; a repeat with the same shape is a no-op.

    `rendezvous` is a file path private to this cell and incarnation; needed when `world.size` > 1.
    """
    global _joined
    world = world or CellWorld()
    if _joined is not None:
        if _joined != world:
            raise IllegalTransition(f"this process joined {_joined} and cannot join {world}")
        return world
    if world.size % world.tensor_parallel:
        raise ConfigError(
            f"trainer.tensor_parallel={world.tensor_parallel} does not divide cluster.cell.ranks={world.size}",
            fix="make cluster.cell.ranks a multiple of trainer.tensor_parallel",
        )
    host_backend.install()
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        store=_store(world, rendezvous),
        rank=world.rank,
        world_size=world.size,
        timeout=_RENDEZVOUS_LIMIT,
    )
    with host_backend.quiet():
        from megatron.core import parallel_state, tensor_parallel

        parallel_state.initialize_model_parallel(tensor_model_parallel_size=world.tensor_parallel)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
    _joined = world
    return world


def _store(world: CellWorld, rendezvous: Path | None) -> Any:
    if world.size == 1:
        return dist.HashStore()  # type: ignore[attr-defined]
    if rendezvous is None:
        raise ConfigError(
            "a cell of several ranks needs a rendezvous file", fix="pass a path private to the cell"
        )
    return dist.FileStore(str(rendezvous), world.size)  # type: ignore[attr-defined]
