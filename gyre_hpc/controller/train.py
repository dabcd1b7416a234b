"""`gyre train`: prepare or re-open a run folder, own it, run its controller, leave summary and report behind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from gyre_hpc import models
from gyre_hpc.config import RunConfig, load_run_config, save_run_config
from gyre_hpc.controller.context import RunContext
from gyre_hpc.controller.controller import Controller
from gyre_hpc.controller.ending.departure import Departure
from gyre_hpc.controller.freeze import freeze_code
from gyre_hpc.controller.journal.history import History, read_history
from gyre_hpc.controller.journal.journal import Journal
from gyre_hpc.controller.monitor.progress import Progress
from gyre_hpc.controller.peers.adoption import expect_survivors
from gyre_hpc.controller.peers.peers import Peers
from gyre_hpc.errors import GyreError, Interrupted, MissingInput, StorageFull
from gyre_hpc.executions import runner
from gyre_hpc.files import LogFile
from gyre_hpc.gateway.call_log import call_logs, check_call_log
from gyre_hpc.launch.address import settle_host
from gyre_hpc.launch.choice import make_launcher, may_find_leftovers, tidy_nodes
from gyre_hpc.launch.doctor.transport_choice import check_transport, choose_transport
from gyre_hpc.launch.job.broadcast import broadcast
from gyre_hpc.launch.nodes import scratch
from gyre_hpc.launch.owner import acquire, release
from gyre_hpc.layout import RunLayout
from gyre_hpc.report.metrics import MetricsWriter
from gyre_hpc.schedule.settings import Settings, settings_from
from gyre_hpc.transport.hosts import whereabouts
from gyre_hpc.transport.links import LinkServer, write_rendezvous, write_secret

log = logging.getLogger(__name__)


def new_run(config: RunConfig) -> RunLayout:
    """Make the folder of a fresh run with everything it needs to be resumed anywhere."""
    source = models.configured(config)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    layout = RunLayout(unused(Path(config.root).absolute() / f"{config.name}-{stamp}"))
    layout.root.mkdir(parents=True)
    layout.create()
    save_run_config(config, layout.root)
    shutil.copytree(source, layout.model)
    freeze_code(layout.root)
    return layout


def unused(path: Path) -> Path:
    """`path`, or `path-2`, ... when two runs start in the same second."""
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def schedule_settings(config: RunConfig) -> Settings:
    """Settings of the schedule for this run."""
    heldout = config.tasks.heldout > 0
    capacities = (config.engine.capacity,) * config.cluster.cells
    return settings_from(
        config.schedule,
        capacities,
        evaluate_first=heldout,
        evaluate_last=heldout,
        standalone=config.cluster.standalone,
    )


def train(config: RunConfig, finish: Callable[[RunLayout], object]) -> None:
    """Run to the end and `finish`. Raises the taxonomy's errors; the run folder stays resumable.

    After Ctrl-C or SIGTERM the newest version is on disk and the run is finished as far as it came; then Interrupted. A job
    that ends before its run is handed back: HandedBack, or NoProgress (`controller.departure`).
    """
    resumed = bool(config.resume)
    if resumed:
        layout = RunLayout(Path(config.resume).absolute())
        if not layout.config.is_file():
            raise MissingInput(
                f"{layout.config}: no such file", fix="resume=RUN names a folder made by gyre train"
            )
        force = config.resume_force
        config = load_run_config(layout.root)
    else:
        layout, force = new_run(config), False
    _check_node(config, layout, fresh=not resumed)
    owner = acquire(layout.root, force=force)
    if config.cluster.kind == "slurm":
        signal.signal(
            signal.SIGUSR2, signal.SIG_IGN
        )  # until the loop listens; the controller has a clock of its own
    with logged_to(layout.logs(owner.epoch)):
        log.info("controller %s", whereabouts())
        for path in call_logs(layout):
            check_call_log(path)
        with resumable(layout.root, "gyre submit" if config.cluster.kind == "slurm" else "gyre train"):
            left = asyncio.run(_control(config, layout, owner.epoch))
        release(layout.root, owner)
        if left is not None:
            left.hand_back()
    finish(layout)
    if left is not None and left.ending is not None:
        again = "gyre submit" if config.cluster.kind == "slurm" else "gyre train"
        raise Interrupted(
            f"{layout.root}: interrupted by {left.ending}; nothing finished is lost",
            fix=f"go on with: {again} resume={layout.root}",
            signal=signal.Signals[left.ending.signal],
        )


def _check_node(config: RunConfig, layout: RunLayout, *, fresh: bool) -> None:
    """What the runner would miss is said before anything starts, and leaves no folder behind."""
    try:
        runner.check(config, layout)
        check_transport(config)
    except GyreError:
        if fresh:
            shutil.rmtree(layout.root, ignore_errors=True)
        raise


@contextlib.contextmanager
def resumable(run: Path, command: str) -> Iterator[None]:
    """Whatever file of the run had no room: the error says with which command to go on once there is some."""
    try:
        yield
    except StorageFull as error:
        again = f"{command} resume={run}"
        raise StorageFull(error.message, fix=f"{error.fix}; then: {again}" if error.fix else again) from error


@contextlib.contextmanager
def logged_to(folder: Path) -> Iterator[None]:
    """Log into `controller.log` of this attempt; a sweep has one file per run."""
    folder.mkdir(parents=True, exist_ok=True)
    handler = LogFile(folder / "controller.log")
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()


async def _control(config: RunConfig, layout: RunLayout, epoch: int) -> Departure | None:
    """Run the controller; how it left, if that was before the run's end."""
    history: History = read_history(layout.journal, schedule_settings(config))
    secret = write_secret(layout)
    settle_host(config.cluster)
    server = LinkServer(secret, epoch, config.cluster.host)
    host, port = await server.start()
    write_rendezvous(layout, host, port, epoch)
    progress = Progress(config.schedule.steps)
    progress.note(f"run folder: {layout.root}")
    transport = choose_transport(config, layout)
    log.info("%s", transport)
    progress.note(transport)
    context = RunContext(
        config=config,
        layout=layout,
        secret=secret,
        epoch=epoch,
        journal=Journal(layout.journal, epoch),
        metrics=MetricsWriter(layout.metrics),
        progress=progress,
    )
    launcher = make_launcher(config.cluster, layout)
    if may_find_leftovers(config.cluster, epoch):
        await tidy_nodes(launcher, config, layout)
    scratch.mark_pages(config, layout)
    scratch.begin_to_remove_stale(config)
    await broadcast(launcher, config.cluster, layout)
    peers = Peers(layout.root, config.cluster, launcher, server, epoch)
    expect_survivors(peers, config, layout)
    controller = Controller(context, peers, history)
    loop = asyncio.get_running_loop()
    slurm = config.cluster.kind == "slurm"
    for number in (signal.SIGINT, signal.SIGTERM, *([signal.SIGUSR2] if slurm else [])):
        loop.add_signal_handler(number, controller.departure.signalled, signal.Signals(number).name)
    over = False
    try:
        ending = await controller.run()
        over = ending is None
        if slurm:
            _ignore(loop, signal.SIGUSR2)
        if slurm and ending is not None:
            _ignore(loop, signal.SIGTERM)
        return None if ending is None else controller.departure
    finally:
        await tidy_nodes(launcher, config, layout, over=over)


def _ignore(loop: asyncio.AbstractEventLoop, number: signal.Signals) -> None:
    """What Slurm sends late must not end a process that hands its job back, or writes its report."""
    loop.remove_signal_handler(number)
    signal.signal(number, signal.SIG_IGN)
