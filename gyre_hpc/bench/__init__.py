"""Benchmarks: one module per `gyre bench NAME`, each with `run() -> dict[str, Figure]`."""
