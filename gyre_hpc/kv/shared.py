"""Where the KV pages of a run lie that its cells share (`engine.sglang.kv_folder`): FOLDER/RUN, RUN being the run's key.

A version number says nothing of another run's weights, so each run has a folder of its own. It lives as long as the run: a
requeued or resumed one finds its pages again, the controller that ends a run for good removes them.
"""

from __future__ import annotations

from pathlib import Path

from gyre_hpc.config import EngineConfig


def shared_folder(config: EngineConfig, run: str) -> Path | None:
    """The folder of the run with this key; None where each cell keeps its own."""
    folder = config.sglang.kv_folder
    return Path(folder) / run if folder else None
