"""Processes that outlive who started them: found again by who they are, watched and ended, never mistaken for a stranger."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from gyre_hpc.launch.elsewhere.services import read_service, record_service
from gyre_hpc.launch.elsewhere.survivor import UNKNOWN_CODE, SurvivingProcess
from gyre_hpc.launch.identity import ProcessIdentity
from gyre_hpc.layout import RunLayout
from gyre_hpc.transport.messages import PeerKind

PATIENCE_S = 60.0
STARTER = """
import asyncio, sys
from pathlib import Path
from gyre_hpc.launch.local import LocalLauncher
from gyre_hpc.launch.plan import ProcessSpec
async def main():
    spec = ProcessSpec("gateway-0", ["sleep", "600"], {}, Path(sys.argv[1]), outlives=True)
    print((await LocalLauncher().start(spec)).pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


async def orphan(tmp_path: Path) -> ProcessIdentity:
    """A process whose starter was killed."""
    starter = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STARTER, str(tmp_path / "log"), stdout=asyncio.subprocess.PIPE
    )
    assert starter.stdout is not None
    pid = int(await starter.stdout.readline())
    starter.kill()
    await starter.wait()
    return msgspec.structs.replace(
        ProcessIdentity.own(), pid=pid, process_start=psutil.Process(pid).create_time()
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_survivor_is_found_watched_and_ended(tmp_path: Path, number: signal.Signals) -> None:
    identity = await orphan(tmp_path)
    assert not identity.gone()
    process = SurvivingProcess.find("gateway-0", identity)
    assert process is not None and process.poll() is None and process.pid == identity.pid
    waiting = asyncio.create_task(process.wait())
    if number is signal.SIGTERM:
        await process.terminate(PATIENCE_S)
    else:
        process.kill()
    assert await asyncio.wait_for(waiting, PATIENCE_S) == process.poll() == UNKNOWN_CODE
    assert identity.gone() and SurvivingProcess.find("gateway-0", identity) is None
    process.kill()


async def test_a_process_with_the_same_pid_is_a_stranger() -> None:
    own = ProcessIdentity.own()
    for other in (
        msgspec.structs.replace(own, process_start=own.process_start - 60),
        msgspec.structs.replace(own, boot_id="another"),
        msgspec.structs.replace(own, host="another"),
    ):
        assert SurvivingProcess.find("gateway-0", other) is None
    assert not own.gone()


def test_the_run_folder_names_the_last_process_of_a_kind(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    assert read_service(layout, PeerKind.RUNNER) is None
    record_service(layout, PeerKind.RUNNER, 7)
    record = read_service(layout, PeerKind.RUNNER)
    assert record is not None and (record.incarnation, record.process.pid) == (7, os.getpid())
    assert not record.process.gone() and read_service(layout, PeerKind.GATEWAY) is None
    layout.service(PeerKind.RUNNER).write_text("{")
    assert read_service(layout, PeerKind.RUNNER) is None
