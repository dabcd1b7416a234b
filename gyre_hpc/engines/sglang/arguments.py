"""The command line of an SGLang server for a cell. Pure.

Token in, token out: no tokenizer is loaded. Streams are increments. KV pages are written through to our store as soon as
a call has ended or was cut, and are looked for there from the first full page on. `engine.sglang.arguments` come last and win.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Final

from gyre_hpc.config import EngineConfig
from gyre_hpc.errors import ConfigError
from gyre_hpc.records import Version

SERVER: Final = "gyre_hpc.engines.sglang.server"
STORAGE: Final = {
    "backend_name": "gyre",
    "module_path": "gyre_hpc.engines.sglang.hicache",
    "class_name": "GyreStorage",
}
_CPU: Final = (
    *("--attention-backend", "torch_native", "--mem-fraction-static", "0.2"),
    *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"),
)
_CPU_CACHE: Final = ("--hicache-io-backend", "direct", "--hicache-mem-layout", "layer_first")


def server_arguments(
    config: EngineConfig, model: Path, version: Version, max_context: int, seed: int, store: Path | None
) -> list[str]:
    """Arguments of sglang.launch_server, less host and port. `store`: folder of the page store, None = no store."""
    options = {
        "--model-path": model,
        "--device": config.sglang.device,
        "--dtype": weights_dtype(config, model),
        "--tp-size": config.sglang.tensor_parallel,
        "--page-size": config.page_tokens,
        "--max-total-tokens": config.pool_tokens,
        "--max-running-requests": config.capacity,
        "--context-length": max_context,
        "--random-seed": seed,
        "--weight-version": version,
    }
    flags = ["--skip-tokenizer-init", "--incremental-streaming-output"]
    if config.sglang.device == "cpu":
        flags += _CPU
    else:
        flags.append("--enable-memory-saver")
    if store is not None:
        flags += _cache(config, store, layout_seed(config, model))
    return [
        *(text for name, value in options.items() for text in (name, str(value))),
        *flags,
        *config.sglang.arguments,
    ]


def layout_seed(config: EngineConfig, model: Path) -> str:
    """Equal seeds mean interchangeable page bytes (of the same rank): model, its dtype, page size, sharding.

    Also the device and whatever else the server is told: its host pool keeps a page in an order of its own (`--hicache-mem-layout`;
    a default per device), or in another type (`--kv-cache-dtype`), and pages of unlike orders have the same size.
    """
    sglang = config.sglang
    told = (config.page_tokens, sglang.tensor_parallel, sglang.device, list(sglang.arguments))
    parts = (_shape(model), weights_dtype(config, model), *told)
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def weights_dtype(config: EngineConfig, model: Path) -> str:
    """The dtype served. SGLang's own `auto` would serve a float32 model in half precision."""
    if config.sglang.dtype != "auto":
        return config.sglang.dtype
    shape = _shape(model)
    return str(shape.get("dtype") or shape.get("torch_dtype") or "float32")


def _shape(model: Path) -> dict[str, Any]:
    path = model / "config.json"
    try:
        shape = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file", fix="set model.path to a folder with config.json"
        ) from None
    assert isinstance(shape, dict)
    return shape


def _cache(config: EngineConfig, store: Path, seed: str) -> list[str]:
    extra = {
        **STORAGE,
        "folder": str(store),
        "limit_bytes": config.kv_store_mib << 20,
        "layout": seed,
        "prefetch_threshold": config.page_tokens,
        "prefetch_timeout_base": config.sglang.prefetch_base_s,
        "prefetch_timeout_per_ki_token": config.sglang.prefetch_per_1k_tokens_s,
    }
    return [
        "--enable-hierarchical-cache",
        *("--hicache-write-policy", "write_through"),
        *("--hicache-storage-backend", "dynamic"),
        *("--hicache-storage-backend-extra-config", json.dumps(extra)),
        *(_CPU_CACHE if config.sglang.device == "cpu" else ()),
    ]
