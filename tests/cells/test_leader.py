"""Real cell processes (engine, Megatron trainer, regions) under a scripted controller, from hello to goodbye."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import numpy as np
import psutil
import pytest
import pytest_asyncio

from gyre_hpc.config import ModelConfig, RunConfig, save_run_config
from gyre_hpc.engines.client import EngineClient, EngineRefused
from gyre_hpc.engines.weights import read_weights, weights_digest
from gyre_hpc.launch.local import LocalLauncher, LocalProcess
from gyre_hpc.launch.plan import ProcessSpec
from gyre_hpc.layout import RunLayout
from gyre_hpc.models.shape import ModelShape
from gyre_hpc.records import CellId, GroupId, Version
from gyre_hpc.schedule.protocol import Role
from gyre_hpc.training.new_model import write_new_model
from gyre_hpc.trajectories import micro_steps
from gyre_hpc.trajectories.micro_steps import MicroStep, NodeTargets
from gyre_hpc.transport.links import LinkServer, PeerLink, write_rendezvous, write_secret
from gyre_hpc.transport.messages import (
    BatchCommitted,
    BecomeEngine,
    BecomeTrainer,
    CellSwitched,
    Claim,
    Claimed,
    CommitBatch,
    Contribution,
    ContributionCommitted,
    EngineDown,
    FlushContribution,
    Goodbye,
    Manifest,
    Message,
    MicroStepDone,
    MicroStepRef,
    PublishWeights,
    RegionKind,
    RestoreTrainer,
    Serial,
    Shutdown,
    StartBatch,
    StepDone,
    StepName,
    SwitchFailed,
    TrainerRestored,
    WeightsPublished,
)
from gyre_hpc.transport.region_files import run_folder
from gyre_hpc.transport.regions import RegionServer, pull, remove_leftovers, run_key
from gyre_hpc.transport.rendezvous import engine_token

PATIENCE_S = 240.0
VOCABULARY = 48
SHAPE = ModelShape(
    num_hidden_layers=2,
    hidden_size=32,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=VOCABULARY,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    tie_word_embeddings=True,
)
V0, V1 = Version(0), Version(1)
S0, S1 = Serial(0), Serial(1)
Expected = TypeVar("Expected", bound=Message)

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:Warning. tp_group is None:DeprecationWarning"),
]


class Peer:
    """One cell process and its link."""

    def __init__(self, process: LocalProcess, link: PeerLink) -> None:
        self.process, self.link = process, link
        self.steps: list[StepDone] = []

    def send(self, message: Message) -> None:
        self.link.send(message)

    async def expect(self, kind: type[Expected]) -> Expected:
        """The next message, which must be of this kind."""
        async with asyncio.timeout(PATIENCE_S):
            while isinstance(message := await self.link.receive(), StepDone):
                self.steps.append(message)
        assert isinstance(message, kind), f"{message} is not a {kind.__name__}"
        return message

    async def rollout(self, weights: Manifest) -> CellSwitched:
        self.send(BecomeEngine(Version(weights.version), weights, S0))
        return await self.serving()

    async def serving(self) -> CellSwitched:
        switched = await self.expect(CellSwitched)
        assert switched.role is Role.ROLLOUT
        return switched

    def engine(self) -> psutil.Process:
        """The engine child of the leader."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(child for child in children if "gyre_hpc.engines.torch.server" in child.cmdline())


class Controller:
    """A controller that does what the test says."""

    def __init__(self, layout: RunLayout) -> None:
        self.layout = layout
        self.secret = write_secret(layout)
        self.server = LinkServer(self.secret, 1, "127.0.0.1")
        self.regions = RegionServer("127.0.0.1", "processor", run_key(self.secret), secret=self.secret)
        self.processes: list[LocalProcess] = []

    async def start(self) -> None:
        write_rendezvous(self.layout, *await self.server.start(), 1)
        await self.regions.start()

    async def launch(self, *cells: int, incarnation: int = 1000) -> list[Peer]:
        """Start cells; returns them in this order once each has said hello."""
        by_cell: dict[int, LocalProcess] = {}
        for cell in cells:
            argv = [sys.executable, "-m", "gyre_hpc.cells.leader", "--run", str(self.layout.root)]
            argv += ["--cell", str(cell), "--incarnation", str(incarnation)]
            spec = ProcessSpec(
                f"cell-{cell}", argv, {"OMP_NUM_THREADS": "1"}, self.layout.root / f"cell-{cell}.log"
            )
            by_cell[cell] = await LocalLauncher().start(spec)
            self.processes.append(by_cell[cell])
        links: dict[int, PeerLink] = {}
        async with asyncio.timeout(PATIENCE_S):
            while len(links) < len(cells):
                link = await self.server.accept()
                links[link.hello.index] = link
        return [Peer(by_cell[cell], links[cell]) for cell in cells]

    async def restore(self, core: Peer, folder: Path, version: Version = V0) -> Manifest:
        core.send(RestoreTrainer(self.layout.named(folder), version))
        restored = await core.expect(TrainerRestored)
        assert restored.version == version
        return restored.weights

    def micro_step(self, step: MicroStep) -> MicroStepRef:
        manifest = self.regions.publish(RegionKind.MICRO_STEPS, step.id, 0, "", step.to_arrays())
        return MicroStepRef(step.id, GroupId(0), V0, step.tokens, step.targets, manifest)

    async def close(self) -> None:
        for process in self.processes:
            process.kill()
            await process.wait()
        self.regions.close()
        await self.server.close()
        remove_leftovers(run_key(self.secret))


