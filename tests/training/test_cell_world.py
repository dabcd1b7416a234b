"""Each cell is its own torch world; two cells on one host never meet."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gyre_hpc.errors import ConfigError, IllegalTransition
from gyre_hpc.training import host_backend
from gyre_hpc.training.distributed import CellWorld, join_cell

RANK = """
import sys
from pathlib import Path
import torch, torch.distributed as dist
from gyre_hpc.training.distributed import CellWorld, join_cell
rank, cell = int(sys.argv[1]), sys.argv[2]
join_cell(CellWorld(rank, 2), Path(cell))
total = torch.tensor([rank + 1.0 + 10 * Path(cell).name.count("b")])
dist.all_reduce(total)
sys.stdout.write(str(total.item()))
dist.destroy_process_group()
"""


def test_joining_twice_is_one_join_and_another_shape_is_refused() -> None:
    assert join_cell() == join_cell(CellWorld())
    with pytest.raises(IllegalTransition, match="size=2"):
        join_cell(CellWorld(size=2))


@pytest.mark.full
def test_two_cells_of_two_ranks_sum_only_inside_themselves(tmp_path: Path) -> None:
    environment = {
        key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "MASTER_PORT")
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / cell)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment | {"OMP_NUM_THREADS": "1"},
        )
        for cell in ("a", "b")
        for rank in (0, 1)
    ]
    sums = [float(process.communicate(timeout=240)[0].splitlines()[-1]) for process in ranks]
    assert sums == [3.0, 3.0, 23.0, 23.0]


def test_a_cell_of_several_ranks_needs_a_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gyre_hpc.training.distributed._joined", None)
    with pytest.raises(ConfigError, match="rendezvous"):
        join_cell(CellWorld(size=2))
    with pytest.raises(ConfigError, match=r"trainer\.tensor_parallel=2"):
        join_cell(CellWorld(size=3, tensor_parallel=2))


def test_literals_last_only_as_long_as_their_context() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("with CUDA the host backend is never in use")
    with host_backend.literals():
        assert torch.zeros(1, device="cuda").device.type == "cpu"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")
