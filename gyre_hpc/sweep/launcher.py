"""The Hydra launcher `gyre_slurm`: `gyre train --multirun KEY=A,B hydra/launcher=gyre_slurm`.

It submits one job per point and returns; an error of a point is recorded in the sweep's manifest and not raised.
Hydra's own sweeper composes all points first and stops the sweep at the first one that cannot be composed, hence the
one here, which leaves that to the launcher. Imported by `plugins` only, after Hydra has loaded its own plugins: it
executes their modules again, and a class derived before that would have a stale base.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig
from rich.console import Console

from gyre_hpc.sweep.plugins import PLUGINS
from gyre_hpc.sweep.points import Point, points_of

if TYPE_CHECKING:
    from gyre_hpc.sweep.manifest import Entry
    from gyre_hpc.sweep.pace import Pace


class SlurmSweepLauncher(Launcher):
    """Each point of the sweep as one Slurm job; docs/slurm.md."""

    __module__ = PLUGINS

    def __init__(
        self,
        site: str | None = None,
        retry_failed: bool = False,
        wait: bool = False,
        max_jobs: int = 0,
        poll_s: float = 30.0,
    ) -> None:
        self._site = Path(site) if site else None
        self._retry_failed = retry_failed
        self._wait, self._max_jobs, self._poll_s = wait, max_jobs, poll_s
        self._config: DictConfig | None = None

    def setup(self, *, config: DictConfig, **given: Any) -> None:
        self._config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from gyre_hpc.sweep import lock
        from gyre_hpc.sweep.pace import Pace

        assert self._config is not None, "Hydra calls setup before launch"
        console = Console(highlight=False)
        folder = Path(self._config.hydra.sweep.dir).absolute()
        points = points_of(job_overrides, self._config.hydra.overrides.task)
        with lock.held(folder):
            entries = self._submit(folder, points, Pace(self._max_jobs, self._wait, self._poll_s), console)
        return [
            JobReturn(entry.overrides, status=JobStatus.COMPLETED, _return_value=entry) for entry in entries
        ]

    def _submit(self, folder: Path, points: Sequence[Point], pace: Pace, console: Console) -> list[Entry]:
        from gyre_hpc.sweep import pace as paces
        from gyre_hpc.sweep import results
        from gyre_hpc.sweep.manifest import Manifest
        from gyre_hpc.sweep.submission import submit_points

        def tell(line: str) -> None:
            console.print(line, markup=False, soft_wrap=True)

        manifest = Manifest.opened(folder)
        entries = submit_points(
            points, manifest, site=self._site, retry_failed=self._retry_failed, pace=pace, tell=tell
        )
        for line in _commands(folder, sum(entry.job is not None for entry in entries), len(entries)):
            tell(line)
        if pace.wait:
            paces.wait_for_all(manifest, pace)
            for line in results.status_lines(results.standings(manifest)):
                tell(line)
            console.print(results.table(results.results(manifest)))
        return entries


class UncheckedSweeper(BasicSweeper):
    """Hydra's sweeper without its composition of all points ahead of the launcher."""

    __module__ = PLUGINS

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """The launcher composes each point and records the error of one that fails."""


def _commands(folder: Path, jobs: int, points: int) -> list[str]:
    return [
        f"sweep   {folder}: {jobs} of {points} points have a job",
        f"        watch:    gyre sweep status {folder}",
        f"        results:  gyre sweep collect {folder}",
        f"        go on:    the same command with hydra.sweep.dir={folder} [hydra.launcher.retry_failed=true]",
    ]
