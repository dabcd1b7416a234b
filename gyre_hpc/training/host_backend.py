"""Lets the unmodified megatron-core run on a machine without CUDA.

`install` replaces the few `torch.cuda` entry points that megatron-core calls without asking; it does nothing when CUDA
is available. `literals` is a context for the calls that name "cuda" as a literal (optimizer construction and step);
it is kept off forward and backward because it costs time on every torch call. Only `training` calls this module.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_installed = False


class _HostStream:
    """Stands in for a CUDA stream: all work on the host is already ordered."""

    def wait_event(self, event: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def synchronize(self) -> None: ...


class _CudaLiterals(TorchFunctionMode):
    """Reads device="cuda" as the CPU, and tells megatron's type assertions what they expect to hear."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            name = str(func(*args))
            asked_by_megatron = "megatron" in sys._getframe(1).f_code.co_filename
            return name.replace("torch.", "torch.cuda.", 1) if asked_by_megatron else name
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def install() -> bool:
    """Install the host backend once; returns whether it is in use (False on a machine with CUDA)."""
    global _installed
    if torch.cuda.is_available():
        return False
    if not _installed:
        _replace_cuda_entry_points()
        _replace_rng_functions()
        _installed = True
    return True


@contextlib.contextmanager
def literals() -> Iterator[None]:
    """Context in which megatron-core's literal "cuda" means the host; empty with CUDA."""
    if torch.cuda.is_available():
        yield
        return
    with _CudaLiterals():
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences megatron-core's remarks at import and construction about absent GPU packages and its own deprecations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _replace_cuda_entry_points() -> None:
    host, stream = torch.device("cpu"), _HostStream()
    replacements: dict[str, Callable[..., Any]] = {
        "current_device": lambda: host,
        "synchronize": lambda *_: None,
        "current_stream": lambda *_: stream,
        "empty_cache": lambda: None,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "manual_seed": lambda seed: torch.manual_seed(seed),
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)


def _replace_rng_functions() -> None:
    with quiet():
        from megatron.core.tensor_parallel import random as megatron_random

    def get_state(*_: object, **__: object) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *_: object, **__: object) -> None:
        torch.set_rng_state(state)

    megatron_random._get_cuda_rng_state = get_state
    megatron_random._set_cuda_rng_state = set_state
