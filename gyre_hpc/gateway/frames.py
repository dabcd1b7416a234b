"""Frames of a call log: what is written, and how bytes become frames again.

A log is MAGIC and then frames: 12 bytes of header (payload length, CRC-32 of the payload, CRC-32 of the first eight
bytes; little-endian) and a msgpack payload. A frame that is not all there yet is a torn tail and is waited for; one
whose checksum is wrong although more follows is corruption. Ids and log-probabilities are little-endian int32/float32.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from struct import Struct, pack
from typing import Any

import msgspec
import numpy as np

from gyre_hpc.errors import CorruptRecord
from gyre_hpc.records import Delivery, Float32, Int32

MAGIC = b"GYRECALL"
FORMAT = 1
MAX_PAYLOAD = 1 << 30
TOKEN_BYTES = 4
"""An id, a log-probability, a version."""
_HEADER = Struct("<III")
HEADER_BYTES = _HEADER.size


class LogOpened(msgspec.Struct, array_like=True, tag=0, frozen=True):
    """First frame of a log, and of each worker that goes on writing it."""

    format: int
    incarnation: int
    pid: int
    time: float


class CallOpened(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """A call begins. Its prompt is the first `shared` ids of prompt + output of call `base`, then `delta`.

    `context` is the digest of the conversation, `request` of the whole request (for attaching a repeat after a restart).
    """

    call: str
    execution: int
    attempt: int
    ordinal: int
    base: str
    shared: int
    delta: bytes
    context: bytes
    request: bytes
    max_tokens: int
    stop: tuple[str, ...]
    constrained: bool
    role_hint: str
    dialect: str
    started: float
    wishes: dict[str, Any]
    reasons: tuple[str, ...]
    prompt_xxh3: str = ""
    """`engines.wire.ids_xxh3` of the whole prompt as it was sent."""
    deliver: str = "answer"
    same: tuple[str, ...] = ()
    """Values of the headers that role rules compare between calls (`roles.compared`)."""


class TokensReceived(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """Tokens appended to a call. `versions` has one int32 per token, or a single one for all."""

    call: str
    ids: bytes
    logprobs: bytes
    versions: bytes


class CallFinished(msgspec.Struct, array_like=True, tag=3, frozen=True):
    """The generation is over; the first `tokens` received ids are the output. `lost` says why it is not complete."""

    call: str
    finish: str
    tokens: int
    finished: float
    held_s: float
    recomputed_tokens: int
    reroutes: int
    lost: str
    stalls: int = 0
    pages_due: int = 0
    pages_found: int = 0
    kv_version: int = -1
    """Oldest weights that may have computed KV its tokens were sampled with; -1 = none was sampled."""
    kv_lag: int = 0
    cached_tokens: int = 0
    """Prompt tokens that had their KV before it began."""


class CallDelivered(msgspec.Struct, array_like=True, tag=4, frozen=True):
    """What a client received (none, partial, complete). The best delivery counts."""

    call: str
    delivery: Delivery
    contradicted: bool = False
    """As calls.Call: in any of the frames."""


class CallAccepted(msgspec.Struct, array_like=True, tag=5, frozen=True):
    """A later request echoed a handle of this call."""

    call: str


class AttemptSealed(msgspec.Struct, array_like=True, tag=6, frozen=True):
    """No frame of this attempt follows. `account` are the counters of calls.Account."""

    execution: int
    attempt: int
    calls: int
    account: dict[str, float | bool]


class AttemptOpened(msgspec.Struct, array_like=True, tag=7, frozen=True):
    """Calls are accepted under `key`: a restarted worker serves it without waiting for the controller."""

    execution: int
    attempt: int
    key: str


class BudgetExhausted(msgspec.Struct, array_like=True, tag=8, frozen=True):
    """A call of this attempt was refused, or cut, because its budget is used up."""

    execution: int
    attempt: int


class CallProgress(msgspec.Struct, array_like=True, tag=9, frozen=True):
    """What a call under way went through so far. The last such frame counts, and only until CallFinished."""

    call: str
    held_s: float
    recomputed_tokens: int
    reroutes: int
    stalls: int
    pages_due: int = 0
    pages_found: int = 0
    left: bool = False
    """Cut because its client had left."""
    kv_version: int = -1
    """As in CallFinished."""


class LawBroken(msgspec.Struct, array_like=True, tag=10, frozen=True):
    """The call broke the token law: `why` is one of `records.LAW_BREAKS`."""

    call: str
    why: str


Frame = (
    AttemptOpened
    | BudgetExhausted
    | CallProgress
    | LogOpened
    | CallOpened
    | TokensReceived
    | CallFinished
    | CallDelivered
    | CallAccepted
    | AttemptSealed
    | LawBroken
)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def encode_frame(frame: Frame) -> bytes:
    """Bytes of one frame."""
    payload = _encoder.encode(frame)
    head = _HEADER.pack(len(payload), zlib.crc32(payload), 0)[:8]
    return head + zlib.crc32(head).to_bytes(4, "little") + payload


def encode_int32(values: Int32 | Sequence[int]) -> bytes:
    """Little-endian bytes."""
    return (
        pack(f"<{len(values)}i", *values)
        if not isinstance(values, np.ndarray)
        else values.astype("<i4").tobytes()
    )


def decode_int32(data: bytes | bytearray) -> Int32:
    """Inverse of encode_int32, over the same memory."""
    return np.frombuffer(data, "<i4")


def encode_float32(values: list[float]) -> bytes:
    """Little-endian bytes."""
    return pack(f"<{len(values)}f", *values)


def decode_float32(data: bytes | bytearray) -> Float32:
    """Inverse of encode_float32, over the same memory."""
    return np.frombuffer(data, "<f4")


def decode_frames(data: bytes, path: Path, offset: int, *, final: bool) -> Iterator[tuple[Frame, int]]:
    """Whole frames at the start of `data` with the number of bytes consumed up to their end.

    `offset` is where `data` lies in `path`, `final` whether the file ends with it. Stops at a torn tail; raises
    CorruptRecord naming file and offset.
    """
    at = 0
    while at + HEADER_BYTES <= len(data):
        length, checksum, head_checksum = _HEADER.unpack_from(data, at)
        end = at + HEADER_BYTES + length
        if zlib.crc32(data[at : at + 8]) != head_checksum or length > MAX_PAYLOAD:
            if final and not data[at:].strip(b"\0"):
                return
            raise _corrupt(path, offset + at, "the frame header does not match its checksum")
        if end > len(data):
            return
        payload = data[at + HEADER_BYTES : end]
        if zlib.crc32(payload) != checksum:
            if final and end == len(data):
                return
            raise _corrupt(path, offset + at, "the frame does not match its checksum")
        try:
            frame = _decoder.decode(payload)
        except msgspec.DecodeError as error:
            raise _corrupt(path, offset + at, str(error)) from error
        at = end
        yield frame, at


def _corrupt(path: Path, offset: int, why: str) -> CorruptRecord:
    return CorruptRecord(
        f"{path}: corrupt call log at byte {offset}: {why}",
        fix="the executions recorded behind this byte are lost; move the file away and resume the run",
    )
