"""The processor: `python -m gyre_hpc.controller.processor --run RUN --incarnation K`.

Tails the call logs, joins the recorded calls with the outcomes the controller sends, publishes the micro-steps of a group
as soon as every execution of it is decided, and seals closed attempts into shards. Everything it makes follows from the
call logs, the shards and the controller's messages, so a restarted processor that is told the same groups and outcomes
publishes the same micro-steps; an attempt in the manifest is never sealed again. It ends with its link: two processors
must not write shards at the same time, and what was not sealed is still in the logs.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from gyre_hpc.config import RunConfig, load_run_config
from gyre_hpc.config_cluster import ClusterConfig
from gyre_hpc.errors import CorruptRecord, GyreError
from gyre_hpc.launch.address import settle_host
from gyre_hpc.launch.nodes.scratch import process_scratch
from gyre_hpc.launch.nodes.watchdog import outlive
from gyre_hpc.layout import RunLayout
from gyre_hpc.records import ClosingReason, ExecutionId, GroupId
from gyre_hpc.shards.encode import Derivation, ExecutionRecord, decode
from gyre_hpc.shards.reader import find_tables
from gyre_hpc.shards.writer import ShardWriter
from gyre_hpc.trajectories.call_book import AttemptId, CallBook
from gyre_hpc.trajectories.micro_steps import MicroStep
from gyre_hpc.trajectories.process import Attempt, ProcessedGroup, Settings, process_group
from gyre_hpc.trajectories.tree import build_tree
from gyre_hpc.transport.backends import region_server
from gyre_hpc.transport.hosts import node_name, whereabouts
from gyre_hpc.transport.links import Link, read_secret
from gyre_hpc.transport.messages import (
    DropGroup,
    ExecutionOutcome,
    ExpectGroup,
    Goodbye,
    GroupProcessed,
    Hello,
    Manifest,
    Message,
    MicroStepRef,
    PeerKind,
    RegionKind,
    Seal,
    ShardSealed,
    Shutdown,
)
from gyre_hpc.transport.notice import heed_signals

log = logging.getLogger(__name__)

POLL_S = 0.1
"""Seconds between two looks at the call logs."""
RECORDS_S = 60.0
"""Seconds an outcome waits for the end of its records in the log; then its records count as incomplete."""
MICRO_STEP_LAYOUT = "micro-step/1"


@dataclass
class Closed:
    """An execution whose outcome is known. `record` is set once its records are all there (or given up)."""

    outcome: ExecutionOutcome
    since: float
    record: ExecutionRecord | None = None

    @property
    def excluded(self) -> bool:
        """Known not to count, whatever its records say."""
        assessment = self.outcome.assessment
        return assessment is None or not assessment.valid or self.outcome.incomplete

    @property
    def decided(self) -> bool:
        return self.record is not None or self.excluded

    def attempt(self) -> Attempt:
        """What the group's advantages and micro-steps are made from."""
        tree = build_tree(self.record.strands) if self.record is not None else None
        score = self.record.reward if self.record is not None else None
        return Attempt(self.outcome.execution, score, self._cause(), tree)

    def _cause(self) -> str:
        if self.outcome.incomplete or (self.record is not None and self.record.incomplete):
            return "incomplete records"
        if self.record is not None and not self.record.lawful:
            return str(ClosingReason.TOKEN_LAW)
        return "invalid assessment" if self.outcome.assessment is not None else str(self.outcome.reason)


@dataclass
class Expected:
    """A dispatched group; `processed` once it was reported."""

    expect: ExpectGroup
    processed: GroupProcessed | None = None


