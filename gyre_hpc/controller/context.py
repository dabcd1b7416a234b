"""What a controller is given by whoever starts it (`train.py`)."""

from __future__ import annotations

from dataclasses import dataclass

from gyre_hpc.config import RunConfig
from gyre_hpc.controller.journal.journal import Journal
from gyre_hpc.controller.monitor.progress import Progress
from gyre_hpc.layout import RunLayout
from gyre_hpc.report.metrics import MetricsWriter


@dataclass(frozen=True)
class RunContext:
    """What a controller is given: the run's configuration, folder, secret, epoch and open files."""

    config: RunConfig
    layout: RunLayout
    secret: bytes
    epoch: int
    journal: Journal
    metrics: MetricsWriter
    progress: Progress
