"""Loss of a satellite, of the core or of the controller in every phase of a training burst: nothing is lost or counted twice.

The phases are those of docs/losses.md, each with the points of a run (see training_world.py) that lie in it. Cells are the
real `Cell`, their trainers stand-ins that remember what was trained on which weights. Real processes are killed in the
same phases by tests/end_to_end/test_losses.py.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.controller.losses import Loss, Run, Victim, burst_config, check_laws, run_with

SATELLITE = {
    "comes up": ("hear BecomeEngine", "pull weights", "half of weights", "pulled weights", "engine loads"),
    "serves": ("engine serves", "say CellSwitched rollout", "said CellSwitched rollout"),
    "switches to training": ("hear BecomeTrainer", "engine released", "trainer restored"),
    "takes the snapshot": ("snapshot loads", "say CellSwitched training", "said CellSwitched training"),
    "starts a batch": ("hear StartBatch", "hear StartBatch with a snapshot", "say Claim", "said Claim"),
    "holds a claim": ("hear Claimed", "pull micro_steps", "micro-step begins"),
    "has computed": ("micro-step is done", "say MicroStepDone", "said MicroStepDone"),
    "waits for work": ("hear Claimed nothing", "hear WorkReady"),
    "contributes": ("hear FlushContribution", "write gradient", "wrote gradient", "say Contribution"),
    "has contributed": ("said Contribution", "hear ContributionCommitted"),
    "returns to rollout": ("trainer off-loaded",),
}
CORE = {
    "restores": ("hear RestoreTrainer", "checkpoint loads", "checkpoint loaded"),
    "has restored": ("say TrainerRestored", "said TrainerRestored"),
    "switches to training": ("hear BecomeTrainer", "engine released", "trainer restored"),
    "has joined": ("say CellSwitched training", "said CellSwitched training"),
    "starts a batch": ("hear StartBatch", "say Claim", "said Claim"),
    "holds a claim": ("hear Claimed", "pull micro_steps", "micro-step begins"),
    "has computed": ("micro-step is done", "say MicroStepDone", "said MicroStepDone"),
    "waits for contributions": ("hear Claimed nothing", "hear WorkReady"),
    "assembles": ("hear CommitBatch", "pull gradient", "half of gradient", "pulled gradient"),
    "steps": ("optimizer step begins", "within the optimizer step", "optimizer step is taken"),
    "has stepped": ("say BatchCommitted", "said BatchCommitted"),
    "exposes the snapshot": ("hear PublishWeights", "write weights", "wrote weights"),
    "saves": ("hear PublishWeights with a checkpoint", "checkpoint is written", "checkpoint is half written"),
    "has saved": ("checkpoint is on disk", "say WeightsPublished", "said WeightsPublished"),
    "returns to rollout": ("hear BecomeEngine", "pull weights", "half of weights", "pulled weights"),
    "serves": (
        "trainer off-loaded",
        "engine loads",
        "engine serves",
        "say CellSwitched rollout",
        "said CellSwitched rollout",
    ),
}
POINTS = [
    *((False, phase, point) for phase, points in SATELLITE.items() for point in points),
    *((True, phase, point) for phase, points in CORE.items() for point in points),
]
ONLY_ASYNC = {"hear WorkReady"}
"""Under gyre nobody waits in this run: all cells work until there is nothing left."""
ONCE = {*CORE["restores"], *CORE["has restored"], "trainer off-loaded"}


def case(core: bool, point: str, victim: Victim) -> str:
    """Name of a test."""
    return re.sub(r"\W+", "-", f"{'core' if core else 'satellite'}: {point}: {victim} lost")


CASES = [
    pytest.param(core, point, victim, id=case(core, point, victim))
    for core, _, point in POINTS
    for victim in (Victim.SELF, Victim.SATELLITE if core else Victim.CORE, Victim.CONTROLLER)
]


def check(run: Run) -> None:
    check_laws(run)
    assert not run.losses, f"{run.losses} did not happen"


@pytest.mark.parametrize(("core", "point", "victim"), CASES)
async def test_a_loss_in_this_phase_costs_time_alone(
    tmp_path: Path, core: bool, point: str, victim: Victim
) -> None:
    """The second time that a cell is there: the first may be the start of the run, the second is never the last."""
    policy = "async" if point in ONLY_ASYNC else "gyre"
    loss = Loss(victim, point, core, nth=1 if point in ONCE else 2)
    check(await run_with(tmp_path / "run", burst_config(policy), loss))


@pytest.mark.parametrize("victim", [Victim.SELF, Victim.CORE])
async def test_satellites_whose_snapshot_dies_with_the_core_never_train_older_weights(
    tmp_path: Path, victim: Victim
) -> None:
    """Satellites that stay in training pull what is checkpointed: the restored core has the same version."""
    for nth in range(4, 12):
        config = burst_config("async", steps_per_burst=1)
        check(await run_with(tmp_path / f"run-{nth}", config, Loss(victim, "half of weights", False, nth)))


GIVES_WAY = Loss(Victim.SERVERS, "micro-step is done", core=False)
"""All that serve are lost in the middle of a batch, while one of its executions still runs."""
MID_BATCH = ("hear FlushContribution", "write gradient", "said Contribution", "pull weights", "engine serves")


@pytest.mark.parametrize("victim", [None, Victim.SELF, Victim.CORE, Victim.SATELLITE, Victim.CONTROLLER])
@pytest.mark.parametrize("point", MID_BATCH)
async def test_a_satellite_that_leaves_in_mid_batch_takes_nothing_with_it(
    tmp_path: Path, point: str, victim: Victim | None
) -> None:
    then = () if victim is None else (Loss(victim, point, core=False),)
    check(await run_with(tmp_path / "run", burst_config(), GIVES_WAY, *then, slow=True))


@pytest.mark.parametrize("victim", [None, Victim.SELF, Victim.SATELLITE, Victim.CONTROLLER])
@pytest.mark.parametrize("point", ["hear BecomeEngine", "trainer off-loaded", "engine serves"])
async def test_a_core_that_gives_way_keeps_its_open_gradient(
    tmp_path: Path, point: str, victim: Victim | None
) -> None:
    """The satellite is lost as well, so the core must serve; unless it is lost too, what it has computed stays."""
    alone = Loss(Victim.SELF, "write gradient", core=False)
    then = () if victim is None else (Loss(victim, point, core=True),)
    check(await run_with(tmp_path / "run", burst_config(), GIVES_WAY, alone, *then, slow=True))


async def test_every_point_of_a_run_lies_in_a_phase(tmp_path: Path) -> None:
    named = {(core, point) for core, _, point in POINTS}
    passed = set()
    for policy in ("gyre", "async"):
        run = await run_with(tmp_path / policy, burst_config(policy))
        check(run)
        passed |= {(point.core, point.what) for point in run.world.passed}
    assert passed == named


ANYWHERE = st.builds(Loss, st.sampled_from(Victim), nth=st.integers(1, 250))
RUNS = st.tuples(
    st.sampled_from(["gyre", "async", "colocate"]), st.integers(1, 2), st.integers(1, 2), st.booleans()
)


async def _survives(folder: Path, run: tuple[str, int, int, bool], losses: list[Loss]) -> None:
    policy, steps_per_burst, checkpoint_every, apart = run
    config = burst_config(policy, steps_per_burst=steps_per_burst, checkpoint_every=checkpoint_every)
    check_laws(await run_with(folder / "run", config, *losses, apart=apart))


@settings(max_examples=10)
@given(run=RUNS, losses=st.lists(ANYWHERE, min_size=1, max_size=3))
def test_losses_anywhere_cost_time_alone(run: tuple[str, int, int, bool], losses: list[Loss]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_survives(Path(folder), run, losses))


@pytest.mark.full
@settings(max_examples=1000)
@given(run=RUNS, losses=st.lists(ANYWHERE, min_size=1, max_size=4))
def test_losses_anywhere_cost_time_alone_however_often(
    run: tuple[str, int, int, bool], losses: list[Loss]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_survives(Path(folder), run, losses))
