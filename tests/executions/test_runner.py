"""The runner process over a real link: orders in, reports out, and nothing left behind however it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import psutil
import pytest
import pytest_asyncio

from gyre_hpc.config import RunConfig, save_run_config
from gyre_hpc.layout import RunLayout
from gyre_hpc.records import Assessment, ClosingReason, ExecutionId
from gyre_hpc.transport.links import LinkServer, PeerLink, write_rendezvous, write_secret
from gyre_hpc.transport.messages import (
    AskedToEnd,
    AssessExecution,
    CancelExecution,
    ExecutionAssessed,
    ExecutionClosed,
    ExecutionInterrupted,
    ExecutionStarted,
    ForgetExecution,
    Goodbye,
    HeldBack,
    Holding,
    Message,
    Shutdown,
    StartExecution,
)
from tests.executions.alive import Alive

PATIENCE_S = 120.0
FAMILY = "tests.executions.toy_family/ToyFamily"
ANSWER = 'echo {seed} {base_url} "$1"; echo 0.5 > answer'


class Controller:
    """The controller's end: starts runners, keeps what they say."""

    def __init__(self, root: Path) -> None:
        self.layout = RunLayout(root)
        self.layout.create()
        self.processes: list[asyncio.subprocess.Process] = []
        self.said: list[Message] = []
        self.config = RunConfig()
        self.config.model.path = "unused"
        self.config.tasks.family = FAMILY
        self.config.tasks.evaluator_retries = 1
        self.config.tasks.sandbox = "none"
        self.config.trust_tasks = True
        self.server: LinkServer | None = None
        self.link: PeerLink | None = None
        self.holding: tuple[tuple[ExecutionId, int], ...] | None = None
        """What the runner said it holds when it last met a controller."""

    async def listen(self, epoch: int = 1) -> None:
        self.server = LinkServer(write_secret(self.layout), epoch, "127.0.0.1")
        write_rendezvous(self.layout, *await self.server.start(), epoch)

    async def runner(self, command: str) -> asyncio.subprocess.Process:
        """A runner whose harness is this shell text."""
        self.config.harness.command = ["/bin/sh", "-c", command, "harness", "{instruction}"]
        return await self.launch()

    async def launch(self) -> asyncio.subprocess.Process:
        save_run_config(self.config, self.layout.root)
        arguments = ["-m", "gyre_hpc.executions.runner", "--run", str(self.layout.root), "--incarnation", "0"]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        process = await asyncio.create_subprocess_exec(sys.executable, *arguments, env=environment)
        self.processes.append(process)
        await self.accept()
        return process

    async def accept(self) -> None:
        assert self.server is not None
        self.link = await asyncio.wait_for(self.server.accept(), PATIENCE_S)

    def send(self, message: Message) -> None:
        assert self.link is not None
        self.link.send(message)

    def start(self, execution: int, seed: int = 0) -> None:
        url = f"http://127.0.0.1:9/x/{execution}"
        self.send(StartExecution(ExecutionId(execution), 0, f"{FAMILY}:{seed}", url, 11, False))

    async def until(self, holds: Callable[[Message], bool]) -> Message:
        assert self.link is not None
        while True:
            message = await asyncio.wait_for(self.link.receive(), PATIENCE_S)
            assert message is not None, f"the link ended after {self.said}"
            if isinstance(message, Holding):
                self.holding = message.attempts
                continue
            self.said.append(message)
            if holds(message):
                return message

    async def closed(self) -> ExecutionClosed:
        message = await self.until(lambda m: isinstance(m, ExecutionClosed))
        assert isinstance(message, ExecutionClosed)
        return message

    async def assessed(self) -> ExecutionAssessed:
        message = await self.until(lambda m: isinstance(m, ExecutionAssessed))
        assert isinstance(message, ExecutionAssessed)
        return message

    async def goodbye(self) -> Goodbye:
        message = await self.until(lambda m: isinstance(m, Goodbye))
        assert isinstance(message, Goodbye)
        return message


@pytest_asyncio.fixture
async def controller(tmp_path: Path) -> AsyncIterator[Controller]:
    controller = Controller(tmp_path / "run")
    await controller.listen()
    yield controller
    for process in controller.processes:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert controller.server is not None
    await controller.server.close()


def held(controller: Controller, execution: int = 0) -> Path:
    return controller.layout.execution(ExecutionId(execution), 0)


async def test_time_that_the_gateway_held_is_given_back_to_the_harness(controller: Controller) -> None:
    controller.config.harness.timeout_s = 3.0
    await controller.runner(f"sleep 4; {ANSWER}")
    controller.start(0)
    await controller.until(lambda m: isinstance(m, ExecutionStarted))
    controller.send(HeldBack(ExecutionId(0), 0, 60.0))
    assert (await controller.closed()).reason is ClosingReason.COMPLETED


