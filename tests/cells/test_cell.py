"""What a cell does with each message, with an engine and a trainer that only remember."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio

from gyre_hpc.cells import cell as cell_module
from gyre_hpc.cells.cell import Cell, EngineDied
from gyre_hpc.cells.engine_host import Phases
from gyre_hpc.cells.memory_ledger import Available, MemoryLedger
from gyre_hpc.cells.roles import CellRole
from gyre_hpc.config import ModelConfig, RunConfig
from gyre_hpc.engines.client import EngineUnreachable
from gyre_hpc.errors import IllegalTransition, ProtocolViolation
from gyre_hpc.layout import RunLayout
from gyre_hpc.records import CellId, GroupId, Version
from gyre_hpc.schedule.protocol import Role
from gyre_hpc.trajectories.micro_steps import MicroStep
from gyre_hpc.transport.messages import (
    BatchCommitted,
    BecomeEngine,
    BecomeTrainer,
    CellSwitched,
    Claim,
    Claimed,
    CommitBatch,
    CommitFailed,
    Contribution,
    ContributionCommitted,
    EngineDown,
    FlushContribution,
    Manifest,
    Message,
    MicroStepDone,
    MicroStepRef,
    MicroStepUnavailable,
    PublishWeights,
    RegionKind,
    RestoreTrainer,
    Serial,
    StartBatch,
    StartPostponed,
    StepDone,
    StepName,
    SwitchFailed,
    SwitchPostponed,
    TrainerRestored,
    WeightsPublished,
    WorkReady,
)
from gyre_hpc.transport.regions import PullFailed, RegionServer, pull

Arrays = Mapping[str, npt.NDArray[Any]]
V0, V1 = Version(0), Version(1)
S0, S1 = Serial(0), Serial(1)


class Engine:
    """Serves what it is given; `broken` makes every operation fail."""

    def __init__(self) -> None:
        self.address, self.alive, self.broken, self.released = "http://engine", True, False, False
        self.served: Version | None = None
        self.held_bytes = self.released_bytes = 0
        self.shares_device = False

    async def release(self) -> None:
        self._check()
        self.released = True

    async def serve(self, version: Version, arrays: Arrays, phases: Phases) -> None:
        self._check()
        self.served, self.alive, self.released = version, True, False

    async def serve_again(self, phases: Phases) -> Version:
        self._check()
        assert self.served is not None
        self.alive = True
        return self.served

    def _check(self) -> None:
        if self.broken:
            raise EngineUnreachable("engine is broken")


class Trainer:
    """Its gradient is the sum of the tokens of its micro-steps."""

    def __init__(self) -> None:
        self.version, self.layout_digest = V0, "layout"
        self.weight, self.gradient, self.open, self.resident = 1.0, 0.0, False, False
        self.restored = Path()
        self.gradient_bytes = 8

    def leaving_bytes(self, *, keeps_gradient: bool) -> int:
        return self.gradient_bytes if keeps_gradient and self.open else 0

    async def leave(self) -> None:
        self.resident = False

    async def enter(self) -> None:
        self.resident = True

    async def load_weights(self, arrays: Arrays, version: Version) -> None:
        assert not self.open
        self.weight, self.version = float(arrays["w"][0]), version

    async def restore_from(self, folder: Path, version: Version, *, resident: bool) -> Arrays:
        await self.clear()
        assert resident == self.resident
        self.version, self.restored = version, folder
        return {"w": np.array([self.weight])}

    async def micro_step(self, step: MicroStep) -> tuple[dict[str, float], float]:
        assert self.resident
        self.gradient, self.open = self.gradient + step.tokens, True
        return {"tokens": float(step.tokens)}, 0.1

    async def take_gradient(self, consume: Callable[[Arrays], Manifest]) -> Manifest:
        manifest = consume({"grad": np.array([self.gradient])})
        await self.clear()
        return manifest

    async def clear(self) -> None:
        self.gradient, self.open = 0.0, False

    async def commit(
        self, contributions: Sequence[Arrays], executions: int, version: Version
    ) -> dict[str, float]:
        total = self.gradient + sum(float(arrays["grad"][0]) for arrays in contributions)
        self.weight, self.version = self.weight + total / executions, version
        await self.clear()
        return {"grad_norm": total}

    async def publish(self, checkpoint: Path | None, version: Version, *, resident: bool) -> Arrays:
        assert resident == self.resident
        return {"w": np.array([self.weight])}


class Bench:
    """A cell between fakes; `said` is what it has sent since the last look."""

    def __init__(self, layout: RunLayout, regions: RegionServer) -> None:
        self.regions, self.engine, self.trainer = regions, Engine(), Trainer()
        self.sent: list[Message] = []
        self.steps: list[StepDone] = []
        self.memory = 1 << 40
        config = RunConfig(model=ModelConfig(path="unused"))
        self.cell = Cell(
            config,
            layout,
            self.sent.append,
            self.engine,  # type: ignore[arg-type]
            self.trainer,  # type: ignore[arg-type]
            regions,
            CellId(1),
            MemoryLedger(lambda: Available(self.memory, "cgroup /job/memory.max")),
        )

    async def tell(self, *messages: Message | EngineDied) -> list[Message]:
        """Send messages; returns what the cell answered."""
        self.sent.clear()
        for message in messages:
            await self.cell.handle(message)
        self.steps += [message for message in self.sent if isinstance(message, StepDone)]
        return [message for message in self.sent if not isinstance(message, StepDone)]

    def weights(self, version: Version = V0, value: float = 1.0) -> Manifest:
        return self.regions.publish(RegionKind.WEIGHTS, "policy", version, "layout", {"w": np.array([value])})

    def dead(self, version: Version) -> Manifest:
        """Weights whose owner has died on another host."""
        manifest = self.weights(version)
        self.regions.drop(manifest)
        return msgspec.structs.replace(manifest, address="127.0.0.1:1")

    def micro_step(self, index: int, tokens: int) -> MicroStepRef:
        ids, one = np.arange(tokens, dtype=np.int32), np.zeros(1, np.int32)
        step = MicroStep(
            id=f"0.{index}",
            group=0,
            ids=ids,
            tin=np.zeros(tokens, np.int32),
            tout=np.full(tokens, 1, np.int32),
            pos=ids,
            row=one,
            target=one + 1,
            path=one,
            weight=np.ones(1, np.float32),
            advantage=np.ones(1, np.float32),
            behaviour_logprob=np.full(1, -1.0, np.float32),
            version=one,
            path_execution=one,
        )
        manifest = self.regions.publish(RegionKind.MICRO_STEPS, step.id, 0, "", step.to_arrays())
        return MicroStepRef(step.id, GroupId(0), V0, tokens, 1, manifest)

    async def train(self, *, core: bool, version: Version = V0) -> None:
        """Through rollout into training, in batch 0 of weights `version`."""
        await self.tell(BecomeEngine(V0, self.weights(), S0))
        await self.tell(
            BecomeTrainer(0, core, None if core else self.weights(), V0, S1), StartBatch(0, version, None)
        )


@pytest_asyncio.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    regions = RegionServer("127.0.0.1", "cell-0", uuid.uuid4().hex)
    await regions.start()
    yield Bench(RunLayout(tmp_path), regions)
    regions.close()


async def test_an_engine_serves_before_the_cell_says_so(bench: Bench) -> None:
    (switched,) = await bench.tell(BecomeEngine(V0, bench.weights(), S0))
    assert isinstance(switched, CellSwitched)
    assert (switched.role, switched.version, switched.address) == (Role.ROLLOUT, V0, "http://engine")
    assert switched.serial == S0
    assert bench.engine.served == V0


async def test_a_satellite_pulls_the_cores_weights_before_it_trains(bench: Bench) -> None:
    await bench.tell(BecomeEngine(V0, bench.weights(), S0))
    (switched,) = await bench.tell(BecomeTrainer(0, False, bench.weights(V1, 5.0), V1, S1))
    assert isinstance(switched, CellSwitched)
    assert (switched.role, switched.version, switched.serial) == (Role.TRAINING, V1, S1)
    assert bench.engine.released and bench.trainer.resident and bench.trainer.weight == 5.0


async def test_a_satellite_without_a_snapshot_reports_the_weights_it_has(bench: Bench) -> None:
    await bench.tell(BecomeEngine(V0, bench.weights(), S0))
    (switched,) = await bench.tell(BecomeTrainer(0, False, None, V1, S1))
    assert isinstance(switched, CellSwitched) and switched.version == V0
    assert await bench.tell(StartBatch(0, V1, bench.weights(V1, 5.0))) == [Claim(0)]
    assert bench.trainer.version == V1


async def test_one_claim_is_out_at_a_time_and_an_empty_answer_waits_for_work(bench: Bench) -> None:
    await bench.train(core=False)
    assert await bench.tell(WorkReady(0)) == []
    assert await bench.tell(Claimed(0, None)) == []
    assert await bench.tell(WorkReady(7)) == []
    assert await bench.tell(WorkReady(0)) == [Claim(0)]
    done, claim = await bench.tell(Claimed(0, bench.micro_step(0, 4)))
    assert isinstance(done, MicroStepDone)
    assert (done.batch, done.micro_step, done.metrics) == (0, "0.0", {"tokens": 4.0})
    assert claim == Claim(0)


async def test_a_satellites_gradient_leaves_at_the_flush_and_stays_until_it_is_committed(
    bench: Bench,
) -> None:
    await bench.train(core=False)
    await bench.tell(Claimed(0, bench.micro_step(0, 4)), Claimed(0, bench.micro_step(1, 3)))
    (contribution,) = await bench.tell(FlushContribution(0))
    assert isinstance(contribution, Contribution) and contribution.manifest is not None
    assert contribution.micro_steps == ("0.0", "0.1")
    assert not bench.trainer.open
    await bench.tell(BecomeEngine(V0, bench.weights(), S0))
    assert (await pull(contribution.manifest, deadline_s=30.0))["grad"] == [7.0]
    await bench.tell(ContributionCommitted(0))
    with pytest.raises(PullFailed):
        await pull(contribution.manifest, deadline_s=30.0)


async def test_a_satellite_that_did_nothing_contributes_nothing(bench: Bench) -> None:
    await bench.train(core=False)
    assert await bench.tell(Claimed(0, None), FlushContribution(0)) == [Contribution(0, (), None)]


async def test_the_core_keeps_its_gradient_and_adds_the_others_in_order(bench: Bench) -> None:
    await bench.train(core=True)
    await bench.tell(Claimed(0, bench.micro_step(0, 4)))
    assert await bench.tell(FlushContribution(0)) == [Contribution(0, ("0.0",), None)]
    other = bench.regions.publish(RegionKind.GRADIENT, "batch-0", 0, "layout", {"grad": np.array([6.0])})
    commit = CommitBatch(0, V1, 2, ((CellId(1), other),))
    assert await bench.tell(commit) == [BatchCommitted(0, V1, {"grad_norm": 10.0})]
    assert bench.trainer.weight == 6.0


async def test_a_contribution_that_cannot_be_pulled_changes_nothing(bench: Bench) -> None:
    await bench.train(core=True)
    await bench.tell(Claimed(0, bench.micro_step(0, 4)))
    good, lost = (
        bench.regions.publish(RegionKind.GRADIENT, f"batch-{cell}", 0, "layout", {"grad": np.array([6.0])})
        for cell in (1, 2)
    )
    bench.regions.drop(lost)
    lost = msgspec.structs.replace(lost, address="127.0.0.1:1")
    (failed,) = await bench.tell(CommitBatch(0, V1, 2, ((CellId(1), good), (CellId(2), lost))))
    assert isinstance(failed, CommitFailed) and failed.cell == 2
    assert bench.trainer.gradient == 4.0 and bench.trainer.version == V0
    assert await bench.tell(Claimed(0, None), WorkReady(0)) == [Claim(0)]


async def test_a_core_that_leaves_in_the_middle_of_a_batch_goes_on_where_it_was(bench: Bench) -> None:
    await bench.train(core=True)
    await bench.tell(Claimed(0, bench.micro_step(0, 4)))
    await bench.tell(BecomeEngine(V0, bench.weights(), S0))
    assert await bench.tell(Claimed(0, bench.micro_step(1, 3))) == []
    switched, done, claim = await bench.tell(BecomeTrainer(0, True, None, V0, S1))
    assert isinstance(switched, CellSwitched) and isinstance(done, MicroStepDone)
    assert (done.micro_step, claim) == ("0.1", Claim(0))
    assert bench.trainer.gradient == 7.0


async def test_a_void_batch_leaves_no_gradient(bench: Bench) -> None:
    await bench.train(core=False)
    await bench.tell(Claimed(0, bench.micro_step(0, 4)))
    await bench.tell(ContributionCommitted(0))
    assert not bench.trainer.open
    assert await bench.tell(Claimed(0, bench.micro_step(1, 4)), FlushContribution(0)) == [
        Contribution(0, (), None)
    ]


async def test_a_release_that_fails_blocks_and_a_load_that_fails_quarantines(bench: Bench) -> None:
    await bench.tell(BecomeEngine(V0, bench.weights(), S0))
    bench.engine.broken = True
    (failed,) = await bench.tell(BecomeTrainer(0, True, None, V0, S1))
    assert isinstance(failed, SwitchFailed) and failed.state == "blocked"
    assert bench.cell.role is CellRole.BLOCKED
    with pytest.raises(IllegalTransition, match="blocked"):
        await bench.tell(BecomeEngine(V0, bench.weights(), S0))


async def test_an_engine_that_cannot_load_is_quarantined(bench: Bench) -> None:
    bench.engine.broken = True
    (failed,) = await bench.tell(BecomeEngine(V0, bench.weights(), S0))
    assert isinstance(failed, SwitchFailed) and failed.state == "quarantined"


OVERDUE = [
    (StepName.RELEASE, "RELEASE_S", "engine", "release", "blocked"),
    (StepName.RESTORE, "TRAINER_S", "trainer", "enter", "quarantined"),
    (StepName.LOAD, "TRAINER_S", "trainer", "load_weights", "quarantined"),
    (StepName.OFFLOAD, "TRAINER_S", "trainer", "leave", "quarantined"),
]


@pytest.mark.parametrize(("step", "deadline", "part", "work", "state"), OVERDUE)
async def test_a_step_that_hangs_is_overdue_and_leaves_the_cell_out_of_service(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    step: StepName,
    deadline: str,
    part: str,
    work: str,
    state: str,
) -> None:
    async def hangs(*given: object) -> None:
        await asyncio.Event().wait()

    await bench.tell(BecomeEngine(V0, bench.weights(), S0))
    back = step is StepName.OFFLOAD
    if back:
        await bench.tell(BecomeTrainer(0, False, bench.weights(), V0, S1))
    monkeypatch.setattr(cell_module, deadline, 0.01)
    monkeypatch.setattr(getattr(bench, part), work, hangs)
    asked = BecomeEngine(V0, bench.weights(), Serial(2)) if back else None
    (failed,) = await bench.tell(asked or BecomeTrainer(0, False, bench.weights(), V0, S1))
    assert isinstance(failed, SwitchFailed) and failed.state == state == bench.cell.role.value
    assert failed.error.startswith(f"step {step} is not complete after 0.01 s")
    assert bench.steps[-1].step is step and bench.steps[-1].outcome.startswith("StepOverdue")


@pytest.mark.parametrize("before", [CellRole.STARTING, CellRole.ROLLOUT, CellRole.TRAINING])
async def test_a_cell_whose_weights_died_with_their_owner_stays_what_it_was_and_serves_the_next(
    bench: Bench, before: CellRole
) -> None:
    if before is CellRole.ROLLOUT:
        await bench.tell(BecomeEngine(V0, bench.weights(), S0))
    elif before is CellRole.TRAINING:
        await bench.train(core=True)
        await bench.tell(Claimed(0, bench.micro_step(0, 4)))
    served, gradient, resident = bench.engine.served, bench.trainer.gradient, bench.trainer.resident
    (postponed,) = await bench.tell(BecomeEngine(V1, bench.dead(V1), Serial(4)))
    assert isinstance(postponed, SwitchPostponed) and postponed.serial == 4 and "policy" in postponed.reason
    assert (bench.engine.served, bench.trainer.gradient, bench.trainer.resident) == (
        served,
        gradient,
        resident,
    )
    assert bench.cell.role is before
    (switched,) = await bench.tell(BecomeEngine(V1, bench.weights(V1), Serial(5)))
    assert isinstance(switched, CellSwitched) and (switched.version, switched.serial) == (V1, 5)


async def test_a_satellite_whose_snapshot_died_with_the_core_trains_once_there_is_another(
    bench: Bench,
) -> None:
    await bench.tell(BecomeEngine(V0, bench.weights(), S0))
    (switched,) = await bench.tell(BecomeTrainer(0, False, bench.dead(V1), V1, S1))
    assert isinstance(switched, CellSwitched) and (switched.role, switched.version) == (Role.TRAINING, V0)
    (postponed,) = await bench.tell(StartBatch(0, V1, bench.dead(V1)))
    assert isinstance(postponed, StartPostponed) and postponed.batch == 0
    assert await bench.tell(WorkReady(0)) == []
    assert await bench.tell(StartBatch(1, V1, bench.weights(V1, 5.0))) == [Claim(1)]
    assert (bench.trainer.version, bench.trainer.weight) == (V1, 5.0)


async def test_a_cell_never_trains_other_weights_than_those_of_the_batch(bench: Bench) -> None:
    await bench.train(core=False)
    with pytest.raises(ProtocolViolation, match="batch 1 trains version 1, held is 0"):
        await bench.tell(StartBatch(1, V1, None))


async def test_a_dead_engine_is_reported_at_once_and_serves_its_version_again(bench: Bench) -> None:
    await bench.tell(BecomeEngine(V1, bench.weights(V1), S0))
    bench.engine.alive = False
    bench.sent.clear()
    assert bench.cell.engine_died("killed")
    assert bench.sent == [EngineDown("killed")]
    (switched,) = await bench.tell(EngineDied("killed"))
    assert isinstance(switched, CellSwitched) and (switched.version, switched.serial) == (V1, S0)
    assert await bench.tell(EngineDied("killed")) == []


async def test_an_engine_that_dies_while_the_cell_trains_is_nobodys_concern(bench: Bench) -> None:
    await bench.train(core=True)
    bench.sent.clear()
    assert not bench.cell.engine_died("killed")
    assert bench.sent == []


async def test_published_weights_stay_for_the_burst_and_no_longer(bench: Bench) -> None:
    await bench.train(core=True)
    published: list[Manifest] = []
    for version in range(1, 6):
        (answer,) = await bench.tell(PublishWeights(Version(version), checkpoint=False))
        assert isinstance(answer, WeightsPublished) and answer.checkpoint == ""
        published.append(answer.weights)
    assert [Path(manifest.path).exists() for manifest in published] == [False, False, True, True, True]


async def test_a_restored_core_offers_its_weights_whatever_its_role(bench: Bench, tmp_path: Path) -> None:
    (restored,) = await bench.tell(RestoreTrainer(str(tmp_path), V1))
    assert isinstance(restored, TrainerRestored) and restored.weights.version == V1
    await bench.train(core=True, version=V1)
    (restored,) = await bench.tell(RestoreTrainer(str(tmp_path), V1))
    assert isinstance(restored, TrainerRestored)


@pytest.mark.parametrize("shares_device", [True, False])
async def test_an_engine_that_serves_nothing_gives_the_device_to_the_core_that_restores(
    bench: Bench, tmp_path: Path, shares_device: bool
) -> None:
    """It has taken what there was when it started."""
    bench.engine.shares_device = shares_device
    (restored,) = await bench.tell(RestoreTrainer(str(tmp_path), V0))
    assert isinstance(restored, TrainerRestored) and bench.engine.released is shares_device
    await bench.tell(BecomeEngine(V0, bench.weights(), S0))
    assert bench.engine.served == V0 and not bench.engine.released
    (restored,) = await bench.tell(RestoreTrainer(str(tmp_path), V0))
    assert not bench.engine.released, "it serves calls"


async def test_a_checkpoint_is_named_relative_to_the_run_folder_of_whoever_hears_of_it(
    bench: Bench, tmp_path: Path
) -> None:
    await bench.train(core=True)
    (published,) = await bench.tell(PublishWeights(V1, checkpoint=True))
    assert isinstance(published, WeightsPublished) and published.checkpoint == "checkpoints/v000001"
    await bench.tell(RestoreTrainer(published.checkpoint, V1))
    assert bench.trainer.restored == tmp_path / "checkpoints" / "v000001"


async def test_a_batch_cannot_start_in_rollout(bench: Bench) -> None:
    await bench.tell(BecomeEngine(V0, bench.weights(), S0))
    with pytest.raises(IllegalTransition, match="rollout cannot start batch 3"):
        await bench.tell(StartBatch(3, V0, None))


async def test_a_micro_step_that_lies_nowhere_is_given_back_and_the_cell_goes_on(bench: Bench) -> None:
    await bench.train(core=False)
    ref = bench.micro_step(0, 10)
    bench.regions.drop(ref.manifest)
    unavailable, claim = await bench.tell(Claimed(0, ref))
    assert isinstance(unavailable, MicroStepUnavailable)
    assert (unavailable.batch, unavailable.micro_step, claim) == (0, ref.id, Claim(0))
    assert not bench.trainer.open


async def test_a_switch_that_does_not_fit_into_memory_is_refused_with_the_numbers(bench: Bench) -> None:
    await bench.tell(BecomeEngine(V0, bench.weights(), S0))
    bench.memory = 0
    (failed,) = await bench.tell(BecomeTrainer(0, False, bench.weights(), V0, S1))
    assert isinstance(failed, SwitchFailed) and failed.state == "blocked"
    assert "to_training refused" in failed.error and "cgroup /job/memory.max leaves 0 MiB" in failed.error
    assert not bench.engine.released, "nothing was touched"
    assert [step.step for step in bench.steps if step.outcome != "done"] == [StepName.LEDGER]


async def test_the_core_is_refused_too_though_it_pulls_no_snapshot(bench: Bench) -> None:
    await bench.tell(BecomeEngine(V0, bench.weights(), S0))
    bench.memory, bench.engine.held_bytes = 1 << 20, 1 << 20
    bench.trainer.gradient_bytes = 3 << 20
    (failed,) = await bench.tell(BecomeTrainer(0, True, None, V0, S1))
    assert isinstance(failed, SwitchFailed) and failed.state == "blocked"
    assert "it needs 3 MiB of host memory (gradient 3 MiB)" in failed.error
    assert not bench.engine.released, "nothing was touched"


async def test_what_the_engine_gives_back_counts_as_room_for_the_trainer(bench: Bench) -> None:
    await bench.tell(BecomeEngine(V0, bench.weights(), S0))
    bench.memory, bench.engine.held_bytes = 0, 1 << 20
    (switched,) = await bench.tell(BecomeTrainer(0, False, bench.weights(), V0, S1))
    assert isinstance(switched, CellSwitched) and switched.role is Role.TRAINING


async def test_a_core_whose_open_gradient_does_not_fit_beside_the_engine_is_refused_before_it_leaves(
    bench: Bench,
) -> None:
    await bench.train(core=True)
    await bench.tell(Claimed(0, bench.micro_step(0, 4)))
    bench.memory, bench.trainer.gradient_bytes = 1 << 20, 3 << 20
    (failed,) = await bench.tell(BecomeEngine(V0, bench.weights(), Serial(2)))
    assert isinstance(failed, SwitchFailed) and failed.state == "quarantined"
    assert "trainer aside 3 MiB" in failed.error
    assert bench.trainer.resident and bench.trainer.open, "nothing was touched"


async def test_an_engine_that_cannot_have_its_memory_back_leaves_the_cell_quarantined(bench: Bench) -> None:
    await bench.train(core=False)
    bench.memory, bench.engine.released_bytes = 0, 1 << 20
    (failed,) = await bench.tell(BecomeEngine(V1, bench.weights(V1), Serial(2)))
    assert isinstance(failed, SwitchFailed) and failed.state == "quarantined"
    assert "engine 1 MiB" in failed.error
