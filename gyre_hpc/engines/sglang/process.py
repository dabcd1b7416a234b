"""An SGLang server as a child of the cell leader, and all that it starts.

SGLang runs as several processes: HTTP server, scheduler per GPU, sometimes a detokenizer. They form a process group of
their own; each dies with the one that started it (PR_SET_PDEATHSIG, theirs and ours). `stop` and `wait` end only when no
process of the group is left, so a next start meets free memory. The environment of the server shows neither our packages
nor the token: it sees this package by a link of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

import gyre_hpc
from gyre_hpc.engines.client import EngineClient
from gyre_hpc.engines.process import POLL_S, EngineProcess
from gyre_hpc.engines.sglang.arguments import SERVER, layout_seed, server_arguments, weights_dtype
from gyre_hpc.engines.sglang.cpu import write_plugin
from gyre_hpc.engines.sglang.exports import offer_of, written_through
from gyre_hpc.engines.sglang.weights_checksum import expected_checksum, require_confirmable
from gyre_hpc.engines.weights import Array
from gyre_hpc.engines.wire import EncodedIds, ExportAnswer
from gyre_hpc.kv.page_store import PageStore

GROUP_END_S: Final = 30.0
"""Seconds in which killed processes must be gone; the kernel frees a GPU's memory meanwhile."""


@dataclass
class SglangProcess(EngineProcess):
    """One server. `kv_store` None = it keeps no pages outside itself."""

    KIND: ClassVar[str] = "sglang"
    OWN_GROUP: ClassVar[bool] = True
    _modules: Path | None = None

    async def start(self) -> str:
        """Start, wait until it serves, return its base URL. Raises EngineStartFailed, ConfigError."""
        require_confirmable(self.model_path)
        await self._end_group(self.pid)
        self._forget_modules()
        self._modules = Path(tempfile.mkdtemp(prefix="gyre-sglang-"))
        (self._modules / "gyre_hpc").symlink_to(Path(gyre_hpc.__file__).parent, target_is_directory=True)
        if self.config.sglang.device == "cpu":
            write_plugin(self._modules)
        return await super().start()

    async def wait(self) -> int:
        """Exit code of the server, once it and all it started have ended."""
        group = self.pid
        code = await super().wait()
        await self._end_group(group)
        return code

    async def stop(self) -> None:
        """End it, and whatever of it is left."""
        await super().stop()
        await self._end_group(self.pid)
        self._forget_modules()

    def expected_checksum(self, arrays: Mapping[str, Array]) -> str:
        dtype = weights_dtype(self.config, self.model_path)
        return expected_checksum(arrays, self.config.sglang, self.model_path, dtype)

    async def export(
        self, client: EngineClient, store: PageStore, ids: EncodedIds, kv_key: str, lease_s: float
    ) -> ExportAnswer:
        """What the server has written through by itself; nothing of a server of several ranks, whose pages are parts."""
        seed = layout_seed(self.config, self.model_path)
        if self.config.sglang.tensor_parallel > 1:
            return offer_of(seed, self.config.page_tokens, [])
        return await written_through(store, seed, kv_key, ids, self.config.page_tokens, lease_s)

    async def declared_bytes(self, client: EngineClient) -> int:
        return 0

    def _command(self, port_file: Path) -> list[str]:
        sglang = server_arguments(
            self.config, self.model_path, self.version, self.max_context, self.seed, self.kv_store
        )
        ours = ["--port-file", str(port_file), "--host", self.host, "--parent", str(os.getpid())]
        if self.token:
            ours.append("--api-key-stdin")
        return [self.config.sglang.python or sys.executable, "-P", "-m", SERVER, *ours, "--", *sglang]

    def _environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        environment.pop("VIRTUAL_ENV", None)
        environment["PYTHONPATH"] = str(self._modules)
        environment["HF_HUB_OFFLINE"] = "1"
        if self.config.sglang.device == "cpu":
            environment |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(self.config.threads)}
        folder = Path(self.config.sglang.python or sys.executable).parent
        environment["PATH"] = f"{folder}{os.pathsep}{environment.get('PATH', '')}"
        return environment

    @staticmethod
    async def _end_group(group: int | None) -> None:
        """Kill what is left of the process group; a process that outlasts the deadline is the kernel's to end."""
        if group is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GROUP_END_S):
                while members := group_members(group):
                    for pid in members:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                    await asyncio.sleep(POLL_S)

    def _forget_modules(self) -> None:
        if self._modules is not None:
            shutil.rmtree(self._modules, ignore_errors=True)
            self._modules = None


def group_members(group: int) -> list[int]:
    """Living processes of this process group in our session; the leader counts until it has ended."""
    session, members = os.getsid(0), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # pid (name) state parent group session ...: the name may hold blanks and brackets
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if (fields[0] not in "ZX", int(fields[2]), int(fields[3])) == (True, group, session):
                    members.append(int(entry.name))
    return members
