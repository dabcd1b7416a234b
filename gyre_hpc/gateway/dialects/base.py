"""What a dialect is: request bytes in, answer bytes or server-sent events out, refusals in its own words.

Dialects are pure and hold no state but `AnswerStream`, the grammar of one streamed answer: `open` once, `beat` (and, where
parts leave as they are complete, `progress`) while the generation runs, `finish` once. Everything that can be refused raises `Refusal` before the first byte.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from gyre_hpc.gateway.canonical import History, Request, ToolForm, read_json, storable
from gyre_hpc.gateway.rendering import ParsedAnswer
from gyre_hpc.records import FinishReason

T = TypeVar("T")


class RefusalKind(enum.StrEnum):
    """Why a request is not served."""

    INVALID = "invalid"
    TOO_LONG = "too_long"
    TOO_LARGE = "too_large"
    """More bytes than a body may have."""
    SLOW = "slow"
    """The body did not arrive in time."""
    BUDGET = "budget"
    NOT_FOUND = "not_found"
    OVERLOADED = "overloaded"


class Refusal(Exception):
    """A request that gets an error answer and leaves no record. `tokens`/`limit` are set for TOO_LONG."""

    def __init__(self, kind: RefusalKind, message: str, *, tokens: int = 0, limit: int = 0) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.tokens = tokens
        self.limit = limit


class Reply(msgspec.Struct, frozen=True):
    """A finished answer, in no vendor's words."""

    call: str
    model: str
    created: int
    answer: ParsedAnswer
    finish: FinishReason
    stop_sequence: str | None
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    forms: Mapping[str, ToolForm] = {}


class AnswerStream(Protocol):
    """One streamed answer."""

    def open(self) -> bytes:
        """Events that start the answer; usage is known."""

    def beat(self) -> bytes:
        """Events that this vendor's harnesses count as life."""

    def progress(self, reply: Reply) -> bytes:
        """Events of the parts of `reply.answer`, all complete, that were not sent yet; b"" if there are none."""

    def finish(self, reply: Reply) -> bytes:
        """All remaining events, the end event included. Raises parts.Contradiction."""


class Dialect(Protocol):
    """One vendor's wire format."""

    name: str

    def read(self, body: bytes, history: History) -> Request:
        """Canonical form of a request. Raises Refusal."""

    def stream(self, request: Request, call: str, created: int, prompt_tokens: int) -> AnswerStream:
        """The grammar of one streamed answer."""

    def answer(self, reply: Reply) -> bytes:
        """The body of an answer that is not streamed."""

    def error(self, refusal: Refusal) -> tuple[int, bytes]:
        """HTTP status and body."""


def invalid(message: str) -> Refusal:
    """A request the vendor would not take either, or one we cannot serve."""
    return Refusal(RefusalKind.INVALID, message)


def decode_body(body: bytes, kind: type[T]) -> T:
    """The typed outline of a request body. Raises Refusal naming the field at fault."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise invalid(f"request body: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        try:
            return msgspec.json.decode(msgspec.json.encode(read_json(body)), type=kind)
        except (ValueError, OverflowError, RecursionError):
            raise invalid(f"request body: {error}") from error


def decode_message(raw: msgspec.Raw) -> dict[str, Any]:
    """One message object. Raises Refusal."""
    try:
        message = read_json(raw)
    except ValueError as error:
        raise invalid(f"messages: {error}") from error
    if not isinstance(message, dict):
        raise invalid("messages: each message must be an object")
    return message


def read_wishes(outline: msgspec.Struct, names: Sequence[str]) -> dict[str, Any]:
    """The raw fields `names` that are there, decoded, fit for the call log. Raises Refusal naming the field."""
    wishes: dict[str, Any] = {}
    for name in names:
        if raw := getattr(outline, name):
            try:
                wishes[name] = storable(read_json(raw))
            except ValueError as error:
                raise invalid(f"{name}: {error}") from error
    return wishes


def text_field(holder: Mapping[str, Any], name: str, where: str = "messages") -> str:
    """A field that is a string, or absent. Raises Refusal."""
    value = holder.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise invalid(f"{where}: {name} must be a string")
    return value


def list_field(holder: Mapping[str, Any], name: str, where: str = "messages") -> list[Any]:
    """A field that is a list, or absent. Raises Refusal."""
    value = holder.get(name)
    if not isinstance(value or [], list):
        raise invalid(f"{where}: {name} must be a list")
    return value or []


def block_kind(block: Any) -> str:
    """The `type` of a content block. Raises Refusal when it has none."""
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        raise invalid("messages: a content block must be an object with a type")
    return kind
