"""Canonical conversation: what a request says once the accidents of a vendor's wire format are gone.

Harnesses move cache marks, flip strings and blocks, re-order and re-type tool arguments, trim or drop reasoning. A
`Turn` is free of that; the digest of a request's message is computed from its turns and leaves out what an echo of OUR
answer may change: reasoning always, arguments where our handles name the call. The mark beside it keeps what tells
siblings of equal text apart: the calls that handles name, else the reasoning. A message sent before costs one lookup by
the hash of its raw bytes. Pure; used by dialects (write) and lineage (read).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
import xxhash

V = TypeVar("V")

DIGEST_BYTES = 16
HANDLE_CHARS = 128
"""More than a handle of ours has; what clients send as ids may be of any length, and is not kept."""
CALL_PATTERN = r"e\d+a\d+c\d+"
_TOOL_HANDLE = re.compile(rf"(?:toolu|call|msg|rs|fc|ctc)_({CALL_PATTERN})_\d+")
_SIGNATURE_HANDLE = re.compile(rf"(?:keep|call):({CALL_PATTERN})")
_SURROGATE = re.compile("[\ud800-\udfff]")


def call_id(execution: int, attempt: int, ordinal: int) -> str:
    """Unique in the run, and fit for every vendor's id syntax."""
    return f"e{execution}a{attempt}c{ordinal}"


def tool_handle(prefix: str, call: str, index: int) -> str:
    """Id of the call's tool call or item number `index` in a dialect (prefix `toolu`, `call`, `msg`, `rs`, `fc`, `ctc`)."""
    return f"{prefix}_{call}_{index}"


def signature_handle(call: str) -> str:
    """Signature of a thinking block that belongs to the answer."""
    return f"call:{call}"


def keepalive_handle(call: str) -> str:
    """Signature of the thinking block that only kept the connection alive."""
    return f"keep:{call}"


def handle_call(text: str) -> str | None:
    """The call that minted a tool id or signature, None for somebody else's."""
    return _minted(text) if len(text) <= HANDLE_CHARS else None


@lru_cache(maxsize=4096)
def _minted(text: str) -> str | None:
    match = _TOOL_HANDLE.fullmatch(text) or _SIGNATURE_HANDLE.fullmatch(text)
    return match.group(1) if match else None


class EchoedCall(msgspec.Struct, frozen=True):
    """A tool call inside an assistant turn of the history. `arguments` is JSON text as given."""

    id: str
    name: str
    arguments: str


class Turn(msgspec.Struct, frozen=True):
    """One message in canonical form. `signatures` are thinking handles found in it."""

    role: str
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[EchoedCall, ...] = ()
    tool_call_id: str = ""
    signatures: tuple[str, ...] = ()

    @property
    def calls(self) -> frozenset[str]:
        """Our calls whose handles this turn echoes."""
        handles = (*(call.id for call in self.tool_calls), *self.signatures)
        return frozenset(call for handle in handles if (call := handle_call(handle)))

    def message(self) -> dict[str, Any]:
        """The shape a renderer takes."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        return message

    def identity(self) -> tuple[Any, ...]:
        """What two echoes of the same turn have in common."""
        if self.role != "assistant":
            return (self.role, self.content, self.tool_call_id)
        calls = [
            call.id if handle_call(call.id) else (call.name, canonical_arguments(call.arguments))
            for call in self.tool_calls
        ]
        return ("assistant", normal_text(self.content), calls)


class ToolForm(msgspec.Struct, frozen=True):
    """How a tool is called in a dialect with several ways: as a custom (freeform) tool or a function, under which name."""

    custom: bool
    namespace: str
    name: str


Reader = Callable[[msgspec.Raw], tuple[Turn, ...]]
"""A dialect's reading of one raw message."""


class Unit(msgspec.Struct, frozen=True):
    """One message of a request: its digest, the digest with its mark, and the turn when it is the assistant's.

    The mark tells an echo from one of a sibling that reads the same. `calls` as in the turn.
    """

    digest: bytes
    marked: bytes
    assistant: Turn | None
    calls: frozenset[str]


@dataclass
class Request:
    """A generation request in canonical form. `units` and `raws` run in parallel."""

    dialect: str
    model: str
    units: list[Unit]
    raws: list[msgspec.Raw]
    read: Reader
    tools: tuple[dict[str, Any], ...]
    tools_digest: bytes
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    constrained: bool = False
    wishes: dict[str, Any] = field(default_factory=dict)
    forms: Mapping[str, ToolForm] = field(default_factory=dict)
    """How the answer must write calls, by the name the policy knows; plain functions where it is empty."""
    _joined: bytes = b""
    fresh: dict[int, tuple[Turn, ...]] = field(default_factory=dict)
    """Turns of the messages that this execution had not sent before, by index."""

    def messages(self, start: int, end: int) -> list[dict[str, Any]]:
        """Messages `start` to `end` as a renderer takes them."""
        found: list[dict[str, Any]] = []
        for index in range(start, end):
            turns = self.fresh.get(index) or self.read(self.raws[index])
            found += [turn.message() for turn in turns]
        return found

    def prefix(self, count: int) -> bytes:
        """Digest of the tools and the first `count` messages, marks included."""
        return bytes(xxhash.xxh3_128_digest(self._marked()[: DIGEST_BYTES * (count + 1)]))

    def between(self, start: int, end: int) -> bytes:
        """Digest of messages `start` to `end`, marks included."""
        marked = self._marked()[DIGEST_BYTES * (start + 1) : DIGEST_BYTES * (end + 1)]
        return bytes(xxhash.xxh3_128_digest(marked))

    def _marked(self) -> bytes:
        if not self._joined:
            self._joined = b"".join([self.tools_digest, *(unit.marked for unit in self.units)])
        return self._joined


