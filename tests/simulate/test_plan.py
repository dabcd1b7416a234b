"""`gyre plan burst` chooses on simulations of the recorded run, and never beyond the staleness that it may spend."""

from __future__ import annotations

import json

import pytest

from gyre_hpc import cli
from gyre_hpc.errors import ConfigError
from gyre_hpc.simulate.from_run import machine, settings_of
from gyre_hpc.simulate.plan import HAIR, Candidate, Planner, cell_counts
from gyre_hpc.simulate.recorded import Recording, read_recording
from tests.simulate.written_run import config, write_run


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return read_recording(write_run(tmp_path_factory.mktemp("plan") / "run", config()).folder)


@pytest.fixture(scope="module")
def planner(recording: Recording) -> Planner:
    return Planner(recording, settings_of(recording.config), machine(recording, recording.config))


def test_candidates_spend_at_most_the_bound(planner: Planner) -> None:
    found = planner.candidates(1.0, [2])
    assert found[0] == Candidate(1, 0, 2) and len(found) == len(set(found))
    assert {each.steps_per_burst for each in found} == {1, 2, 3}
    assert all(each.groups_ahead / 2 + (each.steps_per_burst - 1) / 2 <= 1.0 for each in found)
    assert Candidate(1, 2, 2) in found and Candidate(3, 0, 2) in found


def test_every_split_is_the_same_machine(planner: Planner) -> None:
    for cells in (1, 2, 3):
        split = planner.world(cells)
        assert len(split.cells) == cells
        assert split.nodes == pytest.approx(2.0) and sum(split.capacities) == 6


def test_cells_have_whole_nodes(recording: Recording) -> None:
    assert cell_counts(recording) == [1, 2]


def test_the_fastest_candidate_within_the_bound_comes_first(planner: Planner) -> None:
    rows = planner.plan(0.5, [1, 2], seeds=2)
    times = [row.seconds_per_step.mean for row in rows]
    assert times == sorted(times)
    assert all(row.staleness <= 0.5 + HAIR and row.gap_wc > 0 for row in rows)
    assert all((row.gap_bb is None) == (row.extra_dispatch > 0) for row in rows)
    assert all(row.gap_bb is None or row.gap_bb >= -1e-9 for row in rows)
    every = [planner.measure(each, 2) for each in planner.candidates(0.5, [1, 2])]
    assert times[0] == min(row.seconds_per_step.mean for row in every)


def test_more_staleness_is_never_slower(planner: Planner) -> None:
    strict, loose = (planner.plan(bound, [2], seeds=2)[0].seconds_per_step.mean for bound in (0.0, 1.0))
    assert loose < strict


def test_the_verb_prints_a_table_and_what_to_use(
    recording: Recording, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "burst", "--from", str(recording.run), "staleness=0.5", "cells=1,2", "seeds=2"]
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    assert "use: schedule.steps_per_burst=" in shown and "RUN" in shown
    assert cli.main([*words, "--json", "schedule.policy=colocate"]) == 0
    rows = json.loads(capsys.readouterr().out)["burst"]
    assert rows[0]["seconds_per_step"]["low"] <= rows[0]["seconds_per_step"]["mean"]
    assert {"steps_per_burst", "extra_dispatch", "cells", "staleness", "gap_wc", "gap_bb"} <= rows[0].keys()


@pytest.mark.parametrize("word", ["staleness=x", "staleness=-1", "cells=0", "seeds=", "foo=1"])
def test_words_that_mean_nothing_are_named(
    recording: Recording, capsys: pytest.CaptureFixture[str], word: str
) -> None:
    assert cli.main(["plan", "burst", "--from", str(recording.run), word]) == ConfigError.exit_code
    assert word.split("=")[0] in capsys.readouterr().err


def test_what_a_run_lacks_is_named(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path_factory.mktemp("lacks") / "run", config()).folder
    (run / "manifest.jsonl").unlink()
    assert cli.main(["plan", "burst", "--from", str(run)]) != 0
    assert "no execution in shards/" in capsys.readouterr().err
