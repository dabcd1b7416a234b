"""`replay_step.py RUN`: the run's first step again, in one process, from its journal and call logs alone.

The processor's own code makes the micro-steps anew; the step record says who accumulated which in what order. Prints two
digests: of the replayed weights and of the checkpoint's. A program of its own: a process joins one torch world.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from safetensors.numpy import load_file

from gyre_hpc.config import load_run_config
from gyre_hpc.controller.executions.queries import training_query
from gyre_hpc.controller.journal.entries import Happened, Outcome, StepTaken
from gyre_hpc.controller.journal.journal import read_journal
from gyre_hpc.controller.processor import Processor
from gyre_hpc.engines.weights import weights_digest
from gyre_hpc.layout import RunLayout
from gyre_hpc.schedule.protocol import Dispatch
from gyre_hpc.trajectories.micro_steps import MicroStep
from gyre_hpc.transport.messages import ExpectGroup, Manifest, RegionKind


def micro_steps(layout: RunLayout) -> dict[str, MicroStep]:
    """Every micro-step of the run by name."""
    config, found = load_run_config(layout.root), dict[str, MicroStep]()

    def publish(step: MicroStep, version: int) -> Manifest:
        found[step.id] = step
        return Manifest(RegionKind.MICRO_STEPS, step.id, version, "", "", "", ())

    processor = Processor(layout, config, publish, lambda manifest: None, lambda message: None)
    now = time.monotonic()
    for entry in read_journal(layout.journal):
        if isinstance(entry, Happened):
            for decision in entry.decisions:
                if isinstance(decision, Dispatch):
                    for group in decision.groups:
                        query = training_query(config.tasks, config.seed, group.group)
                        processor.obey(
                            ExpectGroup(group.group, query, decision.version, group.executions), now
                        )
        elif isinstance(entry, Outcome):
            processor.obey(entry.outcome, now)
    processor.advance(now)
    return found


def main(run: Path) -> None:
    from gyre_hpc.training.trainer import Trainer

    layout, config = RunLayout(run), load_run_config(run)
    record = next(entry for entry in read_journal(layout.journal) if isinstance(entry, StepTaken))
    steps = micro_steps(layout)
    trainer = Trainer(layout.model, config.trainer, config.objective, seed=config.seed)
    contributions = []
    for _, names in record.owners:
        for name in names:
            trainer.accumulate(steps[name])
        contributions.append({key: array.copy() for key, array in trainer.gradient().items()})
        trainer.clear()
    for contribution in contributions:
        trainer.add(contribution)
    trainer.step(record.executions, record.version)
    saved = load_file(layout.checkpoint(record.version) / "model.safetensors")
    sys.stdout.write(f"{weights_digest(trainer.weights())} {weights_digest(saved)}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