async def test_an_execution_is_started_closed_and_assessed_once_however_often_it_is_ordered(
    controller: Controller,
) -> None:
    process = await controller.runner(ANSWER)
    controller.start(0)
    controller.start(0)
    assessment = (await controller.assessed()).assessment
    controller.start(0)
    controller.send(Shutdown("done"))
    assert (await controller.goodbye()).error == ""
    assert await process.wait() == 0
    assert [type(message) for message in controller.said] == [
        ExecutionStarted,
        ExecutionClosed,
        ExecutionAssessed,
        Goodbye,
    ]
    assert (assessment.score, assessment.workspace) == (0.5, "executions/000000/attempt-0/workspace")
    said = (held(controller) / "harness.log").read_text()
    assert said == "11 http://127.0.0.1:9/x/0 Write a number {between} 0 and 1 into the file answer.\n"
    saved = (held(controller) / "assessment.json").read_bytes()
    assert msgspec.json.decode(saved, type=Assessment) == assessment
    assert sorted(path.name for path in held(controller).iterdir()) == [
        "assessment.json",
        "harness.log",
        "workspace",
    ]


@pytest.mark.userns
async def test_executions_run_in_private_roots(controller: Controller) -> None:
    controller.config.tasks.sandbox = "userns"
    controller.config.trust_tasks = False
    await controller.runner('pwd; ls "' + str(controller.layout.root) + '" || ' + ANSWER)
    controller.start(0)
    assert (await controller.assessed()).assessment.score == 0.5
    assert (held(controller) / "harness.log").read_text().startswith("/workspace\n")


async def test_an_evaluator_failure_is_reported_as_invalid(controller: Controller) -> None:
    await controller.runner(ANSWER)
    controller.start(0, seed=1)
    assessment = (await controller.assessed()).assessment
    assert (assessment.score, assessment.valid) == (None, False)
    assert assessment.reason == "evaluator crashed (exit code 7)"
    assert assessment.evidence == "broken"


async def test_a_harness_that_makes_no_call_closes_like_any_other(controller: Controller) -> None:
    await controller.runner("true")
    controller.start(0)
    assert (await controller.closed()).reason is ClosingReason.COMPLETED


async def test_a_time_out_is_assessed_and_a_cancelled_surplus_is_not(controller: Controller) -> None:
    controller.config.harness.timeout_s = 3.0
    controller.config.tasks.keep_workspaces = False
    await controller.runner("echo 0.25 > answer; sleep 1000")
    controller.start(0)
    controller.start(1)
    controller.send(CancelExecution(ExecutionId(1), 0, ClosingReason.CANCELLED_SURPLUS))
    surplus, late = await controller.closed(), await controller.closed()
    assert (surplus.execution, surplus.reason) == (1, ClosingReason.CANCELLED_SURPLUS)
    assert (late.reason, late.exit_code) == (ClosingReason.HARNESS_TIMEOUT, None)
    assert (await controller.assessed()).assessment.score == 0.25
    controller.send(Shutdown("done"))
    await controller.goodbye()
    assert not any(isinstance(m, ExecutionAssessed) and m.execution == 1 for m in controller.said)
    assert not (held(controller) / "workspace").exists()


async def test_a_query_of_another_family_is_infrastructure(controller: Controller) -> None:
    await controller.runner("true")
    controller.send(StartExecution(ExecutionId(0), 0, "other:1", "http://127.0.0.1:9/x/k", 0, False))
    closed = await controller.closed()
    assert closed.reason is ClosingReason.INFRASTRUCTURE
    assert "other:1" in closed.detail


async def test_a_workspace_is_never_used_twice(controller: Controller) -> None:
    held(controller).mkdir(parents=True)
    await controller.runner("true")
    controller.start(0)
    closed = await controller.closed()
    assert (closed.reason, "File exists" in closed.detail) == (ClosingReason.INFRASTRUCTURE, True)


async def test_a_preserved_workspace_is_assessed_again_on_request(controller: Controller) -> None:
    workspace = held(controller) / "workspace"
    workspace.mkdir(parents=True)
    (workspace / "answer").write_text("0.125")
    await controller.runner("true")
    controller.send(AssessExecution(ExecutionId(0), 0, f"{FAMILY}:0"))
    first = await controller.assessed()
    assert first.assessment.score == 0.125
    assert (held(controller) / "assessment.json").exists()


async def test_what_the_node_lacks_is_said_to_the_controller(controller: Controller) -> None:
    controller.config.harness.command = ["no-such-harness"]
    process = await controller.launch()
    assert "no-such-harness" in (await controller.goodbye()).error
    assert await process.wait() == 2


