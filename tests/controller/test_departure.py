"""A controller's departure, with Slurm's answers given: what it hears becomes an ending, time a permit, an ending a hand-over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gyre_hpc.config import ModelConfig, RunConfig
from gyre_hpc.controller.ending import departure as module
from gyre_hpc.controller.ending.departure import Departure
from gyre_hpc.controller.ending.ending import Cause, How
from gyre_hpc.controller.executions.walltime import HOLD, RUN
from gyre_hpc.errors import ConfigError, HandedBack, NoProgress
from gyre_hpc.launch.commands import SlurmCommandFailed
from gyre_hpc.launch.job.lifetime import Job, Site
from gyre_hpc.launch.job.margin import read_record
from gyre_hpc.launch.job.submit import Submission
from gyre_hpc.layout import RunLayout


class World:
    """A job of 1000 s with a margin of 100 s, its clock, and what Slurm is asked to do."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.layout = RunLayout(root)
        self.config = RunConfig(model=ModelConfig(path="unused"))
        self.config.cluster.kind = "slurm"
        self.config.cluster.job.margin_s = 100
        self.config.harness.overall_timeout_s = 300
        self.now = 0.0
        self.job: Job | None = Job("RUNNING", start=0.0, end=1000.0)
        self.site = Site(requeue_exit=(75,), kill_wait_s=5.0)
        self.told: list[str] = []
        self.asked: list[tuple[str, ...]] = []
        self.requeue_fails = False
        self.silent = 0
        """So many questions to come are not answered."""
        self.successors = 0
        patch.setenv("SLURM_JOB_ID", "7")
        patch.setattr(module.lifetime, "ask_job", lambda job: self.job)
        patch.setattr(module.lifetime, "ask_site", lambda: self.site)
        patch.setattr(module.lifetime, "ask_preempt_mode", lambda job, site: "REQUEUE")
        patch.setattr(module, "LOOK_AGAIN_S", 0.0)
        patch.setattr(module, "query", self._query)
        patch.setattr(module, "submit_successor", self._submit)

    def _submit(self, layout: RunLayout, job: str) -> Submission:
        self._answer()
        self.successors += 1
        return Submission("8", layout.root, layout.root)

    def _answer(self) -> None:
        if self.silent:
            self.silent -= 1
            raise SlurmCommandFailed("Unable to contact slurm controller")

    def pause(self, seconds: float) -> None:
        self.now += seconds

    def _query(self, *argv: str) -> str:
        self.asked.append(argv)
        self._answer()
        if self.requeue_fails:
            raise SlurmCommandFailed("Requested operation is presently disabled")
        return ""

    async def departure(self) -> Departure:
        departure = Departure(self.config, self.layout, self.told.append, lambda: self.now, self.pause)
        await departure.learn()
        return departure


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


async def judged(departure: Departure, hear: Callable[[], None]) -> Cause | None:
    hear()
    async with asyncio.timeout(30):
        while departure.judging:
            await asyncio.sleep(0)
    return departure.ending.cause if departure.ending else None


async def test_the_drain_begins_by_the_clock_a_margin_before_the_end(world: World) -> None:
    departure = await world.departure()
    world.now = 899.0
    departure.tick()
    assert departure.ending is None and departure.left_s() == 1.0
    world.now = 900.0
    departure.tick()
    assert departure.ending is not None and departure.ending.cause is Cause.WALLTIME
    assert departure.permit() == HOLD and not departure.due()
    world.now = 980.0
    assert departure.due(), "15 s to leave and 5 s for the checkpoint are not given away"


async def test_a_margin_that_became_too_small_is_enlarged_and_said(world: World) -> None:
    departure = await world.departure()
    departure.checkpoint_took(200.0)
    world.now = 700.0
    departure.tick()
    assert departure.ending is not None and "margin_s=100 is below 1.5 x 200.0 s" in world.told[0]
    assert read_record(world.layout).checkpoint_s == 200.0


async def test_launches_go_by_the_time_that_is_left(world: World) -> None:
    departure = await world.departure()
    assert departure.permit() == RUN
    world.now = 650.0
    assert departure.permit().limit_s == 250.0
    departure.durations.add([10.0])
    assert departure.permit() == RUN
    world.config.cluster.job.walltime_policy = "hold"
    world.now = 895.0
    assert departure.permit() == HOLD


async def test_what_outlives_the_job_is_launched_until_it_leaves(world: World) -> None:
    world.config.cluster.runners = "external"
    departure = await world.departure()
    world.now = 899.0
    assert departure.permit() == RUN
    world.now = 900.0
    departure.tick()
    assert departure.permit() == HOLD


