"""Megatron's flat buffers as named numpy arrays: the unit in which gradients and optimizer state leave a trainer.

A Megatron DDP wrapper with the distributed-optimizer layout keeps all parameters of one dtype in one flat buffer and
their fp32 gradients in another of the same layout. Arrays are named by buffer ("dense.0", "expert.0", ...). Two
trainers with equal `layout_digest` may exchange them byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

Array = npt.NDArray[Any]


def flat_buffers(parallel: Any) -> dict[str, Any]:
    """Megatron's parameter-and-gradient buffers by our names."""
    named = {f"dense.{index}": buffer for index, buffer in enumerate(parallel.buffers)}
    return named | {
        f"expert.{index}": buffer for index, buffer in enumerate(parallel.expert_parallel_buffers)
    }


def layout_digest(parallel: Any) -> str:
    """Hex xxh3-64 over buffer names, dtypes, and every parameter's name, shape and place."""
    digest = xxhash.xxh3_64()
    names = {parameter: name for name, parameter in parallel.module.named_parameters()}
    for key, buffer in flat_buffers(parallel).items():
        digest.update(f"{key}|{buffer.param_dtype}|{buffer.grad_dtype}|{buffer.numel};".encode())
        for parameter, start, stop in _places(buffer):
            digest.update(f"{names[parameter]}|{tuple(parameter.shape)}|{start}|{stop};".encode())
    return digest.hexdigest()


def host_view(tensor: Tensor) -> Array:
    """The tensor as numpy: without a copy on the host, a copy from a device."""
    view: Array = tensor.detach().cpu().numpy()
    return view


def pack(buffer: Any, value_of: Callable[[Tensor], Tensor]) -> Array:
    """One flat float32 array in the buffer's layout, filled from `value_of(parameter)`; padding is 0."""
    flat = torch.zeros(buffer.numel, dtype=torch.float32)
    for parameter, start, stop in _places(buffer):
        flat[start:stop].copy_(value_of(parameter).detach().reshape(-1))
    return host_view(flat)


def unpack(buffer: Any, flat: Array) -> Iterator[tuple[Tensor, Tensor]]:
    """(parameter, its part of `flat` in its own shape), in the buffer's order."""
    source = torch.from_numpy(np.ascontiguousarray(flat))
    for parameter, start, stop in _places(buffer):
        yield parameter, source[start:stop].view(parameter.shape)


def _places(buffer: Any) -> list[tuple[Tensor, int, int]]:
    return [(parameter, start, stop) for parameter, (start, stop, _) in buffer.param_index_map.items()]
