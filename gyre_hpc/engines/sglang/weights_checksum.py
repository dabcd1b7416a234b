"""What SGLang's /weights_checker answers when it serves given weights: the engine confirms what was published, bit by bit.

SGLang hashes its own parameters, in which q, k, v and gate, up are joined, per rank: xxh-like on a GPU
(kernels/ops/memory/gpu_tensor_hash.py), SHA-256 on a CPU (managers/mm_utils.py), then SHA-256 over (name, hash) in the order
of the names (utils/weight_checker.py), then over the ranks (managers/tokenizer_control_mixin.py); all of 0.5.21. Here the
same is worked out for dense models of the Llama and Qwen layout without quantisation; an engine of any other is not started
(`require_confirmable`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gyre_hpc.config_engine import SglangConfig
from gyre_hpc.engines.weights import CONFIG_FILE, Array
from gyre_hpc.errors import ConfigError, MissingInput

Words = npt.NDArray[np.uint32]
JOINED: Final = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Parameters that SGLang joins, along the output dimension."""
SPLIT_OUTPUT: Final = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
SPLIT_INPUT: Final = ("o_proj", "down_proj")
VOCABULARY_MULTIPLE: Final = 64
"""Rows of embeddings are padded with zeros to a multiple of this, per rank."""
CPU_MULTIPLE: Final = 32
"""On a CPU the width of the MLP is padded to a multiple of this (configs/update_config.py)."""
DENSE: Final = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def require_confirmable(model: Path) -> None:
    """Raises ConfigError for a model whose weights could not be confirmed: it would never be routed to."""
    path = model / CONFIG_FILE
    if not path.is_file():
        raise MissingInput(f"{path}: no such file", fix="set model.path to a folder with config.json")
    config = json.loads(path.read_text())
    dense = bool(set(config.get("architectures") or ()) & set(DENSE))
    if not dense or config.get("quantization_config"):
        raise ConfigError(
            f"{model}: its weights on SGLang cannot be confirmed",
            fix=f"use a dense, unquantised model ({', '.join(DENSE)}), or engine=torch",
        )


def expected_checksum(arrays: Mapping[str, Array], config: SglangConfig, model: Path, dtype: str) -> str:
    """`per_engine_checksum` of an engine that serves exactly these weights (names of Hugging Face)."""
    heads = int(json.loads((model / CONFIG_FILE).read_text()).get("num_key_value_heads", 0))
    digest = hashlib.sha256()
    on_cpu = config.device == "cpu"
    hash_tensor = _cpu_hash if on_cpu else gpu_hash
    for rank in range(config.tensor_parallel):
        tensors = rank_parameters(arrays, rank, config.tensor_parallel, heads, CPU_MULTIPLE if on_cpu else 1)
        digest.update(_rank_checksum(tensors, dtype, hash_tensor).encode())
    return digest.hexdigest()


def rank_parameters(
    arrays: Mapping[str, Array], rank: int, ranks: int, kv_heads: int, multiple: int = 1
) -> Iterator[tuple[str, Array]]:
    """SGLang's parameters of one TP rank, by name. The width of the MLP is padded with zeros to a `multiple` per rank."""
    whole = {name: _widened(name, array, multiple * ranks) for name, array in arrays.items()}
    for name in whole:
        joined = next((target for target, parts in JOINED.items() if _layer(name) == parts[0]), None)
        if joined is not None:
            parts = [name.replace(JOINED[joined][0], part) for part in JOINED[joined]]
            pieces = [_shard(part, whole[part], rank, ranks, kv_heads) for part in parts]
            yield name.replace(JOINED[joined][0], joined), np.concatenate(pieces)
        elif not any(_layer(name) in parts for parts in JOINED.values()):
            yield name, _shard(name, whole[name], rank, ranks, kv_heads)


def _widened(name: str, array: Array, multiple: int) -> Array:
    layer = _layer(name)
    if layer in JOINED["gate_up_proj"]:
        return _padded(array, multiple)
    return _padded(array, multiple, axis=1) if layer == "down_proj" and array.ndim == 2 else array


def _layer(name: str) -> str:
    """q_proj of model.layers.0.self_attn.q_proj.weight."""
    return re.sub(r"\.(weight|bias)$", "", name).rpartition(".")[2]


def _shard(name: str, array: Array, rank: int, ranks: int, kv_heads: int) -> Array:
    """The rank's part. K and V heads are repeated where there are fewer of them than ranks."""
    layer = _layer(name)
    if layer in ("embed_tokens", "lm_head"):
        array = _padded(array, VOCABULARY_MULTIPLE * ranks)
    if layer in ("k_proj", "v_proj") and kv_heads < ranks:
        rank, ranks = rank * kv_heads // ranks, kv_heads
    if layer in SPLIT_OUTPUT:
        return np.array_split(array, ranks, axis=0)[rank]
    if layer in SPLIT_INPUT and array.ndim == 2:
        return np.array_split(array, ranks, axis=1)[rank]
    return array


