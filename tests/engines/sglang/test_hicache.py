"""Our storage backend under a stand-in for SGLang's base class: what it keeps, and what it never gives back."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from gyre_hpc.engines.sglang.cpu.kernels import KernelModule, assign_req_to_token_pool_cpu
from gyre_hpc.engines.sglang.cpu.plugin import (
    alloc_decode,
    transfer_kv_all_layer_direct_lf_pf,
    transfer_kv_direct,
    transfer_kv_per_layer_direct_pf_lf,
)

KEYS = ["00" * 32, "11" * 32, "22" * 32]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class, loaded beside a base class of the same name."""
    names = ["sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.mem_cache.hicache_storage"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[names[-1]].HiCacheStorage = object  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, "gyre_hpc.engines.sglang.hicache", raising=False)
    from gyre_hpc.engines.sglang.hicache import GyreStorage

    yield GyreStorage
    sys.modules.pop("gyre_hpc.engines.sglang.hicache", None)


def config(folder: Path, **changes: object) -> SimpleNamespace:
    values: dict[str, object] = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1}
    values |= {"attn_cp_rank": 0, "attn_cp_size": 1, "is_mla_model": False}
    values |= {"extra_config": {"folder": str(folder), "limit_bytes": 1 << 20, "layout": "seed"}}
    return SimpleNamespace(**(values | changes))


def page(value: float) -> torch.Tensor:
    return torch.full((2, 8), value, dtype=torch.float16)


def blank() -> torch.Tensor:
    return torch.zeros(16, dtype=torch.float16)


def test_pages_come_back_bit_by_bit_to_every_server_on_the_folder(backend: Any, tmp_path: Path) -> None:
    assert backend(config(tmp_path)).batch_set(KEYS[:2], [page(1.5), page(2.5)])
    other = backend(config(tmp_path))
    assert other.batch_exists(KEYS) == 2
    pages = other.batch_get(KEYS, [blank() for _ in KEYS])
    assert torch.equal(pages[0], page(1.5).flatten())
    assert torch.equal(pages[1], page(2.5).flatten())
    assert pages[2] is None


def test_a_damaged_page_ends_the_prefix(backend: Any, tmp_path: Path) -> None:
    storage = backend(config(tmp_path))
    storage.batch_set(KEYS, [page(1), page(2), page(3)])
    path = storage._store.path(storage._key(KEYS[1]))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    pages = storage.batch_get(KEYS, [blank() for _ in KEYS])
    assert [found is not None for found in pages] == [True, False, False]
    assert storage.batch_exists(KEYS) == 1


def test_a_page_of_another_rank_model_or_size_is_absent(backend: Any, tmp_path: Path) -> None:
    backend(config(tmp_path)).batch_set(KEYS[:1], [page(1)])
    assert backend(config(tmp_path, tp_size=2)).batch_exists(KEYS[:1]) == 0
    extra = {"folder": str(tmp_path), "limit_bytes": 1 << 20, "layout": "another"}
    assert backend(config(tmp_path, extra_config=extra)).batch_exists(KEYS[:1]) == 0
    assert backend(config(tmp_path)).get(KEYS[0], torch.zeros(8, dtype=torch.float16)) is None


def test_all_ranks_of_an_mla_model_read_what_one_wrote(backend: Any, tmp_path: Path) -> None:
    backend(config(tmp_path, is_mla_model=True, tp_size=2)).batch_set(KEYS[:1], [page(1)])
    assert backend(config(tmp_path, is_mla_model=True, tp_rank=1, tp_size=2)).exists(KEYS[0])


def test_a_full_disk_is_an_answer_and_no_error(
    backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = backend(config(tmp_path))

    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    assert storage.batch_set(KEYS[:1], [page(1)]) is False


def test_a_kernel_that_is_missing_says_which_when_it_is_called() -> None:
    kernels = KernelModule("sgl_kernel")
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.fused_experts"):
        kernels.fused_experts(1)
    with pytest.raises(AttributeError):
        _ = kernels.__wrapped__


def test_the_next_token_of_a_call_goes_after_its_last_or_on_a_fresh_page() -> None:
    out = torch.empty(3, dtype=torch.int64)
    alloc_decode(
        torch.tensor([6, 5, 9]), torch.tensor([4 * 7 + 0, 99, 98]), torch.tensor([20, 30, 40]), out, 4, 4
    )
    assert out.tolist() == [29, 80, 120]


def test_slots_are_assigned_call_by_call() -> None:
    table = torch.zeros((3, 6), dtype=torch.int32)
    assign_req_to_token_pool_cpu(
        torch.tensor([2, 0]), table, torch.tensor([1, 0]), torch.tensor([3, 1]), torch.tensor([7, 8, 9]), 6
    )
    assert table.tolist() == [[9, 0, 0, 0, 0, 0], [0] * 6, [0, 7, 8, 0, 0, 0]]


def test_copies_between_pools_are_the_identity_in_either_layout() -> None:
    device = [torch.randn(8, 2, 3) for _ in range(4)]
    rows, slots = torch.tensor([4, 5, 6, 7]), torch.tensor([0, 1, 2, 3])
    host = [torch.zeros(8, 2, 3) for _ in range(4)]
    transfer_kv_direct(device, host, rows, slots, 4)
    assert all(torch.equal(there[:4], here[4:]) for there, here in zip(host, device, strict=True))
    pages = [torch.zeros(2, 2, 4, 2, 3) for _ in range(2)]
    transfer_kv_all_layer_direct_lf_pf(device, pages, rows, slots, 4)
    for layer in (0, 1):
        back = [torch.zeros(8, 2, 3) for _ in range(2)]
        transfer_kv_per_layer_direct_pf_lf(pages, back, slots, rows, layer, 4)
        assert torch.equal(back[0][4:], device[layer][4:])
        assert torch.equal(back[1][4:], device[2 + layer][4:])
