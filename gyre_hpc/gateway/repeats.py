"""Which earlier call an identical request gets the answer of, if any. Pure; one `Repeats` per execution.

Law: a repeat attaches to a call only if that one is undelivered and its client is gone, oldest first; else it is a
sibling. Clients of identical requests that all lose their connection find as many calls as they left.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar


class Repeatable(Protocol):
    """A call."""

    request: bytes
    """Digest."""

    @property
    def attachable(self) -> bool:
        """Whether its client is gone and its answer is still to be had."""
        ...


C = TypeVar("C", bound=Repeatable)


class Repeats(Generic[C]):
    """The calls of an execution that may still be attached to, by the digest of their request."""

    def __init__(self) -> None:
        self._calls: dict[bytes, list[C]] = {}

    def add(self, call: C) -> None:
        self._calls.setdefault(call.request, []).append(call)

    def attachable(self, request: bytes) -> C | None:
        """The oldest call with this request that is attachable."""
        return next((call for call in self._calls.get(request, ()) if call.attachable), None)

    def forget(self, call: C) -> None:
        """Nobody attaches to this call any more."""
        left = [other for other in self._calls.pop(call.request, ()) if other is not call]
        if left:
            self._calls[call.request] = left
