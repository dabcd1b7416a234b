"""Where the versions stand that a harness's PyPI packages are installed with: files of conf/harness/, named by `harness.lock`.

A lock is what `pip freeze` said of a prefix that passed `gyre harness check`, without the harness itself.
"""

from __future__ import annotations

from pathlib import Path

from gyre_hpc.composition import conf_dir
from gyre_hpc.config import HarnessConfig
from gyre_hpc.errors import MissingInput


def lock_of(config: HarnessConfig) -> Path | None:
    """The constraints file for pip, None without one. Raises MissingInput."""
    if not config.lock:
        return None
    path = conf_dir() / "harness" / config.lock
    if not path.is_file():
        raise MissingInput(
            f"harness.lock: {path} is not there", fix="write it with pip freeze, or set harness.lock=''"
        )
    return path
