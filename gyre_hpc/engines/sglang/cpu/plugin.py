"""SGLang's HiCache where the device is the CPU: pools without pinned memory, plain copies, streams and events that do nothing.

Runs once in each of SGLang's processes, before its own code. Each replacement names what it stands in for.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final

_MAKERS: Final = (
    "empty",
    "zeros",
    "ones",
    "full",
    "tensor",
    "empty_like",
    "zeros_like",
    "arange",
    "empty_strided",
)


class Event:
    """torch.cuda.Event of a device that has finished whatever it was given."""

    def __init__(self, *args: object, **options: object) -> None:
        return

    def record(self, stream: object = None) -> None:
        return

    def wait(self, stream: object = None) -> None:
        return

    def synchronize(self) -> None:
        return

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 0.0


class Stream:
    """torch.cuda.Stream of a device that does one thing at a time."""

    cuda_stream = 0

    def __init__(self, *args: object, **options: object) -> None:
        return

    def wait_event(self, event: object) -> None:
        return

    def wait_stream(self, stream: object) -> None:
        return

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None:
        return

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        return


def activate() -> None:
    """Entry point of the group sglang.srt.plugins."""
    import torch

    _streams(torch.cpu)
    _streams(torch.cuda)
    torch.cuda.synchronize = lambda *args, **options: None
    _plain_memory(torch)
    from sglang.srt.mem_cache.pool_host import base, common, mha

    for module in (common, mha):
        for name in ("_cuda_host_register", "_cuda_host_unregister"):
            setattr(module, name, lambda *args, **options: None)
    base.HostKVCache.__init__ = _unpinned(base.HostKVCache.__init__)
    from sglang.srt.mem_cache.allocator import paged

    paged.alloc_extend_kernel = OnHost(functools.partial(_alloc_extend, paged.alloc_extend_naive))
    paged.alloc_decode_kernel = OnHost(alloc_decode)
    for copy in (transfer_kv_direct, transfer_kv_per_layer_direct_pf_lf, transfer_kv_all_layer_direct_lf_pf):
        setattr(mha, copy.__name__, copy)


def _streams(device: Any) -> None:
    """Events and streams that HiCache asks for on whatever device it has."""
    current = Stream()
    device.Event, device.Stream = Event, Stream
    device.current_stream = lambda *args, **options: current
    device.stream = lambda stream=None: stream or current


def _plain_memory(torch: Any) -> None:
    """Pinning is an error without CUDA; so is telling the allocator of a stream."""
    for name in _MAKERS:
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *args, **options: self
    torch.Tensor.record_stream = lambda self, stream: None


def _without_pinning(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: object, **options: object) -> Any:
        options.pop("pin_memory", None)
        return make(*args, **options)

    return made


def _unpinned(init: Callable[..., None]) -> Callable[..., None]:
    """HostKVCache.__init__ with pin_memory=False, however it is given."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def made(*args: object, **options: object) -> None:
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        bound.arguments["pin_memory"] = False
        init(*bound.args, **bound.kwargs)

    return made


class OnHost:
    """A Triton kernel's place: `kernel[grid](...)` calls the function once, whatever the grid."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self._function


def _alloc_extend(
    naive: Callable[..., None],
    prefixes: Any,
    lengths: Any,
    last: Any,
    free: Any,
    out: Any,
    calls: int,
    page: int,
) -> None:
    """SGLang's own allocation without a kernel, in the kernel's order of arguments."""
    naive(prefixes, lengths, last, free, out, page, "cpu")


def alloc_decode(lengths: Any, last: Any, free: Any, out: Any, calls: int, page: int) -> None:
    """out[i] = the slot of call i's next token: after `last[i]`, or the first of a free page where its page is full."""
    fresh = (lengths - 1) % page == 0
    taken = fresh.cumsum(0) - fresh.long()
    out.copy_(last + 1)
    out[fresh] = free[taken[fresh]] * page


def transfer_kv_direct(
    src_layers: Sequence[Any], dst_layers: Sequence[Any], src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """Rows src_indices of each source layer to rows dst_indices of its destination."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices.long()] = source[src_indices.long()].to(target.dtype)


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[Any],
    dst_ptrs: Sequence[Any],
    src_indices: Any,
    dst_indices: Any,
    layer_id: int,
    page_size: int,
) -> None:
    """One layer from host pages [page, layer, token, head, dim] to device rows."""
    pages = src_indices.long().view(-1, page_size)[:, 0] // page_size
    rows = dst_indices.long()
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[rows] = source[pages, layer_id].reshape(len(rows), *target.shape[1:])


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[Any], dst_ptrs: Sequence[Any], src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """All layers from device rows to host pages [page, layer, token, head, dim]; sources are all K layers, then all V."""
    rows = src_indices.long()
    pages = dst_indices.long().view(-1, page_size)[:, 0] // page_size
    layers = len(src_ptrs) // len(dst_ptrs)
    for half, target in enumerate(dst_ptrs):
        for layer in range(layers):
            source = src_ptrs[half * layers + layer]
            target[pages, layer] = source[rows].reshape(len(pages), page_size, *source.shape[1:])
