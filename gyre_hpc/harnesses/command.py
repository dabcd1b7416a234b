"""`gyre harness check NAME` as a person sees it: one line per finding, and the harness's last words when one fails."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

from rich.console import Console

from gyre_hpc.composition import compose
from gyre_hpc.config import HarnessConfig
from gyre_hpc.errors import GyreError
from gyre_hpc.harnesses.check import Trial, run
from gyre_hpc.harnesses.findings import Finding, judge
from gyre_hpc.harnesses.locks import lock_of
from gyre_hpc.harnesses.packages import install, prefix_of
from gyre_hpc.harnesses.stand import MAX_CONTEXT

LAST_LINES = 15
ROOM = [
    f"{key}={MAX_CONTEXT}"
    for key in ("model.max_context", "trainer.tokens_per_micro_step", "engine.pool_tokens")
]
"""The context a harness is told of is the one that the check serves."""


class HarnessFailed(GyreError):
    """A harness did not pass its check (names the findings)."""


def main(parser: argparse.ArgumentParser, arguments: list[str], console: Console) -> None:
    """Run the verb. Raises HarnessFailed when something does not work."""
    given = _given(parser, arguments)
    config = compose([f"harness={given.name}", *ROOM, *given.overrides])
    trial = Trial(given.silence, given.timeout)
    if config.harness.packages:
        _say(console, installed(config.harness))
    with tempfile.TemporaryDirectory(prefix="gyre-harness-") as folder:
        outcome = asyncio.run(run(config, Path(folder), trial))
        findings = list(judge(outcome, trial, config.harness.dialect))
    for finding in findings:
        _say(console, finding)
    failed = [finding.what for finding in findings if not finding.works]
    if failed:
        for line in outcome.output.splitlines()[-LAST_LINES:]:
            console.print(f"  | {line[:300]}", markup=False, soft_wrap=True)
        raise HarnessFailed(f"harness {given.name}: {', '.join(failed)}", fix="see docs/harnesses.md")


def installed(config: HarnessConfig) -> Finding:
    """Install what the harness comes from. Raises GyreError."""
    prefix, begun = prefix_of(config.packages, config.prefix), time.monotonic()
    made = install(config.packages, prefix, lock_of(config))
    how = f"installed in {time.monotonic() - begun:.0f} s" if made else "installed before"
    return Finding("packages", True, f"{', '.join(config.packages)}: {how}, in {prefix}")


def _given(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    parser.add_argument("action", choices=["check"])
    parser.add_argument("name", help="file of conf/harness/ without .yaml")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for gyre train")
    parser.add_argument(
        "--silence", type=float, default=5.0, help="seconds the first answer is silent half-way"
    )
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds the whole task may take")
    return parser.parse_args(arguments)


def _say(console: Console, finding: Finding) -> None:
    mark = "ok  " if finding.works else "FAIL"
    console.print(f"{mark} {finding.what:<13} {finding.detail}", markup=False, soft_wrap=True)
