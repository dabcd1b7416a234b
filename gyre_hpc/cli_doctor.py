"""The verb `gyre doctor`: what this site can do, one finding a line; the exit code tells whether one of them is a fault."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rich.console import Console

from gyre_hpc.cli_output import json_line, say
from gyre_hpc.errors import GyreError
from gyre_hpc.launch.doctor.site import Site


def doctor(parser: argparse.ArgumentParser, arguments: list[str], console: Console) -> None:
    """`gyre doctor [--json] [--root FOLDER] [--accepted FOLDER]`; inside slurm/accept.sbatch also --accept, --inside."""
    from gyre_hpc.launch.doctor import accept, accept_node
    from gyre_hpc.launch.doctor import checks as doctors
    from gyre_hpc.launch.doctor.site import site_of

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
        sys.stdout.write(json_line(site) + "\n")
        return
    for finding in site.findings:
        name = f"{finding.node} {finding.name}".strip()
        say(console, f"{finding.state.value:<8} {name:<21} {finding.found}")
        if finding.fix:
            say(console, f"{'':<8} {'':<21} -> {finding.fix}")