def _padded(array: Array, multiple: int, axis: int = 0) -> Array:
    more = [(0, -size % multiple if index == axis else 0) for index, size in enumerate(array.shape)]
    return np.pad(array, more) if any(after for _, after in more) else array


def _rank_checksum(
    tensors: Iterator[tuple[str, Array]], dtype: str, hash_tensor: Callable[[bytes], int]
) -> str:
    hashes = {name: f"{hash_tensor(as_bytes(array, dtype)):016x}" for name, array in tensors}
    digest = hashlib.sha256()
    for name in sorted(hashes):
        digest.update(name.encode())
        digest.update(hashes[name].encode())
    return digest.hexdigest()


def as_bytes(array: Array, dtype: str) -> bytes:
    """The array as torch stores it in `dtype`, rounded to nearest even, little-endian."""
    if dtype != "bfloat16":
        return np.ascontiguousarray(array, dtype=np.dtype(dtype).newbyteorder("<")).tobytes()
    words: Any = np.ascontiguousarray(array, dtype="<f4").view(np.uint32)
    nearest: Any = (words + np.uint32(0x7FFF) + ((words >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return bytes(nearest.astype("<u2").tobytes())


def _cpu_hash(data: bytes) -> int:
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big")


# ---- the hash of a tensor on a GPU ------------------------------------------------------------------------------

_TILE: Final = 8192
_TOGETHER: Final = 16
"""Tiles that are worked out at once: what fits into the cache of a core."""
HASH_THREADS: Final = 16
_M64: Final = 0xFFFFFFFFFFFFFFFF
_SEEDS: Final = (0x243F6A88, ((0x243F6A88 * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF)
_LANES: Final = tuple(zip((0x27D4EB2D, 0x165667B1), (15, 13), _SEEDS, strict=True))
"""(factor, rotation, seed) of the upper and the lower half."""


def gpu_hash(data: bytes) -> int:
    """SGLang's gpu_tensor_hash of a tensor with these bytes."""
    words: Words = np.frombuffer(data + bytes(-len(data) % 4) if len(data) % 4 else data, "<u4")
    if not len(words):
        return 0
    whole = len(words) - len(words) % _TILE
    rows = words[:whole].reshape(-1, _TILE)
    blocks: list[tuple[Words, int]] = [
        (rows[at : at + _TOGETHER], at * _TILE) for at in range(0, len(rows), _TOGETHER)
    ]
    if whole < len(words):
        blocks.append((words[None, whole:], whole))
    if len(blocks) == 1:
        return _splitmix(_block_hash(*blocks[0], len(words)) & _M64)
    with ThreadPoolExecutor(min(HASH_THREADS, len(blocks), os.cpu_count() or 1)) as threads:
        hashes = threads.map(lambda block: _block_hash(block[0], block[1], len(words)), blocks)
        return _splitmix(sum(hashes) & _M64)


def _block_hash(rows: Words, first: int, count: int) -> int:
    """Sum of the hashes of tiles [tiles, words], of which the first begins at word `first` of `count`."""
    index = np.arange(first, first + rows.size, dtype=np.uint32).reshape(rows.shape)
    upper, lower = (_halves(rows, index, factor, turn, seed, count) for factor, turn, seed in _LANES)
    return (int(upper.sum(dtype=np.uint64)) << 32) + int(lower.sum(dtype=np.uint64))


def _halves(rows: Words, index: Words, factor: int, turn: int, seed: int, count: int) -> Words:
    """One half of each tile's hash."""
    turned, place = index << np.uint32(turn), index >> np.uint32(32 - turn)
    turned |= place
    np.multiply(index, np.uint32(factor), out=place)
    place += np.uint32(seed)
    place ^= turned
    place ^= rows
    _mix(place, turned)
    sums: Words = place.sum(axis=1, dtype=np.uint64).astype(np.uint32)
    sums ^= np.uint32(count * 4 & 0xFFFFFFFF)
    _mix(sums, np.empty_like(sums))
    return sums


def _mix(x: Words, room: Words) -> None:
    """In place; `room` is of the same shape."""
    for turn, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        np.right_shift(x, np.uint32(turn), out=room)
        x ^= room
        x *= np.uint32(factor)
    np.right_shift(x, np.uint32(16), out=room)
    x ^= room


def _splitmix(x: int) -> int:
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)
