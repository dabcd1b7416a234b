"""Which earlier call an identical request gets the answer of, if any. Pure; one `Repeats` per execution.

Law: a repeat attaches to a call only if that one is undelivered and its client is gone, oldest first; else it is a
sibling. Clients of identical requests that all lose their connection find as many calls as they left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gyre_hpc.gateway.calls import Call


class Repeats:
    """The calls of an execution that may still be attached to, by the digest of their request."""

    def __init__(self) -> None:
        self._calls: dict[bytes, list[Call]] = {}

    def add(self, call: Call) -> None:
        self._calls.setdefault(call.request, []).append(call)

    def attachable(self, request: bytes) -> Call | None:
        """The oldest call with this request whose client is gone and whose answer is still to be had."""
        return next((call for call in self._calls.get(request, ()) if call.attachable), None)

    def forget(self, call: Call) -> None:
        """Nobody attaches to this call any more."""
        left = [other for other in self._calls.pop(call.request, ()) if other is not call]
        if left:
            self._calls[call.request] = left
