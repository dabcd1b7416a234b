from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from gyre_hpc.engines.weights import read_weights, weights_digest, write_weights
from gyre_hpc.errors import CorruptRecord, MissingInput


def _arrays() -> dict[str, np.ndarray]:
    return {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.ones(4, dtype=np.float32)}


def test_digest_depends_on_content_not_on_order_or_memory_layout() -> None:
    arrays = _arrays()
    assert weights_digest(arrays) == weights_digest(dict(sorted(arrays.items())))
    assert weights_digest(arrays) == weights_digest(arrays | {"b": np.asfortranarray(arrays["b"])})


@pytest.mark.parametrize("change", ["bit", "name", "shape", "dtype", "missing"])
def test_digest_changes_with_every_part_of_a_tensor(change: str) -> None:
    arrays, other = _arrays(), _arrays()
    match change:
        case "bit":
            other["a"][2] = np.nextafter(other["a"][2], np.float32(2))
        case "name":
            other["c"] = other.pop("a")
        case "shape":
            other["b"] = other["b"].reshape(3, 2)
        case "dtype":
            other["b"] = other["b"].view(np.int32)
        case "missing":
            del other["a"]
    assert weights_digest(arrays) != weights_digest(other)


def test_written_weights_are_read_back_bit_for_bit(tmp_path: Path) -> None:
    write_weights(_arrays(), tmp_path / "new" / "folder")
    assert weights_digest(read_weights(tmp_path / "new" / "folder")) == weights_digest(_arrays())
    assert [file.name for file in (tmp_path / "new" / "folder").iterdir()] == ["model.safetensors"]


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    file = write_weights(_arrays(), tmp_path)
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(CorruptRecord, match=str(file)):
        read_weights(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingInput, match=r"model\.safetensors"):
        read_weights(tmp_path)


def test_bfloat16_is_widened_exactly(tmp_path: Path) -> None:
    values = torch.tensor([[1.5, -3.0e38], [2.0**-126, 0.1]], dtype=torch.bfloat16)
    save_file({"a": values}, tmp_path / "model.safetensors")
    assert (read_weights(tmp_path)["a"] == values.float().numpy()).all()
