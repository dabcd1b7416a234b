"""Pictures of simulated runs: which files come of what, that they show what the outcomes say, same runs same bytes."""

from __future__ import annotations

import struct
from itertools import pairwise
from pathlib import Path

import pytest

from gyre_hpc.report import figures
from gyre_hpc.report import metrics as m
from gyre_hpc.report.spans import ROLE_COLOURS
from gyre_hpc.schedule.settings import PolicyName
from gyre_hpc.simulate import png, views
from gyre_hpc.simulate.outcome import Outcome
from gyre_hpc.simulate.pictures import draw
from gyre_hpc.simulate.scaling import at_nodes, time_against_nodes
from gyre_hpc.simulate.simulator import simulate
from gyre_hpc.simulate.views import busy_lines, idle_by_cause, metric_lines, recorded
from tests.report.browser import Page, assert_drawn
from tests.simulate import tiny

POLICIES = {"E0": PolicyName.GYRE, "C0": PolicyName.COLOCATE, "A0": PolicyName.ASYNC}
TIMES = {"A0": [1.6, 1.7], "E0": [1.0, 1.0]}
NODES = {"E0": {2.0: [40.0, 42.0], 4.0: [25.0, 26.0]}, "A0": {2.0: [60.0], 4.0: [55.0]}}


def run(policy: PolicyName = PolicyName.GYRE, *, record: bool = True, **changes: object) -> Outcome:
    plan = tiny.plan(2, policy, steps=3, **changes)
    return simulate(plan, tiny.world(2), tiny.Given(), record=record)


def outcomes(record: bool = True) -> dict[str, list[Outcome]]:
    return {name: [run(policy, record=record)] for name, policy in POLICIES.items()}


def size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", head[16:])
    return width, height


def test_every_picture_is_drawn_when_all_numbers_are_there(tmp_path: Path) -> None:
    paths = draw(outcomes(), tmp_path / "new", ladder=TIMES, paper={"A0": 1.556}, nodes=NODES)
    names = [path.name for path in paths]
    roles = [f"roles-{name}.png" for name in POLICIES]
    assert names == [*roles, "idle.png", "ladder.png", "nodes.png", "simulation.html"]
    assert {size(path)[0] for path in paths[:-1]} == {2400}
    page = Page(paths[-1].read_text())
    assert page.loads == []
    assert {"ladder", "idle", "nodes", "roles-0", "roles-1", "roles-2"} <= set(page.ids)


def test_what_was_not_measured_is_left_out(tmp_path: Path) -> None:
    paths = draw(outcomes(record=False), tmp_path, title="<b>", about="a & b")
    assert [path.name for path in paths] == ["idle.png", "simulation.html"]
    page = Page(paths[-1].read_text())
    assert "idle" in page.ids and "ladder" not in page.ids and "roles-0" not in page.ids
    assert "|<b>|a & b|" in page.text


def test_the_same_runs_give_the_same_bytes(tmp_path: Path) -> None:
    first, second = (draw(outcomes(), tmp_path / part, ladder=TIMES, nodes=NODES) for part in ("a", "b"))
    for one, other in zip(first[:-1], second[:-1], strict=True):
        assert one.read_bytes() == other.read_bytes(), one.name


def test_names_of_designs_become_names_of_files(tmp_path: Path) -> None:
    paths = draw({"gyre, 8 cells/4": [run()]}, tmp_path)
    assert paths[0].name == "roles-gyre_8_cells_4.png"


def test_numbers_of_all_seeds_stand_in_the_table(tmp_path: Path) -> None:
    told = run()
    page = Page(draw({"mine": [told, told]}, tmp_path)[-1].read_text())
    assert f"|mine|{told.seconds_per_step():.3g} seconds|-|{told.staleness:.2f}|" in page.text
    assert page.text.rstrip("|").count(f"|{told.switches}|0.0|2|") == 1


def test_a_run_that_published_nothing_says_why(tmp_path: Path) -> None:
    ended = Outcome(2.0, seconds=5.0, reason="void bursts", device_time={("down", "down"): 10.0})
    page = Page(draw({"mine": [ended]}, tmp_path)[-1].read_text())
    assert "|mine|void bursts|-|" in page.text


def test_lines_are_in_order_and_end_with_the_run() -> None:
    outcome = run()
    lines = metric_lines(outcome)
    assert [line.t for line in lines] == sorted(line.t for line in lines)
    assert lines[-1].t == outcome.seconds
    steps = [line for line in lines if isinstance(line, m.Step)]
    assert [line.version for line in steps] == [1, 2, 3]
    assert sum(line.seconds for line in steps) == pytest.approx(outcome.steps[-1].at_s)


