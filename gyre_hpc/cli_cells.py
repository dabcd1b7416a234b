"""The verbs `gyre cells add`, `gyre cells host` and `gyre cells list`: cells of other jobs in a live run."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rich.console import Console

from gyre_hpc.cli_output import say
from gyre_hpc.config import RunConfig, load_run_config
from gyre_hpc.errors import ConfigError, MissingInput
from gyre_hpc.launch.job import profiles
from gyre_hpc.launch.owner import why_alive
from gyre_hpc.layout import RunLayout

log = logging.getLogger(__name__)
SHORT: Final = {"partition": "cluster.job.partition", "time": "cluster.job.time"}
"""Options that stand for a key."""
HELP: Final = {
    "add": "submit a job whose cells join a live run",
    "host": "offer room for cells on this machine, or in this job (what the job of `add` runs)",
    "list": "the cells of a run, where each comes from and what it does",
}


def cells(parser: argparse.ArgumentParser, arguments: list[str], console: Console) -> None:
    """`gyre cells add|host|list RUN ...`."""
    given = _parse(parser, arguments)
    layout = RunLayout(given.run.absolute())
    if not layout.config.is_file():
        raise MissingInput(
            f"{layout.root}: not a run folder", fix="name a folder made by gyre train or submit"
        )
    if given.verb != "list" and given.cells < 1:
        raise ConfigError(f"--cells={given.cells}: nothing would join", fix="give --cells=1 or more")
    verbs: dict[str, Callable[[argparse.Namespace, RunLayout, Console], None]] = {
        "add": _add,
        "host": _host,
        "list": _list,
    }
    verbs[given.verb](given, layout, console)


def _parse(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    """argparse mixes options and further words only where there are no sub-commands."""
    parser.add_argument(
        "verb", choices=HELP, help="; ".join(f"{verb}: {what}" for verb, what in HELP.items())
    )
    verb = parser.parse_args(arguments[:1]).verb
    of_verb = argparse.ArgumentParser(
        prog=f"{parser.prog} {verb}", description=HELP[verb], epilog=parser.epilog
    )
    of_verb.add_argument("run", type=Path, metavar="RUN", help="run folder")
    if verb != "list":
        of_verb.add_argument("--cells", type=int, required=True, help="how many")
        of_verb.add_argument("--rollout-only", action="store_true", help="they serve calls and never train")
        of_verb.add_argument(
            "--requeue", action="store_true", help="give the job back to the queue when it is told to end"
        )
    if verb == "add":
        _add_options_of_the_job(of_verb)
    return of_verb.parse_intermixed_args(arguments[1:], argparse.Namespace(verb=verb))


def _add_options_of_the_job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides", nargs="*", metavar="cluster.job.KEY=VALUE", help="where the job differs from the run's"
    )
    parser.add_argument("--partition", help="partition of the job, as a preemptible one")
    parser.add_argument("--time", help="time limit of the job")
    parser.add_argument("--site", type=Path, help="YAML file with keys of the section cluster (slurm/sites/)")
    parser.add_argument("--dry-run", action="store_true", help="print script and plan, submit nothing")


# ---- add ----------------------------------------------------------------------------------------------------------


def _add(given: argparse.Namespace, layout: RunLayout, console: Console) -> None:
    from gyre_hpc.launch.elsewhere.guest_job import guest_script, request_for_guests
    from gyre_hpc.launch.job import submit as slurm

    config = _config_of_the_job(given, layout)
    request = request_for_guests(config.cluster, given.cells)
    script = guest_script(config, layout, given.cells, rollout_only=given.rollout_only)
    told = [f"nodes   {component}" for component in request.components]
    if given.dry_run:
        say(console, script, *told)
        return
    _check_alive(layout)
    slurm.check_slurm()
    taken = slurm.submit(script, layout)
    told = [
        f"job     {taken.job}",
        f"run     {layout.root}",
        f"script  {taken.script}",
        f"log     {taken.log}",
        *told,
    ]
    told += [f"        watch:    squeue -j {taken.job}; gyre cells list {layout.root}"]
    say(console, *told, f"        end it:   scancel {taken.job}")


def _config_of_the_job(given: argparse.Namespace, layout: RunLayout) -> RunConfig:
    options = [f"{key}={getattr(given, name)}" for name, key in SHORT.items() if getattr(given, name)]
    words = [*profiles.site_overrides(given.site), *given.overrides, *options]
    config = profiles.resubmitted(load_run_config(layout.root), words)
    config.cluster.job.requeue = given.requeue
    return config


def _check_alive(layout: RunLayout) -> None:
    if not why_alive(layout.root):
        raise MissingInput(
            f"{layout.root}: no controller of this run is alive, so there is nothing to join",
            fix=f"start it or go on with it first: gyre submit resume={layout.root} (or gyre train), and wait until it runs",
        )


# ---- host ---------------------------------------------------------------------------------------------------------


def _host(given: argparse.Namespace, layout: RunLayout, console: Console) -> None:
    from gyre_hpc.launch.elsewhere.cell_host import CellHost
    from gyre_hpc.launch.job.allocation import read_allocation
    from gyre_hpc.launch.local import LocalLauncher
    from gyre_hpc.launch.slurm import SlurmLauncher
    from gyre_hpc.transport.messages import OfferCells

    config = load_run_config(layout.root)
    in_job = config.cluster.kind == "slurm" and read_allocation(os.environ) is not None
    if not in_job:
        _check_alive(layout)
    launcher = SlurmLauncher.from_environment(config.cluster, layout) if in_job else LocalLauncher()
    job = os.environ["SLURM_JOB_ID"] if in_job else ""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    offer = OfferCells(given.cells, given.rollout_only, job)

    async def host() -> bool:
        """Whether somebody told it to end."""
        served = CellHost(config, layout, offer, launcher)
        log.info("the host ends: %s", await served.run())
        return served.asked.is_set()

    if asyncio.run(host()) and given.requeue and job:
        _requeue(job)


def _requeue(job: str) -> None:
    """Back into the queue; Slurm ends this job as it does so."""
    from gyre_hpc.launch.commands import query

    query("scontrol", "requeue", job)


# ---- list ---------------------------------------------------------------------------------------------------------


def _list(given: argparse.Namespace, layout: RunLayout, console: Console) -> None:
    from gyre_hpc.controller.journal.entries import GuestsJoined
    from gyre_hpc.controller.journal.journal import read_journal
    from gyre_hpc.report import metrics as m

    roles = {
        line.cell: line.role for line in m.read_metrics(layout.metrics) if isinstance(line, m.RoleChange)
    }
    rows = [(cell, "the run's own") for cell in range(load_run_config(layout.root).cluster.cells)]
    for entry in read_journal(layout.journal):
        if isinstance(entry, GuestsJoined):
            source = f"job {entry.job} on {entry.host}" if entry.job else entry.host
            rows += [(cell, f"{source}, {entry.kind}") for cell in entry.cells]
    say(console, *(f"cell-{cell:<4} {roles.get(cell, 'starting'):<10} {source}" for cell, source in rows))