@pytest_asyncio.fixture
async def controller(tmp_path: Path) -> AsyncIterator[Controller]:
    layout = RunLayout(tmp_path)
    layout.create()
    write_new_model(layout.model, SHAPE, 0, std=0.2)
    config = RunConfig(model=ModelConfig(path=str(layout.model), max_context=128))
    config.engine.pool_tokens, config.trainer.learning_rate = 1024, 1e-2
    save_run_config(config, layout.root)
    controller = Controller(layout)
    await controller.start()
    yield controller
    await controller.close()


def row(index: int) -> MicroStep:
    """One path of random tokens, all but the first trained."""
    draw = np.random.default_rng(index)
    length = 12 + index
    tokens = draw.integers(3, VOCABULARY, length).astype(np.int32)
    places = np.arange(1, length, dtype=np.int32)
    targets = NodeTargets(
        node=np.zeros(length - 1, np.int32),
        index=places,
        path=np.zeros(length - 1, np.int32),
        weight=np.full(length - 1, 1.0 / (length - 1), np.float32),
        advantage=np.full(length - 1, 1.0 if index % 2 else -0.7, np.float32),
        behaviour_logprob=np.full(length - 1, np.nan, np.float32),
        version=np.zeros(length - 1, np.int32),
    )
    return micro_steps.build(f"0.{index}", 0, [-1], [tokens], targets, np.zeros(1, np.int32))


async def served_checksum(controller: Controller, address: str) -> str:
    async with aiohttp.ClientSession() as session:
        return await EngineClient(address, session, engine_token(controller.secret)).checksum()


async def only_who_knows_the_secret_can_call_the_engine(controller: Controller, cell: Peer, url: str) -> None:
    async with aiohttp.ClientSession() as session:
        with pytest.raises(EngineRefused, match="401"):
            await EngineClient(url, session).checksum()
    engine = cell.engine()
    shown = " ".join([*engine.cmdline(), *engine.environ().values()])
    assert engine_token(controller.secret) not in shown and controller.secret.hex() not in shown


async def claims(cell: Peer, *work: MicroStepRef) -> None:
    """Answer the cell's claims with these micro-steps, then with nothing."""
    for ref in work:
        assert await cell.expect(Claim) == Claim(0)
        cell.send(Claimed(0, ref))
        done = await cell.expect(MicroStepDone)
        assert done.micro_step == ref.id
        assert done.metrics["tokens"] == ref.tokens
    await cell.expect(Claim)
    cell.send(Claimed(0, None))


async def until_gone(process: psutil.Process) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.02)


async def reference_step(layout: RunLayout, core: list[MicroStep], satellite: list[MicroStep]) -> str:
    """Digest of the weights one process makes of the same micro-steps in the same grouping."""
    script = Path(__file__).with_name("reference_step.py")
    for name, steps in (("core", core), ("satellite", satellite)):
        for position, step in enumerate(steps):
            arrays: dict[str, Any] = step.to_arrays()
            np.savez(layout.root / f"{name}-{position}.npz", **arrays)
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(script), str(layout.root), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode().split()[-1]


async def test_cells_roll_out_train_together_publish_and_roll_out_again(controller: Controller) -> None:
    layout = controller.layout
    core, satellite = await controller.launch(0, 1)
    weights = await controller.restore(core, layout.model)

    initial = weights_digest(read_weights(layout.model))
    for cell in (core, satellite):
        switched = await cell.rollout(weights)
        assert switched.version == V0
        assert await served_checksum(controller, switched.address) == initial

    core.send(BecomeTrainer(0, True, None, V0, S1))
    satellite.send(BecomeTrainer(0, False, weights, V0, S1))
    steps = [row(index) for index in range(5)]
    refs = [controller.micro_step(step) for step in steps]
    for cell, own in ((core, refs[:2]), (satellite, refs[2:])):
        switched = await cell.expect(CellSwitched)
        assert (switched.role, switched.version) == (Role.TRAINING, V0)
        cell.send(StartBatch(0, V0, None))
        await claims(cell, *own)

    satellite.send(FlushContribution(0))
    contribution = await satellite.expect(Contribution)
    assert contribution.micro_steps == ("0.2", "0.3", "0.4") and contribution.manifest is not None
    core.send(CommitBatch(0, V1, 4, ((CellId(1), contribution.manifest),)))
    committed = await core.expect(BatchCommitted)
    assert committed.version == V1 and committed.metrics["grad_norm"] > 0
    satellite.send(ContributionCommitted(0))

    core.send(PublishWeights(V1, checkpoint=True))
    published = await core.expect(WeightsPublished)
    trained = weights_digest(await pull(published.weights, deadline_s=PATIENCE_S))
    assert published.checkpoint == "checkpoints/v000001"
    assert weights_digest(read_weights(layout.checkpoint(V1))) == trained
    assert trained == await reference_step(layout, steps[:2], steps[2:])
    for cell in (core, satellite):
        switched = await cell.rollout(published.weights)
        assert switched.version == V1
        assert await served_checksum(controller, switched.address) == trained

    await only_who_knows_the_secret_can_call_the_engine(controller, satellite, switched.address)
    await an_engine_killed_in_rollout_serves_again(controller, satellite, trained)
    await a_satellite_can_become_the_core(controller, satellite, trained)
    await cells_end_as_told_and_take_their_engines_along(core, satellite)


