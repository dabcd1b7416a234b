"""MPI channels and regions between real endpoint processes, without Slurm: whatever dies, nothing is lost or seen half."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gyre_hpc.launch.plan import Launcher, ProcessSpec
from gyre_hpc.layout import RunLayout
from gyre_hpc.transport.links import write_secret
from gyre_hpc.transport.messages import RegionKind
from gyre_hpc.transport.regions import PullFailed
from tests.launch.cluster import PATIENCE_S
from tests.transport.mpi_run import PmiLauncher, PmiProcess, check_exchange, mpi_run, until

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    pytest.importorskip("mpi4py", reason="needs the extra mpi; enable: pip install 'gyre_hpc[mpi]'")
    yield PmiLauncher()  # type: ignore[misc]


async def test_two_cells_join_and_messages_and_regions_go_over_mpi(launcher: Launcher) -> None:
    async with mpi_run(launcher) as run:
        await check_exchange(run)


async def test_an_endpoint_leaves_no_shared_memory_behind_however_it_ends(launcher: Launcher) -> None:
    async with mpi_run(launcher) as run:
        await run.joined(0, 1)
        maps = Path(f"/proc/{run.endpoint_pid('controller')}/maps").read_text().splitlines()
        segments = [line for line in maps if "mpich_shm" in line]
        assert all(line.endswith("(deleted)") for line in segments)


async def test_a_killed_endpoint_costs_its_cell_the_channel_for_a_moment(launcher: Launcher) -> None:
    async with mpi_run(launcher) as run:
        await run.joined(0, 1)
        run.talk(0, 0, 40)
        run.talk(1, 0, 40)
        for kill in range(2):
            os.kill(run.endpoint_pid("cell-0"), signal.SIGKILL)
            run.talk(0, 40 + 20 * kill, 60 + 20 * kill)
            await until("the downgrade", lambda: not run.up(0))
            assert run.up(1)
            await run.joined(0)
        await run.heard(0, 80)
        await run.heard(1, 40)
        run.talk(0, 80, 90)
        await run.heard(0, 90)


async def test_a_cell_that_is_killed_and_comes_back_joins_again(launcher: Launcher) -> None:
    async with mpi_run(launcher) as run:
        await run.joined(0, 1)
        await run.remove_cell(0)
        assert run.up(1)
        await run.add_cell(0)
        await run.joined(0, 1)
        for index in (0, 1):
            run.talk(index, 0, 20)
            await run.heard(index, 20)


@pytest.mark.full
async def test_a_frozen_bridge_is_given_up_and_replaced(launcher: Launcher) -> None:
    """It neither dies nor answers: silence decides, and its host kills it."""
    async with mpi_run(launcher) as run:
        await run.joined(0, 1)
        frozen = run.endpoint_pid("controller")
        os.kill(frozen, signal.SIGSTOP)
        run.talk(0, 0, 30)
        await run.heard(0, 30)
        await run.joined(0, 1)
        assert run.endpoint_pid("controller") != frozen


async def test_a_torn_region_is_refused_and_a_dead_owner_leaves_it_to_tcp(launcher: Launcher) -> None:
    async with mpi_run(launcher) as run:
        await run.joined(0, 1)
        owner, puller = run.cells[0].regions, run.cells[1].regions
        torn = owner.publish(RegionKind.WEIGHTS, "torn", 1, "", {"w": np.arange(1_000_000)})
        with open(torn.path, "r+b") as file:
            file.seek(4_000_000)
            file.write(b"\xff" * 8)
        with pytest.raises(PullFailed, match="checksum"):
            await puller.pull(torn, deadline_s=PATIENCE_S)
        assert puller.ways["mpi failed"] == 1
        puller._avoid.clear()
        large = owner.publish(RegionKind.WEIGHTS, "large", 1, "", {"w": np.arange(1 << 24)})
        os.kill(run.endpoint_pid("cell-0"), signal.SIGSTOP)
        mine = run.endpoint_pid("cell-1")
        arrays = await puller.pull(large, deadline_s=PATIENCE_S)
        assert run.up(1) and run.endpoint_pid("cell-1") == mine
        np.testing.assert_array_equal(arrays["w"], np.arange(1 << 24))
        assert puller.ways == {"mpi failed": 2, "sockets failed": 1, "sockets": 1}


async def test_a_pull_that_is_given_up_costs_no_endpoint_and_no_channel(launcher: Launcher) -> None:
    """Wherever it was: before the owner's answer, with bytes under way, or with the owner silent until its deadline."""
    async with mpi_run(launcher) as run:
        await run.joined(0, 1)
        owner, puller = run.cells[0].regions, run.cells[1].regions
        pids = [run.endpoint_pid(name) for name in ("cell-0", "cell-1")]
        large = owner.publish(RegionKind.WEIGHTS, "large", 1, "", {"w": np.arange(1 << 24)})
        await puller.pull(large, deadline_s=PATIENCE_S)
        for delay_s in (0.0, 0.003, 0.01, 0.03, 0.06):
            pulling = asyncio.ensure_future(puller.pull(large, deadline_s=PATIENCE_S))
            await asyncio.sleep(delay_s)
            pulling.cancel()
            await asyncio.wait([pulling])
        os.kill(pids[0], signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await puller.pull(large, deadline_s=PATIENCE_S)
        os.kill(pids[0], signal.SIGCONT)
        puller.ways.clear()
        arrays = await puller.pull(large, deadline_s=PATIENCE_S)
        np.testing.assert_array_equal(arrays["w"], np.arange(1 << 24))
        assert puller.ways == {"mpi": 1}
        assert pids == [run.endpoint_pid(name) for name in ("cell-0", "cell-1")]
        assert run.up(0) and run.up(1)


class Changed(PmiLauncher):
    """Starts the endpoint of cell-0 in another way."""

    def __init__(self, change: Callable[[ProcessSpec], ProcessSpec]) -> None:
        self.change = change

    async def start(self, spec: ProcessSpec) -> PmiProcess:
        return await super().start(self.change(spec) if spec.name == "mpi-cell-0" else spec)


async def test_an_endpoint_without_the_secret_of_the_run_is_sent_away(
    launcher: Launcher, tmp_path: Path
) -> None:
    write_secret(RunLayout(tmp_path))

    def of_another_run(spec: ProcessSpec) -> ProcessSpec:
        argv = list(spec.argv)
        argv[argv.index("--run") + 1] = str(tmp_path)
        return replace(spec, argv=argv)

    async with mpi_run(Changed(of_another_run)) as run:  # type: ignore[arg-type]
        await run.joined(1)
        log = run.layout.logs(1) / "mpi-controller.log"
        await until("the refusal", lambda: "did not prove to be cell-0" in log.read_text())
        run.talk(1, 0, 20)
        await run.heard(1, 20)
        run.talk(0, 0, 20)
        await run.heard(0, 20)
        assert not run.up(0)


async def test_an_endpoint_that_was_given_no_pmi_is_named_once_and_its_cell_stays_on_the_socket(
    launcher: Launcher,
) -> None:
    async with mpi_run(Changed(lambda spec: replace(spec, mpi="none"))) as run:  # type: ignore[arg-type]
        await run.joined(1)
        await until("the diagnosis", lambda: run.faults)
        run.talk(0, 0, 20)
        await run.heard(0, 20)
        (fault,) = run.faults
        assert fault.startswith("cell-0: MPI is off, it stays on sockets: MPICH") and "no PMI" in fault
