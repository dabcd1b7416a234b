"""Pictures of measured designs."""

from __future__ import annotations

from pathlib import Path

from gyre_hpc.schedule.settings import PolicyName
from gyre_hpc.simulate.designs import Design
from gyre_hpc.simulate.illustrate import illustrate
from gyre_hpc.simulate.measure import Window, measure
from gyre_hpc.simulate.presets import WorldConfig
from tests.report.browser import Page

WORLD = WorldConfig(nodes=8, slots=32, batch_groups=2, executions_per_group=4)


def test_a_study_is_drawn_with_ratios_to_its_base(tmp_path: Path) -> None:
    designs = {
        "E0": Design(PolicyName.GYRE, cells=4, steps_per_burst=2),
        "C0": Design(PolicyName.COLOCATE, steps_per_burst=2, streaming=False),
    }
    rows = {name: measure(design, WORLD, Window(0, 4), range(2)) for name, design in designs.items()}
    paths = illustrate(rows, "E0", WORLD, tmp_path, title="a study", paper={"C0": 1.44}, scaled=["E0"])
    names = [path.name for path in paths]
    assert names == ["roles-E0.png", "roles-C0.png", "idle.png", "ladder.png", "nodes.png", "simulation.html"]
    page = paths[-1].read_text()
    assert f"\\u003cb\\u003e{rows['C0'].ratio_to(rows['E0']).mean:.3f}" in page
    assert (
        "|8 nodes with 32 slots; 2 groups of 4 executions per step; ratios of 2 random worlds;"
        in Page(page).text
    )
