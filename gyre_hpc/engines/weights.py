"""Weights at rest and their digest: safetensors folders in Hugging Face layout, as numpy arrays. No torch.

Trainer, publisher and engine use the same three functions, so "the engine serves version v" is checked by comparing
one hex string. The digest covers name, dtype, shape and bytes of every tensor; with tied embeddings the tensor
`lm_head.weight` does not exist and must not be in the mapping.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save_file

from gyre_hpc.errors import CorruptRecord, MissingInput

Array = npt.NDArray[np.generic]

WEIGHTS_FILE = "model.safetensors"
WEIGHTS_FILES = "model*.safetensors"
CONFIG_FILE = "config.json"

_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "U8": "|u1", "BOOL": "|b1"}


def weights_digest(arrays: Mapping[str, Array]) -> str:
    """xxh3-64 (hex) over (name, dtype, shape, little-endian bytes) of all arrays in the order of their names."""
    digest = xxhash.xxh3_64()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        digest.update(f"{name}|{little.dtype.str}|{little.shape}".encode())
        digest.update(little.reshape(-1).view(np.uint8).data)
    return str(digest.hexdigest())


def read_weights(path: Path) -> dict[str, Array]:
    """All tensors of a safetensors file, or of each `model*.safetensors` in a folder. bfloat16 is widened to float32."""
    files = sorted(path.glob(WEIGHTS_FILES)) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise MissingInput(
            f"{path / WEIGHTS_FILE if path.is_dir() else path}: no such file",
            fix=f"name a folder with {CONFIG_FILE} and {WEIGHTS_FILE}",
        )
    return {name: array for file in files for name, array in _read_file(file).items()}


def _read_file(file: Path) -> dict[str, Array]:
    try:
        entries = deserialize(file.read_bytes())  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise CorruptRecord(
            f"{file}: not a whole safetensors file ({error})", fix="write it again"
        ) from error
    return {name: _to_array(file, name, entry) for name, entry in entries}


def _to_array(file: Path, name: str, entry: Mapping[str, object]) -> Array:
    kind, shape, data = entry["dtype"], entry["shape"], entry["data"]
    assert isinstance(kind, str) and isinstance(shape, list) and isinstance(data, (bytes, bytearray))
    if kind == "BF16":
        widened = np.frombuffer(data, "<u2").astype(np.uint32) << 16
        return widened.view(np.float32).reshape(shape)
    if kind not in _DTYPES:
        raise CorruptRecord(
            f"{file}: tensor {name} has dtype {kind}", fix=f"use one of BF16, {', '.join(_DTYPES)}"
        )
    return np.frombuffer(data, _DTYPES[kind]).reshape(shape)


def write_weights(arrays: Mapping[str, Array], folder: Path) -> Path:
    """Write `folder/model.safetensors` so that a reader sees the old file or the whole new one."""
    folder.mkdir(parents=True, exist_ok=True)
    file, partial = folder / WEIGHTS_FILE, folder / f".{WEIGHTS_FILE}.{os.getpid()}"
    plain = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    save_file(plain, partial, metadata={"format": "pt"})
    with partial.open("rb+") as stream:
        os.fsync(stream.fileno())
    partial.rename(file)
    return file
