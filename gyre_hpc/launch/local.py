"""Processes of a run as child process groups of the controller, on its own host.

Each child leads its own session and is killed by the kernel when the controller dies, unless its spec says that it outlives
that. When it ends, the rest of its group is killed while the leader's pid is still held as a zombie, so no signal can reach
a stranger.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future

from gyre_hpc.errors import MissingInput
from gyre_hpc.launch.plan import ProcessSpec, child_environment
from gyre_hpc.launch.signals import follow_parent


class LocalLauncher:
    """Starts child processes; call `start` from the main thread's event loop (see `signals`)."""

    async def start(self, spec: ProcessSpec) -> LocalProcess:
        return LocalProcess(spec.name, spawn(spec))

    async def usable(self) -> frozenset[str] | None:
        return None

    async def answers(self, node: str) -> bool:
        return True


def spawn(spec: ProcessSpec) -> subprocess.Popen[bytes]:
    """Start a child in its own session with both outputs appended to `spec.log`."""
    spec.log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with spec.log.open("ab") as log:
            return subprocess.Popen(
                list(spec.argv),
                env=child_environment(spec.env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=None if spec.outlives else follow_parent(),
            )
    except (FileNotFoundError, PermissionError) as error:
        raise MissingInput(
            f"{spec.name}: cannot run {spec.argv[0]}: {error.strerror}",
            fix="install the program or correct its path",
        ) from error


class LocalProcess:
    """A child and its process group. `on_end` runs in the reaping thread after the group is gone."""

    def __init__(
        self, name: str, process: subprocess.Popen[bytes], on_end: Callable[[], None] = lambda: None
    ) -> None:
        self._name = name
        self._process = process
        self._on_end = on_end
        self._lock = threading.Lock()
        self._reaped = False
        self._ended: Future[int] = Future()
        threading.Thread(target=self._reap, name=f"reap-{name}", daemon=True).start()

    @property
    def name(self) -> str:
        return self._name

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def nodes(self) -> tuple[str, ...]:
        return ()

    @property
    def unanswered(self) -> bool:
        return False

    def poll(self) -> int | None:
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        return await asyncio.shield(asyncio.wrap_future(self._ended))

    async def terminate(self, grace_s: float) -> None:
        self.signal(signal.SIGTERM, group=False)
        try:
            async with asyncio.timeout(grace_s):
                await self.wait()
        except TimeoutError:
            self.kill()
            await self.wait()

    def kill(self) -> None:
        self.signal(signal.SIGKILL, group=True)

    def signal(self, sig: signal.Signals, *, group: bool) -> None:
        """Send to the leader or its group; nothing once it was reaped."""
        with self._lock:
            if not self._reaped:
                with contextlib.suppress(ProcessLookupError):
                    (os.killpg if group else os.kill)(self.pid, sig)

    def _reap(self) -> None:
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        self.signal(signal.SIGKILL, group=True)
        with self._lock:
            code = self._process.wait()
            self._reaped = True
        self._on_end()
        self._ended.set_result(code)