async def an_engine_killed_in_rollout_serves_again(controller: Controller, cell: Peer, digest: str) -> None:
    engine = cell.engine()
    engine.kill()
    down = await cell.expect(EngineDown)
    assert str(engine.pid) in down.cause
    switched = await cell.serving()
    assert switched.version == V1
    assert await served_checksum(controller, switched.address) == digest


async def a_satellite_can_become_the_core(controller: Controller, cell: Peer, digest: str) -> None:
    weights = await controller.restore(cell, controller.layout.checkpoint(V1), V1)
    assert weights_digest(await pull(weights, deadline_s=PATIENCE_S)) == digest
    initial = await controller.restore(cell, controller.layout.model, V0)
    assert weights_digest(await pull(initial, deadline_s=PATIENCE_S)) != digest


async def cells_end_as_told_and_take_their_engines_along(clean: Peer, killed: Peer) -> None:
    engines = [cell.engine() for cell in (clean, killed)]
    clean.send(Shutdown("done"))
    assert await clean.expect(Goodbye) == Goodbye("")
    assert await clean.process.wait() == 0
    killed.process.kill()
    assert await killed.process.wait() == -signal.SIGKILL
    for engine in engines:
        await until_gone(engine)


async def test_a_cell_whose_engine_refuses_the_weights_is_quarantined_and_ends_with_its_controller(
    controller: Controller,
) -> None:
    (cell,) = await controller.launch(0)
    foreign = controller.regions.publish(RegionKind.WEIGHTS, "policy", 0, "", {"w": np.zeros(3, np.float32)})
    cell.send(BecomeEngine(V0, foreign, S0))
    failed = await cell.expect(SwitchFailed)
    assert failed.state == "quarantined"
    engine = cell.engine()
    await controller.server.close()
    async with asyncio.timeout(PATIENCE_S):
        assert await cell.process.wait() == 1
    await until_gone(engine)
    assert not (run_folder(run_key(controller.secret)) / "cell-0").exists()


def test_a_run_folder_without_configuration_is_named(tmp_path: Path) -> None:
    from gyre_hpc.cells.leader import main

    assert main(["--run", str(tmp_path), "--cell", "0", "--incarnation", "1"]) == 2
    assert os.listdir(tmp_path) == []


LEAVING = (StepName.LEDGER, StepName.RELEASE, StepName.RESTORE, StepName.PULL, StepName.LOAD)
RETURNING = (
    StepName.PULL,
    StepName.OFFLOAD,
    StepName.LEDGER,
    StepName.WRITE,
    StepName.START,
    StepName.RESUME,
    StepName.LOAD,
    StepName.CONFIRM,
)
KILLED_BEHIND = [
    pytest.param(back, step, marks=() if step is StepName.RELEASE else pytest.mark.full)
    for back, steps in ((False, LEAVING), (True, RETURNING))
    for step in steps
]


@pytest.mark.parametrize(("back", "step"), KILLED_BEHIND)
async def test_a_cell_killed_behind_a_step_leaves_nothing_and_its_next_incarnation_serves(
    controller: Controller, back: bool, step: StepName
) -> None:
    core, cell = await controller.launch(0, 1)
    weights = await controller.restore(core, controller.layout.model)
    await cell.rollout(weights)
    engine = cell.engine()
    cell.send(BecomeTrainer(0, False, weights, V0, S1))
    if back:
        await cell.expect(CellSwitched)
        cell.send(BecomeEngine(V0, weights, Serial(2)))
    async with asyncio.timeout(PATIENCE_S):
        while not (isinstance(said := await cell.link.receive(), StepDone) and said.step is step):
            assert said is not None and not isinstance(said, CellSwitched)
    os.kill(cell.process.pid, signal.SIGKILL)
    await cell.process.wait()
    await until_gone(engine)
    (again,) = await controller.launch(1, incarnation=2000)
    switched = await again.rollout(weights)
    assert await served_checksum(controller, switched.address) == weights_digest(
        read_weights(controller.layout.model)
    )
