"""A checkpoint folder: the policy in Hugging Face layout plus the optimizer's flat buffers.

    config.json, tokenizer.json, ...   copied from the starting model: the folder opens in transformers
    model.safetensors                  weights under Hugging Face names
    optimizer.safetensors              per flat buffer: NAME/param, NAME/exp_avg, NAME/exp_avg_sq (float32)
    trainer.json                       Header: version, Adam step, layout digest

A folder appears whole or not at all: it is written beside its place, flushed to disk, then renamed.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from gyre_hpc.errors import CorruptRecord, MissingInput, StorageFull
from gyre_hpc.records import Version
from gyre_hpc.training.buffers import Array

_NOT_COPIED = ("model", "demonstrations", "optimizer")
"""Stems of files of the starting model that a checkpoint makes itself or leaves out."""


class Header(msgspec.Struct, frozen=True):
    """trainer.json."""

    version: Version
    step: int
    """Adam steps behind these weights; fewer than `version` after an undone step."""
    layout: str
    """Digest of the flat-buffer layout the optimizer arrays belong to."""


def write(
    folder: Path,
    model_dir: Path,
    header: Header,
    weights: Mapping[str, Array],
    optimizer: Mapping[str, Array],
) -> None:
    """Write the folder, replacing an earlier one of the same name. Raises StorageFull naming the folder."""
    draft = folder.with_name(f".{folder.name}.draft-{os.getpid()}")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        _copy_descriptions(model_dir, draft)
        save_file(dict(weights), draft / "model.safetensors", metadata={"format": "pt"})
        save_file(dict(optimizer), draft / "optimizer.safetensors")
        (draft / "trainer.json").write_bytes(msgspec.json.encode(header))
        for file in draft.iterdir():
            _flush(file)
        _flush(draft)
        _put_in_place(draft, folder)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(f"{folder}: {error.strerror}", fix="free space, then resume the run") from error
        raise


def read_header(folder: Path) -> Header:
    """Raises MissingInput or CorruptRecord naming the file."""
    path = folder / "trainer.json"
    if not path.is_file():
        raise MissingInput(
            f"{path}: no such file", fix="name a checkpoint folder of a run (RUN/checkpoints/v...)"
        )
    try:
        return msgspec.json.decode(path.read_bytes(), type=Header)
    except msgspec.DecodeError as error:
        raise CorruptRecord(f"{path}: {error}", fix="resume from the checkpoint before it") from error


def read_optimizer(folder: Path, sizes: Mapping[str, int]) -> dict[str, Array]:
    """The optimizer arrays; `sizes` maps each flat buffer to its length. Raises CorruptRecord naming the file."""
    path = folder / "optimizer.safetensors"
    try:
        arrays: dict[str, Array] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CorruptRecord(f"{path}: {error}", fix="resume from the checkpoint before it") from error
    for name, size in sizes.items():
        for part in ("param", "exp_avg", "exp_avg_sq"):
            array = arrays.get(f"{name}/{part}")
            if array is None or array.shape != (size,) or array.dtype != np.float32:
                raise CorruptRecord(
                    f"{path}: {name}/{part} is not float32[{size}]",
                    fix="resume from the checkpoint before it",
                )
    return arrays


def _copy_descriptions(model_dir: Path, draft: Path) -> None:
    """Everything that makes the folder open in transformers, except weights."""
    for file in model_dir.iterdir():
        if file.suffix in (".json", ".txt", ".jinja", ".model") and not file.name.startswith(_NOT_COPIED):
            shutil.copyfile(file, draft / file.name)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _put_in_place(draft: Path, folder: Path) -> None:
    replaced = folder.with_name(f".{folder.name}.replaced-{os.getpid()}")
    if folder.exists():
        folder.rename(replaced)
    draft.rename(folder)
    _flush(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)
