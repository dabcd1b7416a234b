"""The runner process: `python -m gyre_hpc.executions.runner --run RUN --incarnation K`.

Takes orders from the controller over its link and works them off with `Attempts`. It ends on Shutdown, on a signal (`notice`), or when
its controller has been gone for `cluster.orphan_grace_s`; one resumed in that time (a higher epoch) is told first which
attempts are held, then again what was reported of them. Without a controller the harness clocks stand still: nobody passes
on what the gateway holds. However the runner ends, its programs end with it: their channels close.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from pathlib import Path

from gyre_hpc.config import RunConfig, load_run_config
from gyre_hpc.errors import GyreError, PeerLost
from gyre_hpc.executions.attempts import Attempts, Services
from gyre_hpc.executions.evaluation import Evaluator
from gyre_hpc.executions.harness import find_harness
from gyre_hpc.executions.launcher import Launcher
from gyre_hpc.executions.sandbox import choose
from gyre_hpc.executions.tasks import task_source
from gyre_hpc.launch.elsewhere.services import record_service
from gyre_hpc.launch.incarnations import epoch_of
from gyre_hpc.launch.nodes.scratch import process_scratch
from gyre_hpc.launch.nodes.watchdog import outlive
from gyre_hpc.layout import RunLayout
from gyre_hpc.transport.hosts import node_name, whereabouts
from gyre_hpc.transport.links import Link
from gyre_hpc.transport.messages import (
    AssessExecution,
    CancelExecution,
    ForgetExecution,
    Goodbye,
    HeldBack,
    Hello,
    Holding,
    Message,
    PeerKind,
    Shutdown,
    StartExecution,
)
from gyre_hpc.transport.notice import heed_signals
from gyre_hpc.transport.succession import first_wait, orphan_grace, until_succession

log = logging.getLogger(__name__)


class Runner:
    """One link at a time, one table of attempts."""

    def __init__(self, config: RunConfig, layout: RunLayout, incarnation: int) -> None:
        self._config = config
        self._layout = layout
        self._incarnation = incarnation
        self.link: Link | None = None
        self._attempts: Attempts | None = None
        self._epoch = -1
        """Of the last controller."""

    async def run(self) -> None:
        """Serve until told to stop. Raises GyreError when the node lacks something or the controller is gone."""
        launcher = Launcher()
        error = ""
        try:
            services = await self._prepared(launcher)
            self._attempts = Attempts(services, self._send)
            await self._serve(self._attempts)
        except GyreError as fault:
            error = str(fault)
            raise
        finally:
            await launcher.close()
            if self.link is not None:
                self.link.send(Goodbye(error))
                await self.link.close()

    def signalled(self) -> None:
        """SIGTERM came to all processes of this step."""
        if self._attempts is not None:
            self._attempts.signalled()

    async def _prepared(self, launcher: Launcher) -> Services:
        """Services and link. What this node lacks is said over the link as well, as the reason of the Goodbye."""
        wait_s = first_wait(self._config.cluster)
        try:
            services = await prepare(self._config, self._layout, launcher)
        except GyreError:
            await self._connect(wait_s)
            raise
        await self._connect(wait_s)
        return services

    async def _serve(self, attempts: Attempts) -> None:
        grace_s = orphan_grace(self._config.cluster)
        try:
            while True:
                assert self.link is not None
                self._greet(attempts, self.link)
                async with until_succession(self.link, self._layout):
                    while (message := await self.link.receive()) is not None:
                        if isinstance(message, Shutdown):
                            return
                        _obey(attempts, message)
                log.warning("the controller is gone; programs go on for %g s", grace_s)
                attempts.orphaned()
                self._incarnation += 1
                await self._connect(grace_s)
                attempts.adopted()
        finally:
            await attempts.close()

    def _greet(self, attempts: Attempts, link: Link) -> None:
        """Say what is held, if this is another controller than before; then what was reported, for it may have been lost."""
        if link.epoch != self._epoch:
            link.send(Holding(attempts.held()))
            self._epoch = link.epoch
        attempts.repeat_reports()

    async def _connect(self, timeout_s: float) -> None:
        hello = Hello(PeerKind.RUNNER, 0, os.getpid(), node_name(), "")
        self.link = await Link.connect(
            self._layout,
            hello,
            self._incarnation,
            heartbeat_s=self._config.transport.heartbeat_s,
            timeout_s=timeout_s,
        )

    def _send(self, message: Message) -> None:
        assert self.link is not None
        self.link.send(message)


def _obey(attempts: Attempts, message: Message) -> None:
    match message:
        case StartExecution():
            attempts.start(message)
        case CancelExecution():
            attempts.cancel(message)
        case AssessExecution():
            attempts.assess(message)
        case ForgetExecution():
            attempts.forget(message)
        case HeldBack():
            attempts.held_back(message)
        case _:
            log.warning("the runner has no use for %s", type(message).__name__)


async def prepare(config: RunConfig, layout: RunLayout, launcher: Launcher) -> Services:
    """Everything an execution needs of this node. Raises MissingInput or ConfigError naming what is not there."""
    tasks = config.tasks
    source = task_source(tasks)
    harness = find_harness(config.harness)
    sandbox = await choose(tasks.sandbox, config.trust_tasks, layout.root, tasks.readonly, launcher)
    evaluator = Evaluator(
        launcher, sandbox, tasks.evaluator_timeout_s, tasks.evaluator_retries, tasks.evaluators
    )
    return Services(config, layout, launcher, sandbox, harness, source, evaluator)


def check(config: RunConfig, layout: RunLayout) -> None:
    """Raise what a runner on this node would raise at its start; for commands that want to say so at once."""

    async def ask() -> None:
        launcher = Launcher()
        try:
            await prepare(config, layout, launcher)
        finally:
            await launcher.close()

    asyncio.run(ask())


async def serve(run: Path, incarnation: int) -> None:
    """The life of the process; a signal (`transport.notice`) ends it as Shutdown does."""
    config = load_run_config(run)
    record_service(RunLayout(run.resolve()), PeerKind.RUNNER, incarnation)
    runner = Runner(config, RunLayout(run.resolve()), incarnation)
    work = asyncio.create_task(runner.run())

    def end() -> None:
        work.cancel()

    heed_signals(config.cluster, lambda: runner.link, end, runner.signalled)
    await asyncio.wait([work])
    if not work.cancelled():
        work.result()


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 after Shutdown or a signal, else that of the error."""
    parser = argparse.ArgumentParser(prog="python -m gyre_hpc.executions.runner", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="run folder")
    parser.add_argument("--incarnation", type=int, required=True, help="number of this runner within the run")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    log.info("runner %s", whereabouts())
    try:
        with process_scratch(arguments.run, "runner-0"):
            asyncio.run(serve(arguments.run, arguments.incarnation))
    except PeerLost as error:
        log.error("%s", error)
        cluster = load_run_config(arguments.run).cluster
        epoch = epoch_of(arguments.incarnation)
        outlive(RunLayout(arguments.run.resolve()), cluster, epoch, waited_s=cluster.orphan_grace_s)
        return error.exit_code
    except GyreError as error:
        log.error("%s", error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
