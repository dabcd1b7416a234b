"""The verbs `gyre submit`, `gyre controller`, `gyre stage`, `gyre sweep` and `gyre doctor`: one run as one Slurm job.

`submit` composes and freezes the run on the login node and hands Slurm a script; `controller` is what that script, or
slurm/train.sbatch, execs in the batch step. Slurm's own rules are in `gyre_hpc.launch`; here they meet the run.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console

from gyre_hpc import hydra_app
from gyre_hpc.config import RunConfig, load_run_config
from gyre_hpc.errors import ConfigError, GyreError
from gyre_hpc.launch import profiles
from gyre_hpc.launch.bad_nodes import submitted_exclude
from gyre_hpc.launch.site import Site
from gyre_hpc.layout import RunLayout

if TYPE_CHECKING:
    from gyre_hpc.sweep.results import Result

Train = Callable[[RunConfig], None]


def submit(parser: argparse.ArgumentParser, arguments: list[str], console: Console) -> None:
    """`gyre submit OVERRIDES... [--site FILE] [--dry-run]`."""
    from gyre_hpc.launch.request import request_for
    from gyre_hpc.launch.service_job import request_for_services
    from gyre_hpc.launch.submit import script_for

    given = _parse(parser, arguments, dry_run=True)
    config, folder = _run_to_submit(given.overrides, given.site)
    request = request_for(config.cluster)
    script = script_for(config, folder or profiles.planned(config))
    plan = [f"nodes   {component}" for component in request.components]
    plan += [f"lost    {warning}" for warning in request.warnings]
    if config.cluster.runners == "external":
        plan += [f"nodes   {component}" for component in request_for_services(config.cluster).components]
    if given.dry_run:
        _print(console, script, *plan)
    else:
        told, commands = _submitted(config, folder)
        _print(console, *told, *plan, *commands)


def _submitted(config: RunConfig, folder: RunLayout | None) -> tuple[list[str], list[str]]:
    """Submit, after a look at what would be missing; what was submitted, and the commands to watch it."""
    from gyre_hpc.launch import service_job, staging
    from gyre_hpc.launch import submit as slurm

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
        f"        watch:    squeue -j {job}; tail -F {log}",
        f"        report:   gyre report {run}",
        f"        end it:   scancel --batch --signal=TERM {job}",
        f"        go on:    gyre submit resume={run}",
    ]


def stage(parser: argparse.ArgumentParser, arguments: list[str], console: Console) -> None:
    """`gyre stage OVERRIDES... [--site FILE]`: fetch what can be fetched; what the job will need, found or missing."""
    from gyre_hpc.launch import staging

    given = _parse(parser, arguments)
    config, folder = _run_to_submit(given.overrides, given.site)
    _print(console, *staging.fetch(config))
    for need in staging.needs(config, folder):
        state = f"missing: {need.error.message}" if need.error else need.found
        _print(console, f"{need.what:<18} {state}")
    staging.check_staged(config, folder)


def sweep(parser: argparse.ArgumentParser, arguments: list[str], console: Console) -> None:
    """`gyre sweep status FOLDER [--json]`, `gyre sweep collect FOLDER [--json]`."""
    from gyre_hpc.sweep import results
    from gyre_hpc.sweep.manifest import Manifest

    parser.add_argument(
        "what", choices=("status", "collect"), help="how each point stands, or what it came to"
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="sweep folder")
    parser.add_argument("--json", action="store_true", help="one JSON line per point")
    given = parser.parse_args(arguments)
    manifest = Manifest.existing(given.folder)
    if given.what == "status":
        standings = results.standings(manifest)
        _print(console, *(map(_json, standings) if given.json else results.status_lines(standings)))
    elif given.json:
        _print(console, *map(_json, results.results(manifest)))
    else:
        _print_results(results.results(manifest), console)


def _json(record: object) -> str:
    import msgspec

    return msgspec.json.encode(record).decode()


def _print_results(points: list[Result], console: Console) -> None:
    from gyre_hpc.sweep.results import table

    if any(point.summary for point in points):
        console.print(table(points))
    _print(console, *(f"missing  {point.label}: {point.missing}" for point in points if point.missing))


def doctor(parser: argparse.ArgumentParser, arguments: list[str], console: Console) -> None:
    """`gyre doctor [--json] [--root FOLDER] [--accepted FOLDER]`; inside slurm/accept.sbatch also --accept, --inside."""
    from gyre_hpc.launch import accept, accept_node
    from gyre_hpc.launch import doctor as doctors
    from gyre_hpc.launch.site import site_of

    given = _doctor_arguments(parser, arguments)
    if given.inside:
        node = os.environ.get("SLURMD_NODENAME", "")
        accept_node.report_node(given.inside, node, given.nodes, lambda: doctors.inside(given.inside.parent))
        return
    site = (
        accept.accept(given.accept) if given.accept else site_of(doctors.examine(given.root, given.accepted))
    )
    _tell_site(site, console, as_json=given.json)
    faults = doctors.faults(site.findings)
    if faults:
        names = ", ".join(dict.fromkeys(finding.name for finding in faults))
        raise GyreError(f"{len(faults)} faults: {names}", fix="each line with 'fault' says what to do")


def _doctor_arguments(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    parser.add_argument("--json", action="store_true", help="one JSON object, as in site.json")
    parser.add_argument("--root", type=Path, default=Path("runs"), help="where runs shall lie (key root)")
    parser.add_argument(
        "--accepted",
        type=Path,
        default=Path(),
        metavar="FOLDER",
        help="holds the site.json of slurm/accept.sbatch",
    )
    parser.add_argument("--accept", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--nodes", nargs="*", default=[], help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _tell_site(site: Site, console: Console, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(msgspec.json.encode(site).decode() + "\n")
        return
    for finding in site.findings:
        name = f"{finding.node} {finding.name}".strip()
        _print(console, f"{finding.state.value:<8} {name:<21} {finding.found}")
        if finding.fix:
            _print(console, f"{'':<8} {'':<21} -> {finding.fix}")


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

    job = os.environ.get("SLURM_JOB_ID", "")
    if config.resume or int(os.environ.get("SLURM_RESTART_COUNT", "0")) == 0:
        return config
    begun = run_of_job(Path(config.root).absolute(), job)
    return config if begun is None else RunConfig(model=config.model, resume=str(begun))


def check(config: RunConfig) -> None:
    """Raise ConfigError unless this process runs in a job that holds what `config` asks for."""
    from gyre_hpc.launch.allocation import check_allocation, read_allocation, read_gres

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


def _print(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
