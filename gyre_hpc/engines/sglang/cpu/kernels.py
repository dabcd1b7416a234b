"""A module `sgl_kernel` without compiled kernels: every name exists, a call raises NotImplementedError that says which.

One function is real, because a dense model on a CPU needs it: `assign_req_to_token_pool_cpu`. Submodules exist likewise,
except `scalar_type`, which SGLang does without when its import fails.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final, NoReturn

ROOT: Final = "sgl_kernel"
VERSION: Final = "0.4.7"
"""The version of sglang-kernel that SGLang 0.5.21 asks for."""
_ABSENT: Final = frozenset({f"{ROOT}.scalar_type"})


def missing(name: str) -> Callable[..., NoReturn]:
    """A function that raises when it is called."""

    def kernel(*args: object, **options: object) -> NoReturn:
        raise NotImplementedError(f"{name}: no such kernel without a GPU")

    kernel.__name__ = name
    return kernel


class KernelModule(ModuleType):
    """A module that has every name but the special ones."""

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)
        return missing(f"{self.__name__}.{name}")


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        ours = name.partition(".")[0] == ROOT and name not in _ABSENT
        return ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = KernelModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == ROOT:
            vars(module).update(
                __version__=VERSION, assign_req_to_token_pool_cpu=assign_req_to_token_pool_cpu
            )


def install() -> None:
    """Answer `import sgl_kernel` in this process."""
    sys.meta_path.append(_Finder())


def assign_req_to_token_pool_cpu(
    requests: Any, table: Any, starts: Any, ends: Any, slots: Any, columns: int
) -> None:
    """table[requests[i], starts[i]:ends[i]] = the next of `slots`, for each i in order (int tensors)."""
    taken = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[request, start:end] = slots[taken : taken + end - start].to(table.dtype)
        taken += end - start
