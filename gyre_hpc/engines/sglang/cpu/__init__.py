"""What the unmodified SGLang 0.5.21 lacks on a machine without a GPU, beside it and none inside it. For tests.

`prepare` must come before `import sglang`, in every process: it makes `torchvision` importable beside a torch without CUDA,
and stands in for `sgl_kernel`, whose only wheel is built for CUDA. `plugin.activate` is loaded by SGLang itself
(entry-point group `sglang.srt.plugins`, written by `write_plugin`): host memory is also the device's memory there. Only
dense models with `--attention-backend torch_native` are served; any other kernel raises when it is called.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any, Final

_DISTRIBUTION: Final = "gyre_sglang_cpu-1.dist-info"
_SCHEMAS: Final = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_kept: list[object] = []
"""Operator libraries live as long as this list holds them."""


_SERVED: Final = ("llama", "qwen2", "qwen3")
"""Modules of sglang.srt.models; the others import kernels that do not exist, and cost seconds in each process."""


def prepare() -> None:
    """Make `import sglang` possible. Twice does nothing more than once."""
    if _kept:
        return
    os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(_other_models()))
    import torch

    from gyre_hpc.engines.sglang.cpu.kernels import install

    library: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for schema in _SCHEMAS:
        library.define(schema)
    _kept.append(library)
    install()


def _other_models() -> list[str]:
    spec = importlib.util.find_spec("sglang")
    roots = (spec.submodule_search_locations if spec else None) or []
    files = [file for root in roots for file in Path(root, "srt", "models").glob("*.py")]
    return sorted({file.stem for file in files} - {*_SERVED, "__init__", "registry"})


def write_plugin(folder: Path) -> None:
    """Let SGLang find `plugin.activate` when `folder` is on its module path."""
    info = folder / _DISTRIBUTION
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gyre-sglang-cpu\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\ngyre_cpu = gyre_hpc.engines.sglang.cpu.plugin:activate\n"
    )
