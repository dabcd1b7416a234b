"""Hydra leaves logging alone: what is logged is the run's business, in the first run of a sweep as in the next."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SWEEP = """
import logging, os, sys
sys.argv, os.environ["HYDRA_FULL_ERROR"] = ["gyre"], "1"  # the application sets both
from gyre_hpc import hydra_app
logger = logging.getLogger("gyre_hpc.made_before")
overrides = ["--multirun", "experiment=quickstart", "root=ROOT", "seed=1,2"]
hydra_app.run(overrides, lambda config: sys.stdout.write(f"{logger.disabled} {logging.root.level}\\n"))
"""


def test_a_sweep_silences_no_logger_and_changes_no_level(tmp_path: Path) -> None:
    script = SWEEP.replace("ROOT", str(tmp_path))
    said = subprocess.check_output([sys.executable, "-c", script], text=True, timeout=300)
    assert said.splitlines() == ["False 30", "False 30"]
