"""tools/check_run.py: a whole run passes; whatever is missing is named."""

from __future__ import annotations

import subprocess
import sys
from io import StringIO
from pathlib import Path

from rich.console import Console

from gyre_hpc.layout import RunLayout
from gyre_hpc.report import metrics as m
from gyre_hpc.report.finish import finish
from tests.report import runs

TOOL = Path(__file__).resolve().parents[2] / "tools" / "check_run.py"


def check(*arguments: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, TOOL, *arguments], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def finished(root: Path, lines: list[m.AnyMetric]) -> Path:
    layout = RunLayout(root)
    layout.create()
    runs.write(layout.metrics, lines)
    finish(layout, Console(file=StringIO()))
    (layout.shards / "000.h5").touch()
    layout.manifest.touch()
    layout.checkpoint(1).mkdir()
    return root


def test_an_elastic_run_is_sound(tmp_path: Path) -> None:
    assert check(str(finished(tmp_path, runs.elastic(3)))) == (0, f"{tmp_path}: mechanism is sound\n")


def test_a_lost_call_and_a_missing_shard_are_named(tmp_path: Path) -> None:
    run = finished(tmp_path, [*runs.elastic(2), runs.ended(999.0, 999, None, calls=1, calls_lost=1)])
    (run / "shards" / "000.h5").unlink()
    code, said = check(str(run))
    assert code == 1
    assert said.splitlines() == [
        f"{run}: missing or wrong: {what}" for what in ("no lost calls", "sealed shards")
    ]


def test_a_run_that_has_not_ended_is_named(tmp_path: Path) -> None:
    code, said = check(str(tmp_path))
    assert code == 1 and "summary.json" in said
    assert check()[0] == 2