async def test_untrusted_tasks_do_not_run_without_a_sandbox(controller: Controller) -> None:
    controller.config.trust_tasks = False
    process = await controller.runner("true")
    assert "trust_tasks=true" in (await controller.goodbye()).error
    assert await process.wait() == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_programs_end_with_their_runner(
    controller: Controller, tmp_path: Path, alive: Alive, number: signal.Signals
) -> None:
    process = await controller.runner(f"exec > {alive.path}; setsid sleep 1000 & echo up; wait")
    controller.start(0)
    await asyncio.to_thread(alive.wait_for, b"up")
    process.send_signal(number)
    assert await process.wait() == (0 if number is signal.SIGTERM else -number)
    await asyncio.to_thread(alive.wait_until_none_left)


async def test_a_runner_whose_controller_stays_away_ends_with_its_programs(
    controller: Controller, alive: Alive
) -> None:
    controller.config.cluster.orphan_grace_s = 1.0
    process = await controller.runner(f"exec > {alive.path}; echo up; sleep 1000")
    controller.start(0)
    await asyncio.to_thread(alive.wait_for, b"up")
    assert controller.server is not None
    await controller.server.close()
    assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 1
    await asyncio.to_thread(alive.wait_until_none_left)


async def test_a_controller_that_returns_hears_what_it_missed(controller: Controller) -> None:
    await controller.runner(ANSWER)
    controller.start(0)
    await controller.until(lambda m: isinstance(m, ExecutionStarted))
    assert controller.server is not None
    await controller.server.close()
    await controller.listen(epoch=2)
    await controller.accept()
    assert (await controller.assessed()).assessment.score == 0.5
    assert ExecutionClosed in {type(message) for message in controller.said}
    assert controller.holding == ((ExecutionId(0), 0),)


async def test_harness_clocks_stand_still_without_a_controller(
    controller: Controller, tmp_path: Path
) -> None:
    controller.config.harness.timeout_s = 3.0
    await controller.runner(f"sleep 5; {ANSWER}; touch {tmp_path}/answered")
    controller.start(0)
    await controller.until(lambda m: isinstance(m, ExecutionStarted))
    assert controller.server is not None
    await controller.server.close()
    async with asyncio.timeout(PATIENCE_S):
        while not (tmp_path / "answered").exists():
            await asyncio.sleep(0.05)
    await controller.listen(epoch=2)
    await controller.accept()
    assert (await controller.closed()).reason is ClosingReason.COMPLETED


async def test_a_runner_leaves_a_controller_whose_place_another_one_has_taken(controller: Controller) -> None:
    await controller.runner(ANSWER)
    controller.start(0)
    await controller.assessed()
    first = controller.server
    assert first is not None
    await controller.listen(epoch=2)
    await controller.accept()
    assert (await controller.assessed()).execution == 0 and controller.holding == ((ExecutionId(0), 0),)
    await first.close()


async def test_what_is_recorded_is_forgotten_and_not_told_again(controller: Controller) -> None:
    await controller.runner(ANSWER)
    controller.start(0)
    await controller.assessed()
    controller.send(ForgetExecution(ExecutionId(0)))
    controller.start(1)
    await controller.assessed()
    assert controller.server is not None
    await controller.server.close()
    await controller.listen(epoch=2)
    controller.said.clear()
    await controller.accept()
    assert (await controller.assessed()).execution == 1
    assert [getattr(message, "execution", None) for message in controller.said] == [1, 1, 1]


async def test_a_signal_to_the_whole_step_is_told_and_voids_the_programs_it_ends(
    controller: Controller, alive: Alive
) -> None:
    """As Slurm does at preemption: every process of the step gets SIGTERM, long before anything has to end."""
    controller.config.cluster.kind = "slurm"
    process = await controller.runner(f"exec > {alive.path}; echo up; sleep 1000")
    controller.start(0)
    await asyncio.to_thread(alive.wait_for, b"up")
    for each in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
        each.send_signal(signal.SIGTERM)
    await controller.until(lambda m: m == ExecutionInterrupted(ExecutionId(0), 0))
    assert AskedToEnd("SIGTERM") in controller.said and process.returncode is None
    controller.send(
        StartExecution(ExecutionId(1), 0, f"{FAMILY}:1", "http://127.0.0.1:9/x/1", 11, False, 0.3)
    )
    closed = await controller.closed()
    assert (closed.execution, closed.reason) == (1, ClosingReason.WALLTIME)
    assert (await controller.assessed()).execution == 1
    controller.send(Shutdown("told"))
    assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
