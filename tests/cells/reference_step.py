"""One optimizer step in one process from core-*.npz and satellite-*.npz in a run folder; prints the weights' digest.

A program of its own: a process joins one torch world and keeps it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from gyre_hpc.config import load_run_config
from gyre_hpc.engines.weights import weights_digest
from gyre_hpc.records import Version
from gyre_hpc.trajectories.micro_steps import MicroStep


def main(run: Path) -> None:
    from gyre_hpc.training.trainer import Trainer

    config = load_run_config(run)
    trainer = Trainer(run / "model", config.trainer, config.objective, seed=config.seed)
    sums = {}
    for name in ("satellite", "core"):
        for path in sorted(run.glob(f"{name}-*.npz")):
            with np.load(path) as arrays:
                trainer.accumulate(MicroStep.from_arrays(path.stem, 0, dict(arrays)))
        sums[name] = {key: array.copy() for key, array in trainer.gradient().items()}
        trainer.clear()
    trainer.add(sums["core"])
    trainer.add(sums["satellite"])
    trainer.step(4, Version(1))
    sys.stdout.write(weights_digest(trainer.weights()) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
