"""`gyre simulate` at the command line: JSON of fixed shape, traces of one's own, errors that name the key or row."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gyre_hpc.cli import main
from gyre_hpc.errors import ConfigError
from gyre_hpc.simulate.trace_files import read_trace, trace_workload

TINY = (
    "seeds=2",
    "world.nodes=8",
    "world.slots=24",
    "world.batch_groups=4",
    "world.executions_per_group=3",
)
SHORT = ("steps=4", "warm_up=0")
INTERVAL = {"mean", "low", "high"}


def simulate(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["simulate", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_ladder_as_json_is_one_line_of_the_promised_shape() -> None:
    command = (
        sys.executable,
        "-m",
        "gyre_hpc.cli",
        "simulate",
        "preset=paper_ladder",
        "--json",
        *TINY,
        *SHORT,
    )
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.count("\n") == 1
    (ladder,) = json.loads(said).values()
    assert set(ladder) == {"A0", "A3", "C0", "C1", "C2", "E0", "E1", "E2"}
    assert all(set(row) == INTERVAL and row["low"] <= row["mean"] <= row["high"] for row in ladder.values())
    assert ladder["E0"] == {"mean": 1.0, "low": 1.0, "high": 1.0}


def test_pictures_are_made_of_the_rows_that_were_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "pictures"
    code, out, _ = simulate(capsys, "world=P1", "cells=4", *TINY, *SHORT, f"pictures={folder}")
    assert code == 0 and f"pictures: {folder}/simulation.html" in out.replace("\n", "")
    names = {path.name for path in folder.iterdir()}
    assert {"simulation.html", "idle.png", "ladder.png", "roles-yours.png"} <= names


BROKEN = "world.faults=[{fault:cell_loss,at_s:3600,cell:3},{fault:evaluator_outage,at_s:1000,seconds:9000}]"


@pytest.mark.parametrize(
    "harm",
    [
        (BROKEN,),
        ("world.wall_time_h=4", "world.requeue_h=1"),
        ("world.micro_step_s=300", "world.fill_s=200", "world.step_s=100"),
        ("world.prefill_s=900",),
        ("world.saturation=0.5",),
    ],
)
def test_what_costs_time_costs_time(capsys: pytest.CaptureFixture[str], harm: tuple[str, ...]) -> None:
    def hours(*more: str) -> float:
        call = ("world=P1", "cells=4", "steps_per_burst=4", *TINY, *SHORT, "--json", *more)
        return float(json.loads(simulate(capsys, *call)[1])["design"]["hours_per_step"])

    assert hours(*harm) > 1.005 * hours()


def test_an_unknown_fault_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, said = simulate(capsys, "world=P1", *TINY, "world.faults=[{fault:cel_loss,at_s:1,cell:0}]")
    assert code == ConfigError.exit_code
    assert "'cel_loss'" in said and "cell_loss" in said


def test_same_seeds_same_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    call = ("preset=paper_2p4t", "--json", *TINY, *SHORT)
    once = simulate(capsys, *call)
    assert once == simulate(capsys, *call)
    found = json.loads(once[1])["paper_2p4t"]
    assert set(found) == {"async", "colocate"}
    assert all(set(row) == INTERVAL for row in found.values())


def test_beyond_names_each_world_twice(capsys: pytest.CaptureFixture[str]) -> None:
    code, said, _ = simulate(
        capsys, "preset=beyond", "--json", "worlds=[P1,T2]", "steps=8", "warm_up=4", *TINY
    )
    found = json.loads(said)
    assert code == 0
    assert set(found) == {"beyond", "beyond_x075"}
    for worlds in found.values():
        assert set(worlds) == {"P1", "T2"}
        for row in worlds.values():
            assert set(row) == {"ratio", "low", "high", "gap_bb", "gap_wc", "staleness"}


def test_every_baseline_stands_beside_gyre_in_each_world(capsys: pytest.CaptureFixture[str]) -> None:
    call = ("preset=baselines", "--json", "worlds=[P1]", "staleness=1", "steps=6", "warm_up=6", *TINY)
    code, said, _ = simulate(capsys, *call)
    rows = json.loads(said)["baselines"]["P1"]
    assert code == 0
    assert list(rows) == [
        "gyre",
        "colocate",
        "colocate_pool",
        "colocate_pool_whole",
        "async",
        "async_whole",
    ]
    assert rows["gyre"]["ratio"] == 1.0
    assert rows["async"]["ratio"] <= rows["async_whole"]["ratio"]
    assert all(row["staleness"] == pytest.approx(1.0, abs=0.1) for row in rows.values())


def test_a_design_of_ones_own_on_a_trace_of_ones_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = [{"query": f"q{i % 5}", "seconds": 600 + 97 * i % 800, "tokens": 1000 + i} for i in range(20)]
    trace = tmp_path / "mine.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, said, _ = simulate(
        capsys,
        "--json",
        f"trace={trace}",
        "schedule=gyre",
        "cells=4",
        "launch_order=longest_first",
        *TINY,
        *SHORT,
    )
    design = json.loads(said)["design"]
    assert code == 0
    assert design["cells"] == 4
    assert 0 < design["hours_per_step"] < 1
    assert design["staleness"] == pytest.approx(1.5, abs=0.05)


def test_without_json_a_table_shows_each_row_with_its_gaps(capsys: pytest.CaptureFixture[str]) -> None:
    code, said, _ = simulate(capsys, "world=P1", "schedule=colocate", *TINY, *SHORT)
    assert code == 0
    assert "yours" in said
    assert "±" in said
    assert "> WC" in said


@pytest.mark.parametrize(
    ("argument", "meant"),
    [
        ("cels=3", "did you mean 'cells'?"),
        ("world.slot=3", "did you mean 'world.slots'?"),
        ("world=P9", "choices of world"),
        ("preset=beyon", "did you mean preset=beyond?"),
        ("schedule=gire", "schedule is one of gyre, colocate, async"),
        ("seeds=1", "2 or more"),
        ("trace=nowhere.csv", "no such trace"),
    ],
)
def test_what_cannot_be_used_is_named(capsys: pytest.CaptureFixture[str], argument: str, meant: str) -> None:
    code, said, complaint = simulate(capsys, argument)
    assert code == 2
    assert not said
    assert argument.partition("=")[0] in complaint or argument.partition("=")[2] in complaint
    assert meant in complaint


def test_help_shows_presets_worlds_and_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    code, said, _ = simulate(capsys, "--help")
    assert code == 0
    for word in ("paper_ladder", "RT", "world.limit_h", "launch_order", "gyre simulate"):
        assert word in said


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("query,seconds\na,\n", "row 1: no seconds"),
        ("query,secs\na,3\n", "row 1: unknown column secs"),
        ("query,seconds\na,3\nb,-1\n", "row 2: seconds=-1.0"),
        ("query,seconds\na,x\n", "row 1: could not convert"),
        ("query,seconds\n", "no row"),
        ("query,seconds,tokens\na,3,5\na,3,\n", "some rows have no tokens"),
    ],
)
def test_a_bad_trace_is_named_by_file_and_row(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=complaint) as error:
        read_trace(path)
    assert str(path) in str(error.value)


def test_training_cost_follows_tokens_and_sums_to_that_of_the_durations(tmp_path: Path) -> None:
    path = tmp_path / "tokens.csv"
    path.write_text("query,seconds,tokens\na,10,1\na,30,3\nb,40,12\n")
    (trace,) = trace_workload(path, limit_s=100.0, training_per_s=2.0).runs
    assert trace.training == ((10.0, 30.0), (120.0,))


def test_a_query_is_forecast_by_the_other_runs_scaled_alike(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("run,query,seconds\n0,a,10\n0,b,30\n1,a,100\n1,b,300\n")
    workload = trace_workload(path, limit_s=1000.0, training_per_s=1.0, mean_s=20.0)
    for trace in workload.runs:
        assert trace.queries == (pytest.approx((10.0,)), pytest.approx((30.0,)))
        assert trace.forecasts == pytest.approx((10.0, 30.0))
