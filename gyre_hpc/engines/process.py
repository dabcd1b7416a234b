"""The engine as a child process of whoever starts it (the cell leader): start, wait until healthy, poll, stop.

The child dies with the thread that started it (PR_SET_PDEATHSIG), so start it from a thread that lives as long as the
cell. Its token is handed over on its stdin, so that neither argv nor environment nor a file shows it. Its output goes
to the log file, whose end is quoted when it fails to start. Only this child is ever signalled.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from gyre_hpc.config import EngineConfig
from gyre_hpc.engines.client import EngineClient
from gyre_hpc.engines.weights import Array, weights_digest
from gyre_hpc.engines.wire import EncodedIds, ExportAnswer
from gyre_hpc.errors import ConfigError, GyreError
from gyre_hpc.kv.page_store import PageStore
from gyre_hpc.records import Version

POLL_S = 0.05
"""Interval of looking for the child's port file."""
STOP_GRACE_S = 5.0
"""Seconds between SIGINT and SIGKILL."""
KILLED_S = 30.0
"""Seconds in which a killed engine must be gone; one that the kernel holds (a GPU or a file system that hangs) is given up."""


class EngineStartFailed(GyreError):
    """The engine ended, or did not serve in time; the message quotes its log."""


@dataclass
class EngineProcess:
    """One engine. `start` may be called again after the process has ended."""

    config: EngineConfig
    model_path: Path
    version: Version
    log_path: Path
    max_context: int
    seed: int = 0
    host: str = "127.0.0.1"
    token: str = field(default="", repr=False)
    """Bearer token its clients must send; "" = everyone is served."""
    kv_store: Path | None = None
    """Folder of the cell's host store of KV pages; None = pages stay in the engine."""
    _process: asyncio.subprocess.Process | None = None

    KIND: ClassVar[str] = "torch"
    OWN_GROUP: ClassVar[bool] = False
    """Whether it starts processes of its own and therefore leads a process group."""

    async def start(self) -> str:
        """Start, wait until it serves, return its base URL. Raises EngineStartFailed, ConfigError."""
        if self.config.kind != self.KIND:
            raise ConfigError(
                f"engine.kind={self.config.kind} cannot be started", fix=f"set engine.kind={self.KIND}"
            )
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="gyre-engine-") as folder, self.log_path.open("ab") as log:
            port_file = Path(folder) / "port"
            stdin = asyncio.subprocess.PIPE if self.token else asyncio.subprocess.DEVNULL
            self._process = await asyncio.create_subprocess_exec(
                *self._command(port_file),
                stdin=stdin,
                stdout=log,
                stderr=log,
                env=self._environment(),
                process_group=0 if self.OWN_GROUP else None,
            )
            try:
                self._hand_over_token(self._process)
                async with asyncio.timeout(self.config.start_timeout_s):
                    while not port_file.is_file():
                        self._raise_if_ended()
                        await asyncio.sleep(POLL_S)
            except BaseException as error:
                await self.stop()
                if isinstance(error, TimeoutError):
                    raise self._failure(f"did not serve within {self.config.start_timeout_s:.0f} s") from None
                raise
            host, port = port_file.read_text().split()
        return f"http://{host}:{port}"

    def _command(self, port_file: Path) -> list[str]:
        config = self.config
        options = {
            "--model": self.model_path,
            "--host": self.host,
            "--port-file": port_file,
            "--page-tokens": config.page_tokens,
            "--pool-tokens": config.pool_tokens,
            "--capacity": config.capacity,
            "--max-context": self.max_context,
            "--threads": config.threads,
            "--tokens-per-s": config.tokens_per_s,
            "--seed": self.seed,
            "--weight-version": self.version,
            "--parent": os.getpid(),
        }
        flags = [text for name, value in options.items() for text in (name, str(value))]
        if self.kv_store is not None:
            flags += ["--kv-store", str(self.kv_store), "--kv-store-mib", str(config.kv_store_mib)]
        if self.token:
            flags.append("--api-key-stdin")
        return [sys.executable, "-m", "gyre_hpc.engines.torch.server", *flags]

    def _environment(self) -> dict[str, str] | None:
        """Its environment; None = ours."""
        return None

    def expected_checksum(self, arrays: Mapping[str, Array]) -> str:
        """What the engine's `checksum` answers when it serves exactly these weights."""
        return weights_digest(arrays)

    async def export(
        self, client: EngineClient, store: PageStore, ids: EncodedIds, kv_key: str, lease_s: float
    ) -> ExportAnswer:
        """Have `store`, that of `kv_store`, keep the full KV pages of `ids`. Raises EngineUnreachable, EngineRefused."""
        return await client.export(ids, kv_key, lease_s)

    async def declared_bytes(self, client: EngineClient) -> int:
        """Host memory that the engine says it would give back; 0 = it says nothing."""
        return sum((await client.server_info()).memory.values())

    def _hand_over_token(self, process: asyncio.subprocess.Process) -> None:
        """Write the token, which fits a pipe's buffer, and close; a child that ended already is met by the caller."""
        if process.stdin is not None:
            process.stdin.write(self.token.encode())
            process.stdin.close()

    def poll(self) -> int | None:
        """Exit code, or None while it runs (or was never started)."""
        return self._process.returncode if self._process is not None else None

    @property
    def pid(self) -> int | None:
        """Process id, None if never started."""
        return self._process.pid if self._process is not None else None

    async def wait(self) -> int:
        """Exit code, once it has ended."""
        if self._process is None:
            raise EngineStartFailed("engine was never started", fix="call start first")
        return await self._process.wait()

    async def stop(self) -> None:
        """End it: SIGINT (SIGTERM may come from Slurm to all of the step), then SIGKILL after a grace."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
            try:
                await asyncio.wait_for(process.wait(), STOP_GRACE_S)
            except TimeoutError:
                process.kill()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), KILLED_S)

    def _raise_if_ended(self) -> None:
        code = self.poll()
        if code is not None:
            raise self._failure(f"ended with code {code}")

    def _failure(self, what: str) -> EngineStartFailed:
        tail = self.log_path.read_text(errors="replace")[-2000:]
        return EngineStartFailed(
            f"engine of {self.model_path} {what}; end of {self.log_path}:\n{tail}", fix="see the log"
        )
