"""The `engine.sglang` part of the schema: where SGLang is, and what it is started with beside `engine`."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class SglangConfig:
    """A real SGLang server as the engine (engine.kind=sglang)."""

    python: str = ""
    """Python of the environment that holds sglang; empty = the one that runs gyre_hpc."""
    device: str = "cuda"
    """`cuda`, or `cpu`: dense models only, for tests (tools/setup_sglang.sh makes the environment)."""
    tensor_parallel: int = 1
    """GPUs one server is spread over (TP)."""
    dtype: str = "auto"
    """Type of weights and KV: `auto` (the model's own), `bfloat16`, `float16` or `float32`."""
    kv_folder: str = ""
    """Folder for KV pages that all cells share (a parallel filesystem): a moved call finds them without a transfer. Each run has a
    folder of its own in it. Empty = each cell keeps its own, in memory where the host can. Either way `engine.kv_store_mib`
    bounds it, and 0 keeps none."""
    prefetch_base_s: float = 10.0
    """Seconds a call waits for its pages from the store before what is missing is computed."""
    prefetch_per_1k_tokens_s: float = 0.25
    """Seconds added to that per 1024 tokens of the prompt."""
    arguments: list[str] = field(default_factory=list)
    """Further arguments of sglang.launch_server, for example ["--mem-fraction-static", "0.8"]."""