def test_device_time_as_lines_is_all_nodes_for_the_whole_run() -> None:
    outcome = run()
    assert sum(line.seconds for line in busy_lines(outcome)) == pytest.approx(outcome.nodes * outcome.seconds)


def test_idle_shares_by_cause_add_up_to_those_of_the_outcome() -> None:
    found = idle_by_cause(outcomes())
    for name, (outcome,) in outcomes().items():
        assert sum(found[name].values()) == pytest.approx(sum(outcome.idle_shares().values()))


def test_shares_of_several_seeds_are_weighed_by_their_device_time() -> None:
    short = Outcome(1.0, seconds=10.0, device_time={("rollout", ""): 10.0})
    long = Outcome(1.0, seconds=30.0, device_time={("rollout", "no_work"): 30.0})
    assert idle_by_cause({"mine": [short, long]}) == {"mine": {"no_work": 0.75}}


def test_the_timeline_is_of_the_first_recorded_seed() -> None:
    plain, told = run(record=False), run()
    assert recorded({"a": [plain, told], "b": [plain]}) == {"a": told}


def test_the_report_of_a_live_run_draws_a_simulated_one() -> None:
    figure = figures.role_timeline(metric_lines(run()))
    bars = {trace.name for trace in figure.data if trace.type == "bar"}
    assert bars == {"rollout", "training", "switching"}
    assert len(figure.layout.shapes) == 3


def test_every_role_of_the_png_has_the_colour_of_the_report() -> None:
    figure = png.role_timeline(metric_lines(run()), "E0")
    key = figure.axes[1].get_legend()
    assert key is not None
    found = {
        text.get_text(): patch.get_facecolor()
        for text, patch in zip(key.get_texts(), key.get_patches(), strict=True)
    }
    assert set(found) == {"rollout", "training", "switching"}
    for word, colour in found.items():
        assert tuple(round(255 * part) for part in colour[:3]) == figures.hex_to_rgb(ROLE_COLOURS[word])


def test_words_at_the_ends_of_close_curves_do_not_overlap() -> None:
    curves = {
        name: {2.0: png.Interval(9, 9, 9), 4.0: png.Interval(5 + i / 100, 5, 6)}
        for i, name in enumerate("abc")
    }
    axes = png.time_against_nodes(curves, "").axes[0]
    heights = sorted(text.xy[1] for text in axes.texts if text.get_text() in ("a", "b", "c"))  # type: ignore[attr-defined]
    assert len(heights) == 3
    assert min(b - a for a, b in pairwise(heights)) >= 0.05 * axes.get_ylim()[1]


@pytest.mark.parametrize(
    ("seconds", "whole", "words"),
    [(90, None, "90 seconds"), (6000, None, "100 minutes"), (6000, 90_000, "1.67 hours")],
)
def test_a_duration_has_the_unit_of_the_whole(seconds: float, whole: float | None, words: str) -> None:
    assert views.duration(seconds, whole) == words


def test_more_nodes_have_more_slots_and_the_same_cells() -> None:
    settings, world = tiny.plan(2), tiny.world(2)
    doubled, machine = at_nodes(settings, world, 4.0)
    assert (machine.nodes, machine.capacities, len(machine.cells)) == (4.0, (4, 4), 2)
    assert doubled.capacities == (4, 4) and doubled.batch_groups == settings.batch_groups
    assert at_nodes(settings, world, world.nodes) == (settings, world)


def test_time_falls_with_nodes_but_not_below_the_longest_execution() -> None:
    curve = time_against_nodes(
        {"E0": (tiny.plan(2), tiny.world(2))}, tiny.Given(), (2.0, 4.0, 400.0), range(2)
    )["E0"]
    assert curve[2.0][0] > curve[4.0][0] > curve[400.0][0] > 40.0
    assert all(len(times) == 2 for times in curve.values())


@pytest.mark.browser
def test_chromium_draws_every_plot_without_a_network(tmp_path: Path) -> None:
    page = draw(outcomes(), tmp_path / "pictures", ladder=TIMES, paper={"A0": 1.556}, nodes=NODES)[-1]
    plots = {
        "ladder": ["bars", "scatter"],
        "idle": ["bars"],
        "nodes": ["scatter"],
        "roles-0": ["scatter", "bars"],
    }
    assert_drawn(page, plots, tmp_path)
