"""`run`: one scripted task through a real gateway by a real harness; findings.judge says what it shows.

The harness comes from its packages, runs in the workspace sandbox with a scrubbed environment and a private HOME, and
has no network but the gateway (a namespace of its own where the machine allows it). Only the engine is a fake:
script.ScriptedEngine.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gyre_hpc import models
from gyre_hpc.config import GatewayConfig, RunConfig
from gyre_hpc.executions.forkserver import LaunchSpec
from gyre_hpc.executions.harness import find_harness
from gyre_hpc.executions.launcher import Launcher, LaunchFailed
from gyre_hpc.executions.sandbox import choose
from gyre_hpc.gateway.lineage import Mismatch
from gyre_hpc.gateway.rendering import Rendering
from gyre_hpc.harnesses import script
from gyre_hpc.harnesses.room import Room
from gyre_hpc.harnesses.stand import MAX_CONTEXT, MODEL, Seen, Stand
from gyre_hpc.records import CallRecord

KEEPALIVE_S = 1.0
"""So that a silence of seconds holds several keep-alives."""


@dataclass(frozen=True)
class Trial:
    """What is asked of the harness: the silence in the middle of the first answer, and how long all may take."""

    silence_s: float = 5.0
    timeout_s: float = 300.0
    keepalive_s: float = KEEPALIVE_S
    max_context: int = MAX_CONTEXT
    """Tokens of prompt and answer that the gateway serves."""


@dataclass(frozen=True)
class Outcome:
    """What a run left behind. `exit_code` None: ended by force. `network`: why it had more than the gateway, or ""."""

    exit_code: int | None
    wall_s: float
    output: str
    workspace: Path
    requests: list[Seen]
    records: list[CallRecord]
    forks: dict[Mismatch, int]
    engine: script.ScriptedEngine
    network: str


def scripted(config: RunConfig, trial: Trial) -> script.ScriptedEngine:
    """The engine of a check."""
    rendering = Rendering(models.resolve(MODEL), "qwen3", thinking=False)
    return script.ScriptedEngine(rendering, trial.silence_s, config.harness.done_command)


async def run(
    config: RunConfig, folder: Path, trial: Trial, engine: script.ScriptedEngine | None = None
) -> Outcome:
    """One run in `folder` (empty), by default of the check's own script. Raises GyreError if the harness cannot start."""
    engine = engine or scripted(config, trial)
    settings = GatewayConfig(
        keepalive_s=trial.keepalive_s,
        max_output_tokens=config.gateway.max_output_tokens,
        engine_silence_s=2 * trial.timeout_s,  # there is no other engine to move to
    )
    async with launching() as (launcher, listening, network):
        stand = await Stand.start(folder, engine, listening, settings, config.harness, trial.max_context)
        try:
            spec, workspace = await prepared(config, folder, launcher, stand.url)
            log = folder / "harness.log"
            code, wall_s = await ended(launcher, spec, log, trial.timeout_s)
            output = log.read_text(errors="replace")
            return Outcome(
                code,
                wall_s,
                output,
                workspace,
                stand.requests,
                await stand.records(),
                stand.forks(),
                engine,
                network,
            )
        finally:
            await stand.stop()


@asynccontextmanager
async def launching() -> AsyncIterator[tuple[Launcher, socket.socket | None, str]]:
    """A launcher without network where possible, the socket its programs see, and why it has one otherwise."""
    launcher, listening, network = Launcher(), None, ""
    try:
        launcher = room = Room()
        listening = room.listening
    except LaunchFailed as error:
        network = error.message
    try:
        yield launcher, listening, network
    finally:
        await launcher.close()


async def prepared(config: RunConfig, folder: Path, launcher: Launcher, url: str) -> tuple[LaunchSpec, Path]:
    """What to launch so that the harness does the scripted task under `url`, and its workspace."""
    workspace, home = folder / "workspace", folder / "home"
    workspace.mkdir()
    home.mkdir()
    harness = find_harness(config.harness)
    sandbox = await choose(config.tasks.sandbox, True, folder, config.tasks.readonly, launcher)
    call = harness.fill(
        base_url=url, workspace=sandbox.seen(workspace), instruction=script.INSTRUCTION, seed=0
    )
    call.write_files(home)
    spec = sandbox.command(call.argv, workspace=workspace, home=home, readonly=harness.readonly, env=call.env)
    return spec, workspace


async def ended(
    launcher: Launcher, spec: LaunchSpec, log: Path, timeout_s: float
) -> tuple[int | None, float]:
    """(exit code, seconds); None when it had to be ended."""
    begun = time.monotonic()
    process = await launcher.launch(spec, log, log)
    try:
        async with asyncio.timeout(timeout_s):
            return await process.wait(), time.monotonic() - begun
    except TimeoutError:
        return None, time.monotonic() - begun
    finally:
        process.end()
        with suppress(LaunchFailed):
            await process.wait()
