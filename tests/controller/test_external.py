"""The job of gateway and runner: waited for, submitted again, or the end of the run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from gyre_hpc.config import RunConfig
from gyre_hpc.controller.peers import external as module
from gyre_hpc.controller.peers.external import ExternalServices
from gyre_hpc.errors import PeerLost
from gyre_hpc.launch.commands import SlurmCommandFailed
from gyre_hpc.launch.elsewhere.service_job import services_job
from gyre_hpc.launch.job.submit import Submission
from gyre_hpc.layout import RunLayout


class Away:
    """Peers of which some are away."""

    def __init__(self) -> None:
        self.away: list[str] = ["gateway", "runner"]

    def missing(self) -> list[str]:
        return self.away


class Bench:
    """One watched job whose state the test sets."""

    def __init__(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.layout, self.state, self.told = RunLayout(run), "RUNNING", list[str]()
        self.asked = self.submitted = self.refusals = 0
        self.commands: list[tuple[str, ...]] = []
        self.layout.services.mkdir()
        self.layout.service_job.write_text("7")
        monkeypatch.setattr(module, "LOOK_S", 0.0)
        monkeypatch.setattr(module, "job_state", self._state)
        monkeypatch.setattr(module, "submit_services", self._submit)
        monkeypatch.setattr(module, "query", self._query)
        self.config, self.peers = RunConfig(), Away()
        self.services = ExternalServices(
            self.config, self.layout, cast(Any, self.peers), lambda who, what: self.told.append(what)
        )

    def _state(self, job: str) -> str | None:
        self.asked += 1
        return self.state or None

    def _submit(self, config: RunConfig, layout: RunLayout) -> Submission:
        self.submitted += 1
        if self.refusals:
            self.refusals -= 1
            raise SlurmCommandFailed("Unable to contact slurm controller")
        layout.service_job.write_text("8")
        return Submission("8", Path(), Path())

    def _query(self, *argv: str) -> str:
        self.commands.append(argv)
        return ""

    async def looks(self, times: int) -> None:
        until = self.asked + times
        async with asyncio.timeout(30):
            while self.asked < until:
                self.services.check()
                await asyncio.sleep(0.001)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


async def test_nobody_asks_while_both_are_there(bench: Bench) -> None:
    bench.peers.away = []
    bench.services.check()
    await asyncio.sleep(0)
    assert bench.asked == 0


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING", ""])
async def test_a_job_that_has_not_ended_is_waited_for(bench: Bench, state: str) -> None:
    bench.state = state
    await bench.looks(3)
    assert bench.submitted == 0 and not bench.told


async def test_a_job_that_has_ended_is_submitted_again_and_said(bench: Bench) -> None:
    bench.state = "CANCELLED"
    await bench.looks(2)
    assert bench.submitted >= 1
    assert "the job of gateway and runner (7) is CANCELLED: submitted again as job 8" in bench.told[0]


@pytest.mark.parametrize(("policy", "restarts"), [("end", 8), ("resubmit", 0)])
async def test_the_run_ends_where_it_may_not_be_submitted_again(
    bench: Bench, policy: str, restarts: int
) -> None:
    bench.state, bench.config.cluster.job.service_lost = "TIMEOUT", policy
    bench.config.cluster.restarts = restarts
    with pytest.raises(PeerLost, match=r"\(7\) is TIMEOUT"):
        await bench.looks(3)
    assert bench.submitted == 0


async def test_a_slurm_that_is_away_when_the_job_has_ended_does_not_end_the_run(bench: Bench) -> None:
    bench.state, bench.refusals = "TIMEOUT", 3
    await bench.looks(5)
    assert bench.submitted >= 4
    assert "not submitted yet: Unable to contact" in bench.told[0] and "again as job 8" in bench.told[1]


async def test_a_job_that_is_refused_for_good_ends_the_run(bench: Bench) -> None:
    bench.state, bench.refusals = "TIMEOUT", 1000
    with pytest.raises(SlurmCommandFailed):
        await bench.looks(1000)
    assert bench.submitted == module.REFUSALS + 1 and len(bench.told) == 1


async def test_services_that_are_on_their_way_when_the_run_ends_do_not_wait_for_it(bench: Bench) -> None:
    bench.state = "CANCELLED"
    bench.services.check()
    bench.services.check()
    ending = asyncio.create_task(bench.services.end())
    await asyncio.sleep(0)
    bench.state = "PENDING"
    await ending
    assert bench.commands == [("scancel", services_job(bench.layout))]


@pytest.mark.parametrize(
    ("away", "state"), [(["runner"], "RUNNING"), ([], "RUNNING"), (["gateway", "runner"], "TIMEOUT")]
)
async def test_services_that_hear_of_the_end_or_have_ended_are_left_alone(
    bench: Bench, away: list[str], state: str
) -> None:
    bench.peers.away, bench.state = away, state
    await bench.services.end()
    assert not bench.commands
