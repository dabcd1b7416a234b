"""The `gyre` command. Each verb is one function; heavy imports happen inside it.

Errors of the taxonomy print what, where and what to do, and set the exit code; anything else is a bug and keeps its
traceback.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from gyre_hpc.errors import ConfigError, GyreError, MissingInput

BENCHES = ("tree", "train-tree", "gateway", "schedule", "simulate", "regions", "switch", "scores")
BENCH_OPTIONS = {"switch": {"switches"}, "schedule": {"rows", "steps"}}
"""Options of `gyre bench` that only these take."""


@dataclass(frozen=True)
class Verb:
    """One sub-command: `run` gets the arguments after the verb."""

    run: Callable[[list[str]], None]
    help: str
    example: str


def _train(arguments: list[str]) -> None:
    from gyre_hpc import hydra_app
    from gyre_hpc.config import RunConfig
    from gyre_hpc.controller.train import train
    from gyre_hpc.report.finish import finish

    def task(config: RunConfig) -> None:
        train(config, lambda layout: finish(layout, Console(highlight=False)))

    hydra_app.run(arguments, task)


def _submit(arguments: list[str]) -> None:
    from gyre_hpc import cli_slurm

    cli_slurm.submit(_parser("submit"), arguments, Console(highlight=False))


def _stage(arguments: list[str]) -> None:
    from gyre_hpc import cli_slurm

    cli_slurm.stage(_parser("stage"), arguments, Console(highlight=False))


def _sweep(arguments: list[str]) -> None:
    from gyre_hpc import cli_sweep

    cli_sweep.sweep(_parser("sweep"), arguments, Console(highlight=False))


def _doctor(arguments: list[str]) -> None:
    from gyre_hpc import cli_doctor

    cli_doctor.doctor(_parser("doctor"), arguments, Console(highlight=False))


def _cells(arguments: list[str]) -> None:
    from gyre_hpc import cli_cells

    cli_cells.cells(_parser("cells"), arguments, Console(highlight=False))


def _controller(arguments: list[str]) -> None:
    from gyre_hpc import cli_slurm
    from gyre_hpc.controller.train import train
    from gyre_hpc.report.finish import finish

    parser = _parser("controller")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for gyre train")
    overrides = parser.parse_args(arguments).overrides
    cli_slurm.controller(
        overrides, lambda config: train(config, lambda layout: finish(layout, Console(highlight=False)))
    )


def _parser(verb: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"gyre {verb}", description=VERBS[verb].help, epilog=f"example: {VERBS[verb].example}"
    )


def _run_folder(text: str) -> Path:
    path = Path(text)
    if not (path / "config.yaml").is_file():
        raise MissingInput(f"{path}: not a run folder", fix="name a folder made by gyre train")
    return path


def _shards(arguments: list[str]) -> None:
    from gyre_hpc.shards import commands

    run = commands.parser().parse_args(arguments).run
    commands.main(arguments, _run_folder(run), Console(highlight=False))


def _report(arguments: list[str]) -> None:
    from gyre_hpc.layout import RunLayout
    from gyre_hpc.report.finish import finish

    parser = _parser("report")
    parser.add_argument("run", help="run folder")
    finish(RunLayout(_run_folder(parser.parse_args(arguments).run).absolute()), Console(highlight=False))


def _top(arguments: list[str]) -> None:
    from gyre_hpc.layout import RunLayout
    from gyre_hpc.report.top import top

    parser = _parser("top")
    parser.add_argument("run", help="run folder, of a live run or of one that has ended")
    parser.add_argument("--once", action="store_true", help="one picture, as when the output is no terminal")
    parser.add_argument("--window", type=float, default=600.0, help="seconds that the bars go back (600)")
    parser.add_argument("--every", type=float, default=2.0, help="seconds from one picture to the next (2)")
    given = parser.parse_args(arguments)
    if given.window <= 0 or given.every <= 0:
        parser.error("--window and --every are seconds, more than 0")
    layout, console = RunLayout(_run_folder(given.run).absolute()), Console(highlight=False)
    top(
        layout,
        console,
        window=given.window,
        every=given.every,
        once=given.once or not console.is_terminal,
    )


def _status(arguments: list[str]) -> None:
    from gyre_hpc.cli_output import json_line, say
    from gyre_hpc.controller.monitor.status import cell_statuses, status_lines

    parser = _parser("status")
    parser.add_argument("run", help="run folder, of a live run or of one that has ended")
    parser.add_argument("--json", action="store_true", help="one JSON line per cell")
    given = parser.parse_args(arguments)
    cells = cell_statuses(_run_folder(given.run))
    lines = [json_line(cell) for cell in cells] if given.json else status_lines(cells)
    say(Console(highlight=False), *lines)


def _warmstart(arguments: list[str]) -> None:
    from gyre_hpc.warmstart.make import make

    parser = _parser("warmstart")
    parser.add_argument("out", help="folder to write the policy to")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    make(Path(given.out), given.seed)


def _bench(arguments: list[str]) -> None:
    import msgspec

    parser = _parser("bench")
    parser.add_argument("name", choices=BENCHES)
    parser.add_argument("--switches", type=int, help="switch: how many role switches to make (200)")
    parser.add_argument("--rows", help="schedule: only these rows of the ladder, for example gyre,async")
    parser.add_argument("--steps", type=int, help="schedule: steps measured in each row, at most (12)")
    options = parser.parse_args(arguments)
    name = options.name
    given = {"switches": options.switches, "rows": options.rows, "steps": options.steps}
    wishes = {key: value for key, value in given.items() if value is not None}
    if unfit := wishes.keys() - BENCH_OPTIONS.get(name, set()):
        parser.error(f"--{min(unfit)} is not for `gyre bench {name}`")
    module = importlib.import_module(f"gyre_hpc.bench.{name.replace('-', '_')}")
    line = msgspec.json.encode({"bench": name, "figures": module.run(**wishes)})
    sys.stdout.write(line.decode() + "\n")


def _services(arguments: list[str]) -> None:
    import logging

    from gyre_hpc.config import load_run_config
    from gyre_hpc.launch.elsewhere.service_host import serve
    from gyre_hpc.launch.local import LocalLauncher
    from gyre_hpc.layout import RunLayout

    parser = _parser("services")
    parser.add_argument("run", help="run folder")
    folder = _run_folder(parser.parse_args(arguments).run).absolute()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    serve(RunLayout(folder), load_run_config(folder).cluster, LocalLauncher())


def _harness(arguments: list[str]) -> None:
    from gyre_hpc.harnesses import command

    command.main(_parser("harness"), arguments, Console(highlight=False))


def _simulate(arguments: list[str]) -> None:
    from gyre_hpc.simulate import app, from_run

    recorded = any(word.partition("=")[0] == "--from" for word in arguments)
    (from_run if recorded else app).main(arguments, Console(highlight=False))


def _plan(arguments: list[str]) -> None:
    from gyre_hpc.simulate import plan

    plan.main(arguments, Console(highlight=False))


VERBS = {
    "train": Verb(
        _train, "train a policy with elastic cells (a Hydra application)", "gyre train experiment=quickstart"
    ),
    "submit": Verb(
        _submit, "run it as one Slurm job", "gyre submit experiment=quickstart cluster=slurm --dry-run"
    ),
    "controller": Verb(
        _controller,
        "what a job script execs: gyre train, if job and configuration agree",
        "gyre controller experiment=quickstart cluster=slurm",
    ),
    "cells": Verb(
        _cells,
        "cells of another job join a live run, serve, train and may vanish",
        "gyre cells add runs/quickstart-1 --partition=preempt --cells=2",
    ),
    "stage": Verb(
        _stage,
        "check on the login node that a job will find all it needs",
        "gyre stage experiment=quickstart cluster=slurm",
    ),
    "sweep": Verb(
        _sweep,
        "how the points of a sweep on Slurm stand, and what they came to",
        "gyre sweep status runs/sweep-20260101-120000",
    ),
    "doctor": Verb(_doctor, "what this site can do, and what to fix", "gyre doctor --root /scratch/runs"),
    "shards": Verb(
        _shards, "check and read the trajectory shards of a run", "gyre shards verify runs/quickstart-1"
    ),
    "report": Verb(_report, "write report.html and summary.json of a run", "gyre report runs/quickstart-1"),
    "top": Verb(
        _top,
        "watch a run: score, unfinished work, the role of every cell, faults",
        "gyre top runs/quickstart-1",
    ),
    "status": Verb(
        _status,
        "where each cell stands, its last role switch step by step, and why it is blocked or quarantined",
        "gyre status runs/quickstart-1",
    ),
    "simulate": Verb(
        _simulate, "simulate schedules on machines of any size", "gyre simulate preset=paper_ladder"
    ),
    "plan": Verb(
        _plan,
        "choose burst length, extra dispatch and cells on a recorded run",
        "gyre plan burst --from runs/quickstart-1 staleness=1.5",
    ),
    "warmstart": Verb(
        _warmstart, "make the warm-start policy of patchkit", "gyre warmstart /tmp/policy --seed 1"
    ),
    "services": Verb(
        _services,
        "gateway and runner of a run in a job of their own: what its script execs",
        "gyre services runs/quickstart-1",
    ),
    "harness": Verb(
        _harness,
        "install a harness and show that it works through the gateway",
        "gyre harness check claude_code",
    ),
    "bench": Verb(_bench, "measure one part against a baseline in the same run", "gyre bench tree"),
}


def usage() -> str:
    """What `gyre --help` prints."""
    width = max(map(len, VERBS))
    rows = [
        f"  {name:<{width}}  {verb.help}\n  {'':<{width}}  {verb.example}" for name, verb in VERBS.items()
    ]
    return "usage: gyre VERB ...  (gyre VERB --help tells more)\n\n" + "\n".join(rows) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(usage())
        return 0
    try:
        _verb(arguments[0]).run(arguments[1:])
    except GyreError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"error: {error}", markup=False)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def _verb(name: str) -> Verb:
    if name not in VERBS:
        near = difflib.get_close_matches(name, VERBS, n=1)
        meant = f"did you mean gyre {near[0]}? " if near else ""
        raise ConfigError(f"gyre {name}: no such verb", fix=f"{meant}verbs: {', '.join(VERBS)}")
    return VERBS[name]


if __name__ == "__main__":
    sys.exit(main())