class Processor:
    """The state. `publish(micro_step, version)` makes a region, `drop` frees it, `send` goes to the controller."""

    def __init__(
        self,
        layout: RunLayout,
        config: RunConfig,
        publish: Callable[[MicroStep, int], Manifest],
        drop: Callable[[Manifest], None],
        send: Callable[[Message], None],
    ) -> None:
        self._layout = layout
        self._settings = Settings.of(config)
        derivation = Derivation(self._settings.seed, self._settings.j_max)
        self._writer = ShardWriter(layout, config.name, derivation)
        self._publish, self._drop, self._send = publish, drop, send
        self._book = CallBook(layout, self._writer.sealed)
        self._groups: dict[GroupId, Expected] = {}
        self._closed: dict[ExecutionId, Closed] = {}

    def obey(self, message: Message, now: float) -> None:
        """Take one message of the controller. `now` is monotonic seconds."""
        match message:
            case ExpectGroup():
                self._expect(message)
            case ExecutionOutcome():
                known = self._closed.get(message.execution)
                if known is None or known.outcome.attempt != message.attempt:
                    self._closed[message.execution] = Closed(message, now)
            case DropGroup(group=group):
                self._drop_group(group)
            case Seal():
                self.advance(now)
                self.seal()
            case _:
                log.warning("the processor has no use for %s", type(message).__name__)

    def advance(self, now: float, *, last: bool = False) -> None:
        """Read the logs on, settle outcomes, report groups, seal what is due.

        `last`: nothing comes any more, so an excluded execution is taken with what is recorded of it.
        """
        self._book.read()
        for closed in list(self._closed.values()):
            self._settle(closed, now, last=last)
        for expected in self._groups.values():
            if expected.processed is None and self._is_decided(expected):
                self._process(expected)
        self._forget()
        if self._writer.due(now):
            self.seal()

    def seal(self) -> None:
        """Put settled attempts at rest. Raises StorageFull."""
        line = self._writer.seal()
        if line is not None:
            closed = tuple(sealed.execution for sealed in line.executions if not sealed.superseded)
            log.info("sealed %s: %d attempts, %d bytes", line.file, len(line.executions), line.bytes)
            self._send(ShardSealed(line.file, closed))

    # ---- records ------------------------------------------------------------------------------------------------

    def _settle(self, closed: Closed, now: float, *, last: bool) -> None:
        """Fix the record of an execution and hand it to the writer, once its calls are all there or given up."""
        if closed.record is not None:
            return
        outcome = closed.outcome
        key = (outcome.execution, outcome.attempt)
        if self._writer.sealed(*key) and not self._book.holds(key):
            closed.record = self._at_rest(key)
            return
        complete = self._book.complete(key)
        given_up = outcome.incomplete or self._book.damaged(key) or (last and closed.excluded)
        if not complete and not given_up and now - closed.since < RECORDS_S:
            return
        if not complete and not closed.excluded:
            log.error("execution %d attempt %d: its records are damaged or do not end", *key)
        incomplete = outcome.incomplete or not (complete or closed.excluded)
        closed.record = self._record(outcome, incomplete=incomplete)
        for other in self._book.earlier(key):
            self._writer.add(self._superseded(closed.record, other), now)
            self._book.forget(other)
        self._writer.add(closed.record, now)

    def _record(self, outcome: ExecutionOutcome, *, incomplete: bool) -> ExecutionRecord:
        return ExecutionRecord(
            execution=outcome.execution,
            attempt=outcome.attempt,
            group=outcome.group,
            query=outcome.query,
            reason=outcome.reason,
            wall_s=outcome.wall_s,
            incomplete=incomplete,
            superseded=False,
            assessment=outcome.assessment,
            strands=self._book.strands((outcome.execution, outcome.attempt)),
        )

    def _superseded(self, record: ExecutionRecord, key: AttemptId) -> ExecutionRecord:
        """An earlier attempt, ended by the death of a controller or job: kept, never trained."""
        return replace(
            record,
            attempt=key[1],
            reason=None,
            wall_s=0.0,
            incomplete=True,
            superseded=True,
            assessment=None,
            strands=self._book.strands(key),
        )

    def _at_rest(self, key: AttemptId) -> ExecutionRecord:
        """An attempt sealed by an earlier processor of this run, or by this one before its group was asked for again."""
        self.seal()
        tables = find_tables(self._layout.root, *key)
        if tables is None:
            raise CorruptRecord(
                f"{self._layout.manifest}: attempt {key[1]} of execution {key[0]} has vanished from it",
                fix="run gyre shards verify, then resume the run",
            )
        return decode(tables)

    # ---- groups -------------------------------------------------------------------------------------------------

    def _expect(self, message: ExpectGroup) -> None:
        expected = self._groups.setdefault(message.group, Expected(message))
        if expected.processed is not None:
            self._send(expected.processed)

    def _is_decided(self, expected: Expected) -> bool:
        closed = [self._closed.get(execution) for execution in expected.expect.executions]
        return all(item is not None and item.decided for item in closed)

    def _process(self, expected: Expected) -> None:
        expect = expected.expect
        attempts = [self._closed[execution].attempt() for execution in expect.executions]
        processed = process_group(expect.group, attempts, self._settings)
        refs = tuple(
            MicroStepRef(
                id=step.id,
                group=expect.group,
                version=expect.version,
                tokens=step.tokens,
                targets=step.targets,
                manifest=self._publish(step, expect.version),
            )
            for step in processed.micro_steps
        )
        expected.processed = _report(processed, refs)
        self._send(expected.processed)

    def _drop_group(self, group: GroupId) -> None:
        expected = self._groups.pop(group, None)
        if expected is not None and expected.processed is not None:
            for ref in expected.processed.micro_steps:
                self._drop(ref.manifest)

    def _forget(self) -> None:
        """Free executions that are with the writer and that no expected group needs."""
        for id, closed in list(self._closed.items()):
            if closed.record is not None and closed.outcome.group not in self._groups:
                del self._closed[id]
                self._book.forget((id, closed.outcome.attempt))