async def test_a_job_whose_cells_come_up_late_starts_what_is_longer_than_any_job(world: World) -> None:
    world.config.harness.overall_timeout_s = 10_000
    departure = await world.departure()
    world.now = 700.0
    assert departure.permit().limit_s == 200.0
    world.now = 801.0
    assert departure.permit() == HOLD


async def test_sigterm_in_the_steps_is_told_from_a_preemption_by_slurm(world: World) -> None:
    departure = await world.departure()
    assert await judged(departure, lambda: departure.asked_to_end("cell-0")) is None
    assert "cell-0: SIGTERM, but job 7 is RUNNING and not preempted" in world.told[0]
    assert world.job is not None
    world.job = replace(world.job, preempted=10.0, end=40.0)
    assert await judged(departure, lambda: departure.asked_to_end("cell-0")) is Cause.PREEMPTION
    world.job = replace(world.job, state="COMPLETING")
    assert await judged(departure, lambda: departure.signalled("SIGTERM")) is Cause.KILLED, "a hurry counts"


async def test_a_persons_signal_ends_the_run_and_nothing_is_handed_back(world: World) -> None:
    departure = await world.departure()
    assert await judged(departure, lambda: departure.signalled("SIGTERM")) is Cause.ASKED
    departure.hand_back()
    assert departure.due() and departure.how is How.NOT


async def test_the_exit_code_of_a_job_handed_back_is_never_0(world: World) -> None:
    for site, code, by in ((world.site, 75, "exit code 75"), (Site(), 140, "scontrol requeue")):
        world.site = site
        departure = await world.departure()
        departure.progressed = True
        await judged(departure, lambda departure=departure: departure.signalled("SIGUSR2"))
        with pytest.raises(HandedBack, match=by) as back:
            departure.hand_back()
        assert back.value.exit_code == code
    assert world.asked == [("scontrol", "requeue", "7")]


async def test_a_requeue_that_slurm_refuses_leaves_a_successor(world: World) -> None:
    world.site, world.requeue_fails = Site(), True
    departure = await world.departure()
    departure.progressed = True
    await judged(departure, lambda: departure.signalled("SIGUSR2"))
    with pytest.raises(HandedBack, match="job 8"):
        departure.hand_back()


@pytest.mark.parametrize("site", [Site(), Site(requeue_exit=(75,))])
async def test_a_preemption_during_the_drain_leaves_at_its_own_end(world: World, site: Site) -> None:
    world.site = site
    departure = await world.departure()
    world.now = 900.0
    departure.tick()
    assert departure.ending is not None and departure.ending.end == 1000.0
    assert world.job is not None
    world.job = replace(world.job, preempted=900.0, end=930.0)
    assert await judged(departure, lambda: departure.asked_to_end("cell-0")) is Cause.PREEMPTION
    world.now = 911.0
    assert departure.due() and departure.time_to_save()() == 18.0


async def test_the_jobs_own_signal_may_tell_of_a_preemption(world: World) -> None:
    """PreemptParameters=send_user_signal: nobody gets SIGTERM."""
    departure = await world.departure()
    assert world.job is not None
    world.job = replace(world.job, preempted=10.0, end=40.0)
    assert await judged(departure, lambda: departure.signalled("SIGUSR2")) is Cause.PREEMPTION
    assert departure.ending is not None and departure.ending.end == 40.0


@pytest.mark.parametrize("draining", [True, False])
async def test_a_job_killed_for_its_time_limit_leaves_a_successor(world: World, draining: bool) -> None:
    departure = await world.departure()
    departure.progressed = True
    if draining:
        await judged(departure, lambda: departure.signalled("SIGUSR2"))
    assert world.job is not None
    world.job, world.now = replace(world.job, state="COMPLETING", reason="TimeLimit"), 1001.0
    assert await judged(departure, lambda: departure.signalled("SIGTERM")) is Cause.TIMED_OUT
    assert departure.due()
    with pytest.raises(HandedBack, match="job 8"):
        departure.hand_back()
    assert world.asked == []


@pytest.mark.parametrize("hear", [lambda it: it.signalled("SIGTERM"), lambda it: it.asked_to_end("cell-0")])
async def test_the_time_left_counts_from_the_signal_not_from_slurms_answer(
    world: World, monkeypatch: pytest.MonkeyPatch, hear: Callable[[Departure], None]
) -> None:
    """The checkpoint waits for the core meanwhile: its wait is cut to what is left of KillWait."""
    departure = await world.departure()
    departure.nothing_fits()
    left_s = departure.time_to_save()
    assert left_s() == 30.0

    def slow_answer(job: str) -> Job:
        world.now += 3.0
        return Job("CANCELLED", start=0.0, end=1000.0)

    monkeypatch.setattr(module.lifetime, "ask_job", slow_answer)
    assert await judged(departure, lambda: hear(departure)) is Cause.KILLED
    assert left_s() == 1.0, "5 s of KillWait, 3 s for the answer, 1 s to spare"
    assert await judged(departure, lambda: hear(departure)) is Cause.KILLED
    assert left_s() < 0


