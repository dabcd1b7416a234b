"""The processor against real call logs and shards: when a group is reported, with what, and what ends up at rest."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from gyre_hpc.config import ModelConfig, RunConfig, save_run_config
from gyre_hpc.controller.processor import RECORDS_S, Processor
from gyre_hpc.gateway.call_log import CallLog, call_log_path
from gyre_hpc.gateway.frames import (
    AttemptSealed,
    CallDelivered,
    CallFinished,
    CallOpened,
    LawBroken,
    TokensReceived,
    encode_float32,
    encode_int32,
)
from gyre_hpc.layout import RunLayout
from gyre_hpc.records import Assessment, ClosingReason, Delivery, ExecutionId, GroupId, Version
from gyre_hpc.shards.manifest import read_manifest
from gyre_hpc.shards.stats import show, stats
from gyre_hpc.shards.verify import verify
from gyre_hpc.trajectories.micro_steps import MicroStep
from gyre_hpc.transport.links import LinkServer, PeerLink, write_rendezvous, write_secret
from gyre_hpc.transport.messages import (
    DropGroup,
    ExecutionOutcome,
    ExpectGroup,
    Goodbye,
    GroupProcessed,
    Manifest,
    Message,
    PeerKind,
    RegionKind,
    Seal,
    ShardSealed,
    Shutdown,
)
from gyre_hpc.transport.regions import pull

M = TypeVar("M", bound=Message)
GROUP = GroupId(7)
MEMBERS = tuple(ExecutionId(number) for number in range(70, 74))


class Controller:
    """Everything the processor says, and the regions it holds, in memory."""

    def __init__(self) -> None:
        self.said: list[Message] = []
        self.regions: dict[str, MicroStep] = {}

    def publish(self, step: MicroStep, version: int) -> Manifest:
        self.regions[step.id] = step
        return Manifest(RegionKind.MICRO_STEPS, step.id, version, "", "processor", "", ())

    def drop(self, manifest: Manifest) -> None:
        del self.regions[manifest.name]

    def groups(self) -> list[GroupProcessed]:
        return [message for message in self.said if isinstance(message, GroupProcessed)]

    def sealed(self) -> list[int]:
        return [e for message in self.said if isinstance(message, ShardSealed) for e in message.executions]


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path / "run")
    layout.create()
    return layout


@pytest.fixture
def log(run: RunLayout) -> Iterable[CallLog]:
    log = CallLog(call_log_path(run, 1), 1000)
    yield log
    log.close()


def processor(run: RunLayout) -> tuple[Processor, Controller]:
    controller = Controller()
    config = RunConfig(name="test", seed=5)
    return Processor(run, config, controller.publish, controller.drop, controller.said.append), controller


def write_calls(
    log: CallLog, execution: int, attempt: int = 0, calls: int = 3, end: bool = True, broken: bool = False
) -> None:
    """A chain of calls as the gateway logs it; `broken`: the engine of call 1 was given another prompt."""
    base, shared = "", 0
    for ordinal in range(calls):
        call = f"{execution}.{attempt}.{ordinal}"
        delta = np.arange(5, dtype=np.int32) + 10 * ordinal + 1000 * execution
        opened = CallOpened(
            call, execution, attempt, ordinal, base, shared, encode_int32(delta), b"", b"", 64, (), False,
            "main", "openai-chat", 1.0, {}, (),
        )  # fmt: skip
        log.append(opened)
        output = np.arange(4, dtype=np.int32) + 10 * ordinal + 500
        log.append(TokensReceived(call, encode_int32(output), encode_float32([-0.5] * 4), encode_int32([3])))
        if broken and ordinal == 1:
            log.append(LawBroken(call, "engine_prompt"))
        log.append(CallFinished(call, "stop", 4, 2.0, 0.0, 0, 0, ""))
        log.append(CallDelivered(call, Delivery.COMPLETE))
        base, shared = call, shared + 9
    if end:
        log.append(AttemptSealed(execution, attempt, calls, {}))


def outcome(
    execution: int,
    score: float | None,
    attempt: int = 0,
    group: GroupId | None = GROUP,
    incomplete: bool = False,
    reason: ClosingReason = ClosingReason.COMPLETED,
) -> ExecutionOutcome:
    assessment = None if score is None else Assessment(score, True, "")
    return ExecutionOutcome(ExecutionId(execution), attempt, group, "q", reason, 9.0, incomplete, assessment)


def expect() -> ExpectGroup:
    return ExpectGroup(GROUP, "q", Version(4), MEMBERS)


def contents(controller: Controller) -> dict[str, dict[str, list[float]]]:
    return {
        id: {name: array.tolist() for name, array in step.to_arrays().items()}
        for id, step in controller.regions.items()
    }


def test_a_group_is_reported_once_when_its_last_outcome_is_known(run: RunLayout, log: CallLog) -> None:
    machine, controller = processor(run)
    machine.obey(expect(), 0.0)
    for number, execution in enumerate(MEMBERS):
        write_calls(log, execution)
        machine.advance(0.0)
        assert controller.groups() == []
        machine.obey(outcome(execution, float(number % 2)), 0.0)
    machine.advance(0.0)
    machine.advance(1.0)
    (report,) = controller.groups()
    assert (report.valid, report.rewards, report.reason) == (4, (0.0, 1.0, 0.0, 1.0), "")
    assert report.trained_tokens == sum(ref.targets for ref in report.micro_steps) == 4 * 3 * 4
    assert {ref.id for ref in report.micro_steps} == set(controller.regions)
    assert all(
        ref.version == 4 and ref.tokens == controller.regions[ref.id].tokens for ref in report.micro_steps
    )


def test_an_outcome_waits_for_its_calls_to_be_visible(run: RunLayout, log: CallLog) -> None:
    machine, controller = processor(run)
    machine.obey(expect(), 0.0)
    for number, execution in enumerate(MEMBERS):
        machine.obey(outcome(execution, float(number)), 0.0)
        write_calls(log, execution, end=execution != MEMBERS[-1])
    machine.advance(1.0)
    assert controller.groups() == []
    log.append(AttemptSealed(MEMBERS[-1], 0, 3, {}))
    machine.advance(2.0)
    assert controller.groups()[0].valid == 4


def test_records_that_never_end_make_the_execution_incomplete(run: RunLayout, log: CallLog) -> None:
    machine, controller = processor(run)
    machine.obey(expect(), 0.0)
    for number, execution in enumerate(MEMBERS):
        machine.obey(outcome(execution, float(number)), 0.0)
        write_calls(log, execution, end=execution != MEMBERS[-1])
    machine.advance(RECORDS_S - 1)
    assert controller.groups() == []
    machine.advance(RECORDS_S)
    assert controller.groups()[0].rewards == (0.0, 1.0, 2.0)


def test_a_corrupt_log_costs_only_what_lies_behind_the_damage(run: RunLayout, log: CallLog) -> None:
    machine, controller = processor(run)
    machine.obey(expect(), 0.0)
    for number, execution in enumerate(MEMBERS):
        machine.obey(outcome(execution, float(number)), 0.0)
    for execution in MEMBERS[:3]:
        write_calls(log, execution)
    machine.advance(0.0)
    os.write(log._handle, b"\xff" * 40)
    write_calls(log, MEMBERS[3])
    machine.advance(0.0)
    machine.advance(RECORDS_S)
    assert controller.groups()[0].rewards == (0.0, 1.0, 2.0)


def test_excluded_incomplete_and_callless_executions_do_not_count(run: RunLayout, log: CallLog) -> None:
    machine, controller = processor(run)
    machine.obey(expect(), 0.0)
    write_calls(log, 70)
    write_calls(log, 71)
    write_calls(log, 72)
    write_calls(log, 73, calls=0)
    machine.obey(outcome(70, 1.0), 0.0)
    machine.obey(outcome(71, None, reason=ClosingReason.OVERALL_TIMEOUT), 0.0)
    machine.obey(outcome(72, 1.0, incomplete=True), 0.0)
    machine.obey(outcome(73, 1.0), 0.0)
    machine.advance(0.0)
    (report,) = controller.groups()
    assert (report.valid, report.micro_steps) == (1, ())
    assert (
        report.reason == "1 of 4 executions valid: 1 incomplete records, 1 no model call, 1 overall_timeout"
    )


def test_an_execution_that_broke_the_token_law_is_never_trained_and_says_so(
    run: RunLayout, log: CallLog
) -> None:
    """Whatever the controller was told."""
    machine, controller = processor(run)
    machine.obey(expect(), 0.0)
    for execution, score in zip(MEMBERS, (0.0, None, 1.0, 0.5), strict=True):
        write_calls(log, execution, broken=execution == MEMBERS[2])
        machine.obey(outcome(execution, score), 0.0)
    machine.advance(0.0)
    (report,) = controller.groups()
    assert report.rewards == (0.0, 0.5)
    for step in controller.regions.values():
        assert MEMBERS[2] not in step.path_execution
    machine.seal()
    assert stats(run.root).forks_by_reason == {"engine_prompt": 1}
    assert show(run.root, MEMBERS[2]).record.reward is None
    assert [call.forks for call in show(run.root, MEMBERS[2]).calls] == [(), ("engine_prompt",), ()]


def test_a_group_that_died_of_a_broken_token_law_names_it(run: RunLayout, log: CallLog) -> None:
    machine, controller = processor(run)
    machine.obey(expect(), 0.0)
    for execution in MEMBERS:
        write_calls(log, execution, broken=execution != MEMBERS[0])
        machine.obey(outcome(execution, 1.0), 0.0)
    machine.advance(0.0)
    assert controller.groups()[0].reason == "1 of 4 executions valid: 3 token_law"


def test_a_withdrawn_execution_without_any_record_does_not_hold_the_group(
    run: RunLayout, log: CallLog
) -> None:
    machine, controller = processor(run)
    machine.obey(expect(), 0.0)
    for number, execution in enumerate(MEMBERS[:3]):
        write_calls(log, execution)
        machine.obey(outcome(execution, float(number)), 0.0)
    machine.obey(outcome(MEMBERS[3], None, reason=ClosingReason.CANCELLED_SURPLUS), 0.0)
    machine.advance(0.0)
    assert controller.groups()[0].valid == 3
    machine.advance(0.0, last=True)
    machine.seal()
    assert sorted(controller.sealed()) == list(MEMBERS)


def test_equal_rewards_are_reported_without_micro_steps(run: RunLayout, log: CallLog) -> None:
    machine, controller = processor(run)
    machine.obey(expect(), 0.0)
    for execution in MEMBERS:
        write_calls(log, execution)
        machine.obey(outcome(execution, 0.5), 0.0)
    machine.advance(0.0)
    assert (controller.groups()[0].valid, controller.groups()[0].micro_steps) == (4, ())


def test_a_dropped_group_frees_its_regions_and_memory(run: RunLayout, log: CallLog) -> None:
    machine, controller = processor(run)
    machine.obey(expect(), 0.0)
    for number, execution in enumerate(MEMBERS):
        write_calls(log, execution)
        machine.obey(outcome(execution, float(number)), 0.0)
    machine.advance(0.0)
    assert controller.regions
    machine.obey(DropGroup(GROUP), 0.0)
    machine.advance(0.0)
    assert controller.regions == {} and machine._closed == {} and machine._book._strands == {}
    machine.obey(DropGroup(GROUP), 0.0)


def finished(run: RunLayout, *, seal: bool) -> Controller:
    machine, controller = processor(run)
    machine.obey(expect(), 0.0)
    for number, execution in enumerate(MEMBERS):
        machine.obey(outcome(execution, float(number)), 0.0)
    if seal:
        machine.obey(Seal(), 0.0)
    machine.advance(0.0)
    return controller


def test_a_restarted_processor_makes_the_same_micro_steps_from_logs_or_shards(
    run: RunLayout, log: CallLog
) -> None:
    for execution in MEMBERS:
        write_calls(log, execution)
    before = finished(run, seal=False)
    from_logs = finished(run, seal=True)
    from_shards = finished(run, seal=True)
    assert contents(before) == contents(from_logs) == contents(from_shards) != {}
    assert (before.sealed(), from_logs.sealed(), from_shards.sealed()) == ([], list(MEMBERS), [])
    assert stats(run.root).executions == len(MEMBERS)
    assert verify(run.root).ok


def test_a_group_asked_for_again_is_reported_again(run: RunLayout, log: CallLog) -> None:
    machine, controller = processor(run)
    for execution in MEMBERS:
        write_calls(log, execution)
    for _ in range(2):
        machine.obey(expect(), 0.0)
        for number, execution in enumerate(MEMBERS):
            machine.obey(outcome(execution, float(number)), 0.0)
        machine.advance(0.0)
    first, second = controller.groups()
    assert first == second
    machine.obey(DropGroup(GROUP), 0.0)
    machine.advance(0.0)
    machine.obey(expect(), 0.0)
    for number, execution in enumerate(MEMBERS):
        machine.obey(outcome(execution, float(number)), 0.0)
    machine.advance(0.0)
    assert controller.groups()[2] == first


def test_a_superseded_attempt_is_kept_but_never_trained(run: RunLayout, log: CallLog) -> None:
    machine, controller = processor(run)
    machine.obey(expect(), 0.0)
    write_calls(log, 70, attempt=0, calls=5, end=False)
    write_calls(log, 70, attempt=1, calls=2)
    machine.obey(outcome(70, 1.0, attempt=1), 0.0)
    for execution in MEMBERS[1:]:
        write_calls(log, execution)
        machine.obey(outcome(execution, 0.0), 0.0)
    machine.obey(Seal(), 0.0)
    assert controller.groups()[0].trained_tokens == 2 * 4 + 3 * 3 * 4
    assert (len(show(run.root, 70).calls), len(show(run.root, 70, attempt=0).calls)) == (2, 5)
    assert show(run.root, 70, attempt=0).record.superseded
    assert sorted(controller.sealed()) == list(MEMBERS)


def test_an_evaluation_is_sealed_and_forgotten(run: RunLayout, log: CallLog) -> None:
    machine, controller = processor(run)
    write_calls(log, 5)
    machine.obey(outcome(5, 1.0, group=None), 0.0)
    machine.obey(Seal(), 0.0)
    assert controller.sealed() == [5]
    assert show(run.root, 5).record.group is None
    assert machine._closed == {} and controller.groups() == []


def test_settled_executions_are_sealed_by_age_without_being_asked(run: RunLayout, log: CallLog) -> None:
    machine, controller = processor(run)
    write_calls(log, 5)
    machine.obey(outcome(5, 1.0, group=None), 0.0)
    machine.advance(1.0)
    assert controller.sealed() == []
    machine.advance(62.0)
    assert controller.sealed() == [5]


# ---- the real process over a real link ---------------------------------------------------------------------------


async def next_of(link: PeerLink, kind: type[M]) -> M:
    while not isinstance(message := await link.receive(), kind):
        assert message is not None, f"the link ended before {kind.__name__}"
    return message


async def test_the_process_publishes_micro_steps_seals_and_ends_cleanly(run: RunLayout, log: CallLog) -> None:
    save_run_config(RunConfig(name="test", seed=5, model=ModelConfig(path="unused")), run.root)
    secret = write_secret(run)
    server = LinkServer(secret, 1, "127.0.0.1")
    host, port = await server.start()
    write_rendezvous(run, host, port, 1)
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gyre_hpc.controller.processor", "--run", str(run.root), "--incarnation", "1000"
    )
    try:
        async with asyncio.timeout(120):
            exited, accepted = asyncio.create_task(child.wait()), asyncio.create_task(server.accept())
            await asyncio.wait((exited, accepted), return_when=asyncio.FIRST_COMPLETED)
            assert not exited.done()
            link = await accepted
            assert link.hello.kind is PeerKind.PROCESSOR
            link.send(expect())
            for number, execution in enumerate(MEMBERS):
                write_calls(log, execution)
                link.send(outcome(execution, float(number)))
            report = await next_of(link, GroupProcessed)
            assert report.valid == 4
            for ref in report.micro_steps:
                arrays = await pull(ref.manifest, deadline_s=30, secret=secret)
                step = MicroStep.from_arrays(ref.id, ref.group, arrays)
                assert (step.tokens, step.targets) == (ref.tokens, ref.targets)
            link.send(Shutdown("done"))
            assert (await next_of(link, ShardSealed)).executions == MEMBERS
            assert (await next_of(link, Goodbye)).error == ""
            assert await exited == 0
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
        await server.close()
    assert len(read_manifest(run)) == 1 and verify(run.root).ok
