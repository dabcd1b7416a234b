"""`gyre shards verify|show|stats|export RUN` as a person sees them."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from gyre_hpc.errors import ConfigError, CorruptRecord
from gyre_hpc.shards.export import export
from gyre_hpc.shards.stats import show, stats
from gyre_hpc.shards.verify import verify


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*(str(value) for value in row))
    return table


def print_verify(run: Path, console: Console) -> None:
    """Check every shard. Raises CorruptRecord naming the bad ones."""
    report = verify(run)
    rows = [(shard.file, shard.executions, shard.bytes, shard.problem or "sound") for shard in report.shards]
    console.print(_table(f"shards of {run}", ("shard", "executions", "bytes", "state"), rows))
    for name in report.unlisted:
        console.print(
            f"{name}: not in the manifest (a seal that never finished; its executions are in the call log)"
        )
    if not report.ok:
        bad = [shard.file for shard in report.shards if shard.problem]
        raise CorruptRecord(
            f"{run}: damaged shards: {', '.join(bad)}",
            fix="the call log still has these executions: gyre train resume=RUN seals them again once the shard is removed",
        )


def print_stats(run: Path, console: Console, as_json: bool) -> None:
    """Counts over all shards."""
    found = stats(run)
    if as_json:
        console.print_json(msgspec.json.encode(dataclasses.asdict(found)).decode())
        return
    rows = [(field.name.replace("_", " "), getattr(found, field.name)) for field in dataclasses.fields(found)]
    console.print(_table(f"shards of {run}", ("what", "value"), rows))


def print_show(run: Path, execution: int, console: Console) -> None:
    """Calls, tree and kept paths of one execution."""
    shown = show(run, execution)
    console.print(shown.record)
    calls = [
        (
            call.call,
            call.role,
            call.prompt_tokens,
            call.output_tokens,
            call.finish,
            call.delivery,
            call.versions,
            "-" if call.kv_version is None else call.kv_version,
            ", ".join(call.forks),
        )
        for call in shown.calls
    ]
    heads = ("call", "role", "prompt", "output", "finish", "delivery", "versions", "oldest KV", "forks")
    console.print(_table("calls", heads, calls))
    nodes = [(number, node.parent, node.size, node.target) for number, node in enumerate(shown.nodes)]
    console.print(_table("tree", ("node", "parent", "tokens", "target"), nodes))
    paths = [(path.leaf, path.role, path.target_tokens) for path in shown.paths]
    console.print(_table("kept paths", ("leaf node", "role", "targets"), paths))


def main(arguments: list[str], run_folder: Path, console: Console) -> None:
    """Carry out `gyre shards ACTION RUN ...` for a checked run folder."""
    given = parser().parse_args(arguments)
    if given.action == "verify":
        print_verify(run_folder, console)
    elif given.action == "stats":
        print_stats(run_folder, console, given.json)
    elif given.action == "show":
        if given.execution is None:
            raise ConfigError("gyre shards show: --execution is missing", fix="add --execution ID")
        print_show(run_folder, given.execution, console)
    else:
        out = Path(given.out) if given.out else run_folder / "portable"
        lines = export(run_folder, out)
        console.print(f"{len(lines)} shards written to {out}", soft_wrap=True)


def parser() -> argparse.ArgumentParser:
    """Arguments of `gyre shards`."""
    result = argparse.ArgumentParser(
        prog="gyre shards",
        description="Check and read the trajectory shards of a run.",
        epilog="example: gyre shards show runs/quickstart-20260101-120000 --execution 12",
    )
    result.add_argument("action", choices=["verify", "show", "stats", "export"])
    result.add_argument("run", help="run folder")
    result.add_argument("--execution", type=int, help="show: execution id")
    result.add_argument("--json", action="store_true", help="stats: one JSON object")
    result.add_argument(
        "--portable",
        action="store_true",
        help="export: gzip, opens with plain h5py and HDF5 1.10 (the default)",
    )
    result.add_argument("--out", help="export: target folder (RUN/portable)")
    return result