async def test_a_kill_about_which_slurm_says_nothing_shortens_the_wait_as_well(world: World) -> None:
    departure = await world.departure()
    departure.nothing_fits()
    left_s, world.job = departure.time_to_save(), None
    await judged(departure, lambda: departure.signalled("SIGTERM"))
    assert left_s() == 4.0


async def test_without_a_margin_the_time_limit_just_ends_the_job(world: World) -> None:
    world.config.cluster.job.margin_s = 0
    departure = await world.departure()
    world.job = Job("COMPLETING", end=1000.0, reason="TimeLimit")
    assert await judged(departure, lambda: departure.signalled("SIGTERM")) is Cause.TIMED_OUT
    departure.hand_back()
    assert departure.due() and world.successors == 0


async def test_slurm_that_does_not_answer_for_a_while_takes_the_job_back_later(world: World) -> None:
    world.site = Site()
    departure = await world.departure()
    departure.progressed = True
    await judged(departure, lambda: departure.signalled("SIGUSR2"))
    world.silent, world.job = 3, None
    with pytest.raises(HandedBack, match="by scontrol requeue"):
        departure.hand_back()
    assert world.successors == 0 and world.now > 0


async def test_a_requeue_whose_answer_is_late_is_not_doubled_by_a_successor(world: World) -> None:
    world.site, world.requeue_fails = Site(), True
    departure = await world.departure()
    departure.progressed = True
    await judged(departure, lambda: departure.signalled("SIGUSR2"))
    world.job = Job("PENDING")
    with pytest.raises(HandedBack, match="by scontrol requeue"):
        departure.hand_back()
    assert world.successors == 0


async def test_a_successor_that_is_refused_before_the_end_is_submitted_at_the_end(world: World) -> None:
    assert world.job is not None
    world.job = replace(world.job, requeue=False)
    departure = await world.departure()
    departure.progressed = True
    await judged(departure, lambda: departure.signalled("SIGUSR2"))
    world.silent = 1
    await departure.leave_successor()
    with pytest.raises(HandedBack, match="job 8"):
        departure.hand_back()
    assert world.successors == 1


async def test_jobs_in_a_row_without_progress_end_with_an_error(world: World) -> None:
    async def one_job(*, progress: bool, preempted: bool = False) -> Departure:
        departure = await world.departure()
        departure.progressed = progress
        if preempted:
            assert world.job is not None
            world.job = replace(world.job, preempted=1.0)
            await judged(departure, lambda: departure.asked_to_end("runner"))
            world.job = replace(world.job, preempted=None)
        else:
            await judged(departure, lambda: departure.signalled("SIGUSR2"))
        return departure

    for progress, preempted in ((False, False), (True, False), (False, False), (False, True)):
        departure = await one_job(progress=progress, preempted=preempted)
        with pytest.raises(HandedBack):
            departure.hand_back()
    departure = await one_job(progress=False)
    with pytest.raises(NoProgress, match="2 jobs in a row took no step"):
        departure.hand_back()


async def test_a_site_without_requeue_exit_cannot_be_told_to_use_it(world: World) -> None:
    world.site, world.config.cluster.job.requeue_by = Site(), "exit"
    with pytest.raises(ConfigError, match="no RequeueExit"):
        await world.departure()


async def test_a_site_that_does_not_answer_is_not_one_without_requeue_exit(world: World) -> None:
    world.site, world.config.cluster.job.requeue_by = Site(told=False), "exit"
    departure = await world.departure()
    world.site, world.now = Site(requeue_exit=(75,)), 60.0
    await judged(departure, departure.tick)
    departure.progressed = True
    await judged(departure, lambda: departure.signalled("SIGUSR2"))
    with pytest.raises(HandedBack, match="exit code 75"):
        departure.hand_back()


async def test_on_one_machine_a_signal_is_a_persons_and_time_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # a run of cluster.kind=local started inside some job
    config = RunConfig(model=ModelConfig(path="unused"))
    departure = Departure(config, RunLayout(tmp_path), lambda text: None)
    await departure.learn()
    departure.tick()
    assert departure.permit() == RUN and departure.ending is None
    departure.signalled("SIGINT")
    departure.hand_back()
    assert str(departure.ending) == "SIGINT" and departure.due()
