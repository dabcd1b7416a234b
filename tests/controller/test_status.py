"""`gyre status`: what went wrong with a cell is there to read, with its reason, also after it has been restarted."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre_hpc.cli import main
from gyre_hpc.controller.monitor.status import cell_statuses, status_lines
from gyre_hpc.transport import messages as msg
from tests.controller.test_switch_gaps import SteppingCells, SteppingPeers, check
from tests.controller.world import make_controller, nothing, small_run


class FailingCells(SteppingCells):
    """The first release fails, and the first return to rollout of cell 2."""

    def __init__(self) -> None:
        super().__init__()
        self.release_fails = self.load_fails = True
        self.trained: set[int] = set()

    def answer(self, cell: int, message: msg.Message) -> list[msg.Message]:
        if isinstance(message, msg.BecomeTrainer) and cell == 1 and self.release_fails:
            self.release_fails = False
            return [msg.SwitchFailed("blocked", "release refused: 3 calls hold pages")]
        if isinstance(message, msg.BecomeTrainer):
            self.trained.add(cell)
        if isinstance(message, msg.BecomeEngine) and cell in self.trained and cell == 2 and self.load_fails:
            self.load_fails = False
            return [msg.SwitchFailed("quarantined", "engine serves weights ab, version 1 is cd")]
        return super().answer(cell, message)


class FailingPeers(SteppingPeers):
    def __init__(self, *given: object) -> None:
        super().__init__(*given)
        self.cells = FailingCells()


async def test_a_blocked_and_a_quarantined_cell_say_why_and_are_restarted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    controller = make_controller(tmp_path, small_run(6), 1, nothing, FailingPeers)
    assert await controller.run() is None
    check(tmp_path)
    by_cell = {cell.cell: cell for cell in cell_statuses(tmp_path)}
    assert by_cell[0].reason == ""
    assert by_cell[1].reason == "blocked: release refused: 3 calls hold pages"
    assert by_cell[2].reason == "quarantined: engine serves weights ab, version 1 is cd"
    assert all(cell.phase != "lost" and cell.steps for cell in by_cell.values())
    (tmp_path / "config.yaml").touch()
    assert main(["status", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert all(line in told for line in status_lines(list(by_cell.values())))
    assert main(["status", str(tmp_path), "--json"]) == 0
    assert capsys.readouterr().out.count('"phase"') == 3
