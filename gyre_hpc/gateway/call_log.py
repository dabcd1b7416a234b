"""The call log: every model call of a gateway process, on disk before any of its answers leaves.

`CallLog` appends, at the latest at the next turn of the event loop, and groups fsyncs: what a killed process had appended
before that turn survives it, what a lost host had appended survives up to `fsync_s`. When space runs out frames wait in
memory, `check` raises StorageFull, no answer leaves, and writing goes on as soon as there is room: nothing is lost. No answer
leaves behind any other error either; `keep_synced` raises it.
`CallLogReader` tails one log and gives each call once, when its fate is known: delivered complete, echoed later, or its
execution sealed. `read_call_log` reads a whole log.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gyre_hpc.errors import CorruptRecord, StorageFull
from gyre_hpc.gateway.frames import (
    FORMAT,
    MAGIC,
    AttemptOpened,
    AttemptSealed,
    BudgetExhausted,
    CallOpened,
    Frame,
    LogOpened,
    decode_frames,
    decode_int32,
    encode_frame,
)
from gyre_hpc.gateway.logged_call import LoggedCall
from gyre_hpc.layout import RunLayout
from gyre_hpc.records import CallRecord, Delivery, ExecutionId

log = logging.getLogger(__name__)

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
READ_BYTES = 64 << 20
"""Most bytes taken from a log at once."""
RETRY_S = 1.0
"""Seconds between two attempts to write when the disk is full."""


def call_log_path(layout: RunLayout, launch: int) -> Path:
    """The log of the gateway process that was launched as incarnation `launch`."""
    return layout.calls / f"gateway-{launch:06d}.log"


def call_logs(layout: RunLayout) -> list[Path]:
    """All logs of a run, oldest process first."""
    return sorted(layout.calls.glob("gateway-*.log"), key=lambda path: (len(path.name), path.name))


class CallLog:
    """The writer. One per file; opening an existing file cuts its torn tail off and goes on behind it."""

    def __init__(
        self,
        path: Path,
        incarnation: int,
        *,
        end: int | None = None,
        write: Callable[[int, bytes], int] = os.write,
    ) -> None:
        """`end` is where the whole frames of an existing file end, when the caller has read them."""
        self.path = path
        self._write = write
        self._pending = bytearray()
        self._written = asyncio.Event()
        self._written.set()
        self._synced = True
        self._turn: asyncio.Handle | None = None
        self._syncing = asyncio.Lock()
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        size = _end_of_good_frames(path) if end is None else end
        os.ftruncate(self._handle, size)
        os.lseek(self._handle, size, os.SEEK_SET)
        if size == 0:
            self._pending += MAGIC
        self.append(LogOpened(FORMAT, incarnation, os.getpid(), time.time()))

    def append(self, frame: Frame) -> None:
        """Write a frame; on a full disk it waits in memory and `check` raises."""
        self._pending += encode_frame(frame)
        self._flush()

    def append_soon(self, frame: Frame) -> None:
        """As `append`, but the frames of one turn of the event loop are written together."""
        self._pending += encode_frame(frame)
        if self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        try:
            while self._pending:
                count = self._write(self._handle, bytes(self._pending))
                del self._pending[:count]
                self._synced = False
        except OSError as error:
            unheard = self._written.is_set()
            self._written.clear()
            if error.errno not in _FULL:
                raise
            if unheard:
                log.error("%s", self._full_error())
            return
        self._written.set()

    def _full_error(self) -> StorageFull:
        return StorageFull(
            f"{self.path}: no space left for the call log ({len(self._pending)} bytes wait in memory; calls are refused)",
            fix="free space or raise the quota: the gateway goes on by itself",
        )

    def check(self) -> None:
        """Raises StorageFull while frames wait for room."""
        if self._pending:
            self._flush()
        if self._pending:
            raise self._full_error()

    async def written(self) -> None:
        """Returns once all frames are in the file: an answer leaves behind this."""
        await self._written.wait()

    async def sync(self) -> None:
        """Make everything appended durable."""
        self._flush()
        await self.written()
        async with self._syncing:
            if not self._synced:
                self._synced = True
                await asyncio.to_thread(os.fsync, self._handle)

    async def keep_synced(self, fsync_s: float) -> None:
        """Group fsync, for ever; also retries what a full disk refused."""
        while True:
            await asyncio.sleep(fsync_s if self._written.is_set() else RETRY_S)
            self._flush()
            if self._written.is_set():
                await self.sync()

    def close(self) -> None:
        """Write what is left, make it durable, close. Raises StorageFull."""
        self.check()
        os.fsync(self._handle)
        os.close(self._handle)


def check_call_log(path: Path) -> None:
    """Read all frames. Raises CorruptRecord naming file and offset; a torn tail is sound."""
    _end_of_good_frames(path)


def _end_of_good_frames(path: Path) -> int:
    """Bytes up to the torn tail. Raises CorruptRecord."""
    size = path.stat().st_size
    if size < len(MAGIC):
        return 0
    at = len(MAGIC)
    with path.open("rb") as file:
        _check_magic(path, file.read(len(MAGIC)))
        while chunk := _read(file.fileno(), at, READ_BYTES, size):
            before = at
            for _, used in decode_frames(chunk, path, before, final=before + len(chunk) == size):
                at = before + used
            if at == before:
                break
    return at


def _check_magic(path: Path, magic: bytes) -> None:
    if magic != MAGIC:
        raise CorruptRecord(
            f"{path}: not a call log (byte 0)", fix="move the file out of the run's calls folder"
        )


def _read(handle: int, at: int, count: int, size: int) -> bytes:
    """Up to `count` bytes at `at`, enlarged until a whole frame fits."""
    data = os.pread(handle, count, at)
    if len(data) == count:
        need = int.from_bytes(data[:4], "little") + 12
        if need > count and need <= size - at:
            data = os.pread(handle, need, at)
    return data


@dataclass(frozen=True)
class ExecutionEnd:
    """All records of the attempt have been given. `calls` counts generations begun for it."""

    execution: ExecutionId
    attempt: int
    calls: int


class CallLogReader:
    """Tails one log. Memory of an execution is freed at its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.executions: dict[tuple[int, int], dict[str, LoggedCall]] = {}
        self.keys: dict[tuple[int, int], str] = {}
        self.sealed: list[AttemptSealed] = []
        self.exhausted: set[tuple[int, int]] = set()
        """Attempts whose budget is used up."""
        self.offset = 0
        """Where the frames that were read end."""
        self._calls: dict[str, LoggedCall] = {}

    def poll(self) -> list[CallRecord | ExecutionEnd]:
        """What has become final since the last poll. Raises CorruptRecord."""
        return list(self.follow())

    def follow(self) -> Iterator[CallRecord | ExecutionEnd]:
        """As `poll`, one item at a time: a record holds its whole prompt, so nobody should hold many of them."""
        for item in self._final():
            yield item.record() if isinstance(item, LoggedCall) else item

    def read_on(self) -> None:
        """Take the frames that are there; what becomes final is not given to anybody. Raises CorruptRecord."""
        for _ in self._final():
            pass

    def _final(self) -> Iterator[LoggedCall | ExecutionEnd]:
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            size = os.fstat(file.fileno()).st_size
            if self.offset == 0 and size >= len(MAGIC):
                _check_magic(self.path, file.read(len(MAGIC)))
                self.offset = len(MAGIC)
            while self.offset and (data := _read(file.fileno(), self.offset, READ_BYTES, size)):
                before = self.offset
                for frame, end in decode_frames(data, self.path, before, final=before + len(data) >= size):
                    self.offset = before + end
                    yield from self._apply(frame, before)
                if self.offset == before:
                    return

    def _apply(self, frame: Frame, offset: int) -> Iterator[LoggedCall | ExecutionEnd]:
        match frame:
            case LogOpened():
                return
            case AttemptOpened():
                self.keys[frame.execution, frame.attempt] = frame.key
                self.executions.setdefault((frame.execution, frame.attempt), {})
                return
            case CallOpened():
                call = LoggedCall(frame, self._base(frame, offset), decode_int32(frame.delta))
                self._calls[frame.call] = call
                self.executions.setdefault((frame.execution, frame.attempt), {})[frame.call] = call
                return
            case AttemptSealed():
                yield from self._end(frame)
                return
            case BudgetExhausted():
                self.exhausted.add((frame.execution, frame.attempt))
                return
            case _:
                known = self._calls.get(frame.call)
                if known is None:
                    return
                known.apply(frame)
                if (
                    not known.given
                    and known.finished
                    and (known.accepted or known.delivery is Delivery.COMPLETE)
                ):
                    known.given = True
                    yield known

    def _base(self, frame: CallOpened, offset: int) -> LoggedCall | None:
        base = self._calls.get(frame.base)
        if frame.base and base is None:
            raise CorruptRecord(
                f"{self.path}: call {frame.call} (read from byte {offset} on) builds on call {frame.base}, which is"
                " not in the log",
                fix="move the file away and resume the run",
            )
        return base

    def _end(self, frame: AttemptSealed) -> Iterator[LoggedCall | ExecutionEnd]:
        for name, call in self.executions.pop((frame.execution, frame.attempt), {}).items():
            del self._calls[name]
            if not call.given:
                yield call
        self.keys.pop((frame.execution, frame.attempt), None)
        self.exhausted.discard((frame.execution, frame.attempt))
        self.sealed.append(frame)
        yield ExecutionEnd(ExecutionId(frame.execution), frame.attempt, frame.calls)


def read_call_log(path: Path) -> list[CallRecord]:
    """All calls of a log; those of executions that were never sealed are given as they stand."""
    reader = CallLogReader(path)
    records = [item for item in reader.follow() if isinstance(item, CallRecord)]
    for calls in reader.executions.values():
        records += [call.record() for call in calls.values() if not call.given]
    return sorted(records, key=lambda record: (record.execution, record.attempt, record.ordinal))
