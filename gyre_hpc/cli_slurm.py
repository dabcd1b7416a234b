"""The verbs `gyre submit`, `gyre controller` and `gyre stage`: one run as one Slurm job.

`submit` composes and freezes the run on the login node and hands Slurm a script; `controller` is what that script, or
slurm/train.sbatch, execs in the batch step. Slurm's own rules are in `gyre_hpc.launch`; here they meet the run.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from gyre_hpc import hydra_app
from gyre_hpc.cli_output import say
from gyre_hpc.config import RunConfig, load_run_config
from gyre_hpc.errors import ConfigError
from gyre_hpc.launch.identity import job_id, job_restarts
from gyre_hpc.launch.job import profiles
from gyre_hpc.launch.nodes.bad_nodes import submitted_exclude
from gyre_hpc.layout import RunLayout

Train = Callable[[RunConfig], None]


def submit(parser: argparse.ArgumentParser, arguments: list[str], console: Console) -> None:
    """`gyre submit OVERRIDES... [--site FILE] [--dry-run]`."""
    from gyre_hpc.launch.elsewhere.service_job import request_for_services
    from gyre_hpc.launch.job.request import request_for
    from gyre_hpc.launch.job.submit import script_for

    given = _parse(parser, arguments, dry_run=True)
    config, folder = _run_to_submit(given.overrides, given.site)
    request = request_for(config.cluster)
    script = script_for(config, folder or profiles.planned(config))
    plan = [f"nodes   {component}" for component in request.components]
    plan += [f"lost    {warning}" for warning in request.warnings]
    if config.cluster.runners == "external":
        plan += [f"nodes   {component}" for component in request_for_services(config.cluster).components]
    if given.dry_run:
        say(console, script, *plan)
    else:
        told, commands = _submitted(config, folder)
        say(console, *told, *plan, *commands)


def _submitted(config: RunConfig, folder: RunLayout | None) -> tuple[list[str], list[str]]:
    """Submit, after a look at what would be missing; what was submitted, and the commands to watch it."""
    from gyre_hpc.launch.elsewhere import service_job
    from gyre_hpc.launch.job import staging
    from gyre_hpc.launch.job import submit as slurm

    staging.check_staged(config, folder)
    slurm.check_slurm()
    layout = folder or _made(config)
    taken = service_job.submit_both(config, layout)
    told = [
        f"job     {taken.job}",
        f"run     {layout.root}",
        f"script  {taken.script}",
        f"log     {taken.log}",
    ]
    return told, _commands(taken.job, taken.log, layout.root)


def _commands(job: str, log: Path, run: Path) -> list[str]:
    return [
        f"        watch:    gyre top {run}; squeue -j {job}; tail -F {log}",
        f"        report:   gyre report {run}",
        f"        end it:   scancel --batch --signal=TERM {job}",
        f"        go on:    gyre submit resume={run}",
    ]


def stage(parser: argparse.ArgumentParser, arguments: list[str], console: Console) -> None:
    """`gyre stage OVERRIDES... [--site FILE]`: fetch what can be fetched; what the job will need, found or missing."""
    from gyre_hpc.launch.job import staging

    given = _parse(parser, arguments)
    config, folder = _run_to_submit(given.overrides, given.site)
    say(console, *staging.fetch(config, folder))
    for need in staging.needs(config, folder):
        state = f"missing: {need.error.message}" if need.error else need.found
        say(console, f"{need.what:<18} {state}")
    staging.check_staged(config, folder)


def controller(arguments: list[str], train: Train) -> None:
    """`gyre controller OVERRIDES...`: train in the allocation this process is the batch step of, if it fits the run."""

    def task(config: RunConfig) -> None:
        config = _restarted(config)
        check(load_run_config(Path(config.resume)) if config.resume else config)
        train(config)

    going_on, others = _resume_of(arguments)
    if going_on.resume and not others:
        task(going_on)  # needs no conf/: the run's own config.yaml holds everything
    else:
        hydra_app.run(arguments, task)


def _restarted(config: RunConfig) -> RunConfig:
    """Of a job that Slurm has started again, the run it began: its script names no run (slurm/train.sbatch)."""
    from gyre_hpc.launch.owner import run_of_job

    job = job_id()
    if config.resume or job_restarts() == 0:
        return config
    begun = run_of_job(Path(config.root).absolute(), job)
    return config if begun is None else RunConfig(model=config.model, resume=str(begun))


def check(config: RunConfig) -> None:
    """Raise ConfigError unless this process runs in a job that holds what `config` asks for."""
    from gyre_hpc.launch.job.allocation import check_allocation, read_allocation, read_gres

    if config.cluster.kind != "slurm":
        raise ConfigError(
            f"cluster.kind={config.cluster.kind}: gyre controller is the batch process of a Slurm job",
            fix="use gyre train, or add cluster=slurm",
        )
    allocation = read_allocation(os.environ)
    if allocation is None:
        raise ConfigError(
            "cluster.kind=slurm, but this is not run inside a Slurm job",
            fix="gyre submit ARGUMENTS, or sbatch slurm/train.sbatch ARGUMENTS",
        )
    check_allocation(config.cluster, allocation, read_gres(allocation))


def _parse(
    parser: argparse.ArgumentParser, arguments: list[str], *, dry_run: bool = False
) -> argparse.Namespace:
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for gyre train")
    parser.add_argument("--site", type=Path, help="YAML file with keys of the section cluster (slurm/sites/)")
    if dry_run:
        parser.add_argument("--dry-run", action="store_true", help="print script and plan, submit nothing")
    return parser.parse_intermixed_args(arguments)


def _run_to_submit(overrides: list[str], site: Path | None) -> tuple[RunConfig, RunLayout | None]:
    """Configuration and, of a run that goes on (`resume=RUN`), its folder."""
    going_on, others = _resume_of(overrides)
    if not going_on.resume:
        return profiles.composed(overrides, site), None
    layout = RunLayout(Path(going_on.resume).absolute())
    config = profiles.resubmitted(load_run_config(layout.root), [*profiles.site_overrides(site), *others])
    config.resume_force = going_on.resume_force
    config.cluster.job.exclude = submitted_exclude(config.cluster.job.exclude, layout)
    return config, layout


def _resume_of(overrides: list[str]) -> tuple[RunConfig, list[str]]:
    """What `resume` and `resume_force` say, and the other words."""
    words = [word for word in overrides if word.startswith(("resume=", "resume_force="))]
    said = dict(word.split("=", 1) for word in words)
    force = said.get("resume_force", "").lower() == "true"
    return RunConfig(resume=said.get("resume", ""), resume_force=force), [
        word for word in overrides if word not in words
    ]


def _made(config: RunConfig) -> RunLayout:
    from gyre_hpc.controller.train import new_run

    return new_run(config)
