"""The part of NIXL that regions need, typed: memory made readable for others, and one-sided reads of theirs.

One agent per process, with the UCX plugin alone (the wheel also lists LIBFABRIC, which needs libraries it does not bring).
It has no progress thread, which would poll a CPU all the time: the reader polls while it reads, and the other side must
`progress` meanwhile. Methods may be called from any thread. Wheel: nixl-cu12 (works without CUDA and without torch).
"""

from __future__ import annotations

import ipaddress
import logging
import os
import threading
import time
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

import numpy as np

from gyre_hpc.transport.backend import WayFailed
from gyre_hpc.transport.region_files import Buffer

WHEELS: Final = ("nixl_cu12", "nixl_cu13")
INSTALL: Final = "pip install --no-deps nixl-cu12==1.5.1"
"""Without its dependencies: it declares torch, which regions do not need."""
POLL_S: Final = 50e-6
"""Seconds between two looks at a read under way."""
PIECE: Final = 1 << 30
"""Largest single descriptor: what an InfiniBand message may surely be."""


@dataclass
class Memory:
    """Registered memory; `buffer` must stay as it is until `Agent.forget`."""

    buffer: Buffer
    address: int
    bytes: int
    handle: Any


def installed() -> bool:
    """Whether a wheel is there; nothing is loaded."""
    return any(find_spec(wheel) for wheel in WHEELS)


class Agent:
    """This process to NIXL. Raises WayFailed where the library cannot be had or does not start."""

    def __init__(self, name: str, host: str) -> None:
        wheel = next((wheel for wheel in WHEELS if find_spec(wheel)), "")
        if not wheel:
            raise WayFailed("NIXL is not installed", fix=INSTALL)
        if ipaddress.ip_address(host).is_loopback:
            os.environ.setdefault("UCX_NET_DEVICES", "lo")
        api, bindings = _load(f"{wheel}._api"), import_module(f"{wheel}._bindings")
        kinds = (item for item in vars(bindings).values() if isinstance(item, type))
        self._errors: tuple[type[Exception], ...] = (
            RuntimeError,
            *(kind for kind in kinds if issubclass(kind, Exception)),
        )
        settings = api.nixl_agent_config(
            enable_prog_thread=False,
            backends=["UCX"],
            sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        try:
            self._agent = api.nixl_agent(name, settings)
        except self._errors as error:
            raise WayFailed(f"NIXL does not start: {type(error).__name__} {error}") from error
        if "UCX" not in self._agent.backends:
            raise WayFailed("this NIXL has no UCX plugin", fix=INSTALL)
        self._kept: list[object] = []

    def register(self, buffer: Buffer) -> Memory:
        """Make all of a buffer, of at least one byte, readable and writable for transfers."""
        view = np.frombuffer(buffer, np.uint8)
        address = view.ctypes.data
        try:
            handle = self._agent.register_memory([(address, len(view), 0, "")], "DRAM", ["UCX"])
        except self._errors as error:
            raise WayFailed(f"memory of {len(view)} bytes is not registered: {_said(error)}") from error
        return Memory(buffer, address, len(view), handle)

    def forget(self, memory: Memory) -> None:
        """Undo `register`."""
        try:
            self._agent.deregister_memory(memory.handle, ["UCX"])
        except self._errors as error:
            self._kept.append(memory)
            raise WayFailed(f"memory stays registered: {_said(error)}") from error

    def card(self, memory: Memory) -> bytes:
        """What another agent must know to read this memory: a capability, to be told only to those who may."""
        return bytes(self._agent.get_partial_agent_metadata(memory.handle, True, ["UCX"]))

    def progress(self) -> None:
        """Answer what the network asks of this side: the set-up of connections, and reads without hardware support."""
        try:
            self._agent.get_new_notifs(["UCX"])
        except self._errors as error:
            raise WayFailed(_said(error)) from error

    def read(self, card: bytes, address: int, memory: Memory, deadline: float, stop: threading.Event) -> None:
        """Fill `memory` from `address` at the agent of `card`. Raises WayFailed, or TimeoutError at `deadline`.

        `stop` ends it early. One read at a time from one other agent: at its end that agent is forgotten.
        """
        try:
            peer = self._agent.add_remote_agent(card)
            try:
                self._transfer(peer, address, memory, deadline, stop)
            finally:
                self._agent.remove_remote_agent(peer)
        except self._errors as error:
            raise WayFailed(f"the read failed: {_said(error)}") from error

    def _transfer(
        self, peer: str, address: int, memory: Memory, deadline: float, stop: threading.Event
    ) -> None:
        handle = self._agent.initialize_xfer(
            "READ", self._pieces(memory.address, memory.bytes), self._pieces(address, memory.bytes), peer
        )
        try:
            state = self._agent.transfer(handle)
            while state == "PROC":
                if stop.wait(POLL_S):
                    raise WayFailed("the read was given up")
                if time.monotonic() > deadline:
                    raise TimeoutError("the read did not end in time")
                state = self._agent.check_xfer_state(handle)
            if state != "DONE":
                raise WayFailed("the read failed")
        finally:
            self._release(handle, memory)

    def _release(self, handle: Any, memory: Memory) -> None:
        """A read that cannot be aborted may still write: its memory then stays for the life of the process."""
        try:
            handle.release()
        except self._errors:
            self._kept.append((handle, memory))

    def _pieces(self, address: int, total: int) -> Any:
        pieces = [(address + at, min(PIECE, total - at), 0) for at in range(0, total, PIECE)]
        return self._agent.get_xfer_descs(pieces, "DRAM")


def _load(name: str) -> ModuleType:
    """The module; it sends its log to standard output and silences errors of logging, which is undone."""
    errors = logging.raiseExceptions
    module = import_module(name)
    logging.raiseExceptions = errors
    logger = logging.getLogger("nixl")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.WARNING)
    return module


def _said(error: Exception) -> str:
    return f"{type(error).__name__} {error}"
