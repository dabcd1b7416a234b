"""The verb `gyre sweep`: how the points of a sweep stand, and what they came to. Hydra's launcher submits them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from gyre_hpc.cli_output import json_line, say

if TYPE_CHECKING:
    from gyre_hpc.sweep.results import Result


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
        say(console, *(map(json_line, standings) if given.json else results.status_lines(standings)))
    elif given.json:
        say(console, *map(json_line, results.results(manifest)))
    else:
        _say_results(results.results(manifest), console)


def _say_results(points: list[Result], console: Console) -> None:
    from gyre_hpc.sweep.results import table

    if any(point.summary for point in points):
        console.print(table(points))
    say(console, *(f"missing  {point.label}: {point.missing}" for point in points if point.missing))