Owner = tuple[bool, str | None]
"""Whether an item is part of an assistant turn, and the call that minted it."""


@dataclass
class History:
    """What one execution has sent before, by the hash of its raw bytes. Lives as long as the execution."""

    units: dict[bytes, Unit] = field(default_factory=dict)
    tools: dict[bytes, tuple[tuple[dict[str, Any], ...], bytes]] = field(default_factory=dict)
    forms: dict[bytes, dict[str, ToolForm]] = field(default_factory=dict)
    owners: dict[bytes, Owner] = field(default_factory=dict)
    """Where a dialect spreads an answer over several items: what each item belongs to."""

    def sizes(self) -> tuple[int, ...]:
        """What `cut` goes back to."""
        return tuple(map(len, self._kept()))

    def cut(self, sizes: tuple[int, ...]) -> None:
        """Forget what came after `sizes`: a request that was refused has not been sent."""
        for kept, size in zip(self._kept(), sizes, strict=True):
            cut_back(kept, size)

    def _kept(self) -> tuple[dict[bytes, Any], ...]:
        return self.units, self.tools, self.forms, self.owners

    def read(
        self, raws: Sequence[msgspec.Raw], read: Reader
    ) -> tuple[list[Unit], dict[int, tuple[Turn, ...]]]:
        """Units of all messages, and the turns of those not sent before by index."""
        keys = list(map(xxhash.xxh3_128_digest, raws))
        found = list(map(self.units.get, keys))
        fresh: dict[int, tuple[Turn, ...]] = {}
        units: list[Unit] = found  # type: ignore[assignment]
        for index in range(len(raws)):
            if found[index] is None:
                turns = fresh[index] = read(raws[index])
                units[index] = self.units[keys[index]] = _unit(turns)
        return units, fresh


def cut_back(entries: dict[bytes, V], size: int) -> list[V]:
    """Take out the entries that came after the first `size`, newest first."""
    return [entries.popitem()[1] for _ in range(len(entries) - size)]


def _unit(turns: tuple[Turn, ...]) -> Unit:
    assistant = turns[0] if len(turns) == 1 and turns[0].role == "assistant" else None
    plain = digest([turn.identity() for turn in turns])
    if assistant is None:
        return Unit(plain, plain, None, frozenset())
    calls = assistant.calls
    mark = ",".join(sorted(calls)).encode() or reasoning_mark(assistant.reasoning)
    return Unit(plain, digest([plain, mark]) if mark else plain, assistant, calls)


def digest(value: Any) -> bytes:
    """128-bit digest of a plain value."""
    try:
        encoded = msgspec.msgpack.encode(value)
    except OverflowError:
        encoded = msgspec.msgpack.encode(_within_64_bits(value))
    return bytes(xxhash.xxh3_128_digest(encoded))


def normal_text(text: str) -> str:
    """Text as compared between what we sent and what comes back."""
    return text.replace("\r\n", "\n").strip()


def reasoning_mark(text: str) -> bytes:
    """Digest of a reasoning as compared between what we sent and what comes back; b"" for none."""
    normal = normal_text(text)
    return digest(normal) if normal else b""


def canonical_arguments(text: str) -> str:
    """Arguments compared as values: key order, spacing and number forms do not matter. Text that is no JSON stays."""
    try:
        return json.dumps(_canonical_value(json.loads(text or "{}")), sort_keys=True)
    except ValueError:
        return text


def _canonical_value(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _canonical_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_canonical_value(item) for item in value]
    return value


def read_json(raw: msgspec.Raw | bytes) -> Any:
    """Decode JSON; lone surrogates (a harness that cuts text in UTF-16) become U+FFFD. Raises ValueError."""
    try:
        try:
            return msgspec.json.decode(raw)
        except msgspec.DecodeError:
            return _without_surrogates(json.loads(bytes(raw)))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def storable(value: Any) -> Any:
    """The value, numbers of more than 64 bits as floats: MessagePack has no others."""
    try:
        msgspec.msgpack.encode(value)
    except OverflowError:
        return _within_64_bits(value)
    return value


def _within_64_bits(value: Any) -> Any:
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return float(min(max(value, -(2**1023)), 2**1023))
    if isinstance(value, dict):
        return {key: _within_64_bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_within_64_bits(item) for item in value]
    return value


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    return value


def joined_text(parts: Sequence[str]) -> str:
    """Text blocks of one message as one text; empty blocks vanish."""
    return "\n".join(part for part in parts if part)