def _report(processed: ProcessedGroup, refs: tuple[MicroStepRef, ...]) -> GroupProcessed:
    return GroupProcessed(
        group=processed.group,
        valid=processed.valid,
        rewards=processed.rewards,
        micro_steps=refs,
        trained_tokens=processed.trained_tokens,
        paths=processed.paths,
        paths_cut=processed.paths_cut,
        reason=processed.reason,
    )


# ---- the process ------------------------------------------------------------------------------------------------


async def serve(run: Path, incarnation: int) -> int | None:
    """The life of the process: until Shutdown, a signal, or the end of the link, whose epoch is returned."""
    layout, config = RunLayout(run.resolve()), load_run_config(run)
    settle_host(config.cluster, layout)
    secret = read_secret(layout)
    regions = region_server(config, "processor", secret)
    await regions.start()
    hello = Hello(PeerKind.PROCESSOR, 0, os.getpid(), node_name(), "")
    link = await Link.connect(
        layout,
        hello,
        incarnation,
        heartbeat_s=config.transport.heartbeat_s,
        timeout_s=config.cluster.start_timeout_s,
    )

    def publish(step: MicroStep, version: int) -> Manifest:
        return regions.publish(RegionKind.MICRO_STEPS, step.id, version, MICRO_STEP_LAYOUT, step.to_arrays())

    error = ""
    try:
        processor = Processor(layout, config, publish, regions.drop, link.send)
        orphaned = await _work(link, processor, config.cluster)
    except GyreError as fault:
        error = str(fault)
        raise
    finally:
        link.send(Goodbye(error))
        await link.close()
        regions.close()
    return link.epoch if orphaned else None


async def _work(link: Link, processor: Processor, cluster: ClusterConfig) -> bool:
    """Messages as they come, the logs every POLL_S, a last shard at an orderly end. Whether the link broke."""
    inbox: asyncio.Queue[Message | None] = asyncio.Queue()

    async def pump() -> None:
        while (message := await link.receive()) is not None:
            inbox.put_nowait(message)
        inbox.put_nowait(None)

    def stop() -> None:
        inbox.put_nowait(Shutdown("signal"))

    heed_signals(cluster, lambda: link, stop)
    receiving = asyncio.create_task(pump())
    try:
        while True:
            try:
                message = await asyncio.wait_for(inbox.get(), POLL_S)
            except TimeoutError:
                processor.advance(time.monotonic())
                continue
            if message is None:
                log.warning("the controller is gone; unsealed records stay in the call logs")
                return True
            if isinstance(message, Shutdown):
                processor.advance(time.monotonic(), last=True)
                processor.seal()
                return False
            processor.obey(message, time.monotonic())
            if inbox.empty():
                processor.advance(time.monotonic())
    finally:
        receiving.cancel()


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 after Shutdown, a signal or the end of the link, else that of the error."""
    parser = argparse.ArgumentParser(prog="python -m gyre_hpc.controller.processor", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="run folder")
    parser.add_argument(
        "--incarnation", type=int, required=True, help="number of this processor within the run"
    )
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    log.info("processor %s", whereabouts())
    try:
        with process_scratch(arguments.run, "processor-0"):
            orphaned = asyncio.run(serve(arguments.run, arguments.incarnation))
        if orphaned is not None:
            outlive(RunLayout(arguments.run.resolve()), load_run_config(arguments.run).cluster, orphaned)
    except GyreError as error:
        log.error("%s", error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
