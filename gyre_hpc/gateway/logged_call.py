"""A model call as a call log tells it: put together frame by frame, its prompt from the calls it builds on."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import numpy as np

from gyre_hpc.engines.wire import ids_xxh3
from gyre_hpc.gateway.frames import (
    TOKEN_BYTES,
    CallAccepted,
    CallDelivered,
    CallFinished,
    CallOpened,
    CallProgress,
    LawBroken,
    TokensReceived,
    decode_float32,
    decode_int32,
)
from gyre_hpc.records import CallRecord, Delivery, ExecutionId, FinishReason, Int32, LeafRole, Version

log = logging.getLogger(__name__)


@dataclass
class LoggedCall:
    """A call as far as its frames tell. `ids`, `logprobs`, `versions` are four bytes a token, as logged."""

    opened: CallOpened
    base: LoggedCall | None
    delta: Int32
    ids: bytearray = field(default_factory=bytearray)
    logprobs: bytearray = field(default_factory=bytearray)
    versions: bytearray = field(default_factory=bytearray)
    progress: CallProgress | None = None
    finished: CallFinished | None = None
    delivery: Delivery = Delivery.NONE
    accepted: bool = False
    contradicted: bool = False
    given: bool = False
    broken: tuple[str, ...] = ()
    """How the call broke the token law while an engine sampled for it."""

    def apply(
        self,
        frame: TokensReceived | CallProgress | CallFinished | CallDelivered | CallAccepted | LawBroken,
    ) -> None:
        """Take in what one more frame of the log says of the call."""
        match frame:
            case LawBroken():
                self.broken += (frame.why,)
            case CallProgress():
                self.progress = frame
            case TokensReceived():
                self.ids += frame.ids
                self.logprobs += frame.logprobs
                each = len(frame.versions) == len(frame.ids)
                self.versions += frame.versions if each else frame.versions * (len(frame.ids) // TOKEN_BYTES)
            case CallFinished():
                self.finished = frame
            case CallDelivered():
                order = list(Delivery)
                self.delivery = max(self.delivery, frame.delivery, key=order.index)
                self.contradicted |= frame.contradicted
            case CallAccepted():
                self.accepted = True

    @property
    def length(self) -> int:
        """Prompt tokens."""
        return self.opened.shared + len(self.delta)

    def prompt(self) -> Int32:
        """Prompt ids, shape [P], put together from the calls it builds on."""
        parts, node, shared = [self.delta], self, self.opened.shared
        while node.base is not None and shared > 0:
            node = node.base
            if shared > node.length:
                parts.append(decode_int32(node.ids[: (shared - node.length) * TOKEN_BYTES]))
                shared = node.length
            if shared > node.opened.shared:
                parts.append(node.delta[: shared - node.opened.shared])
                shared = node.opened.shared
        return np.concatenate(parts[::-1])

    def output(self) -> Int32:
        """Output ids so far, shape [T]."""
        return decode_int32(self.cut(self.ids))

    def cut(self, received: bytearray) -> bytearray:
        """A copy of what belongs to the output."""
        return received[:] if self.finished is None else received[: self.finished.tokens * TOKEN_BYTES]

    def record(self) -> CallRecord:
        """The record handed to trajectories. An unfinished call reads as aborted.

        A prompt whose checksum is not that of the ids sent makes the record unlawful.
        """
        opened, finished = self.opened, self.finished
        prompt, forks = self.prompt(), self.forks
        if opened.prompt_xxh3 and opened.prompt_xxh3 != ids_xxh3(prompt):
            log.error("call %s: the log does not give the prompt that was sent", opened.call)
            forks = (*forks, "token_law")
        return CallRecord(
            call=opened.call,
            execution=ExecutionId(opened.execution),
            attempt=opened.attempt,
            ordinal=opened.ordinal,
            prompt_ids=prompt,
            output_ids=self.output(),
            logprobs=decode_float32(self.cut(self.logprobs)),
            versions=decode_int32(self.cut(self.versions)),
            finish=FinishReason(finished.finish) if finished else FinishReason.ABORT,
            delivery=self.delivery,
            accepted=self.accepted or self.delivery is Delivery.COMPLETE,
            constrained=opened.constrained,
            role_hint=LeafRole(opened.role_hint),
            started=opened.started,
            finished=finished.finished if finished else opened.started,
            held_s=finished.held_s if finished else 0.0,
            recomputed_tokens=finished.recomputed_tokens if finished else 0,
            dialect=opened.dialect,
            forks=forks,
            deliver=opened.deliver,
            kv_version=self.kv_version,
        )

    @property
    def kv_version(self) -> Version | None:
        """As CallRecord.kv_version."""
        told = self.finished or self.progress
        return Version(told.kv_version) if told is not None and told.kv_version >= 0 else None

    @property
    def forks(self) -> tuple[str, ...]:
        """As CallRecord.forks."""
        return tuple(dict.fromkeys((*self.opened.reasons, *self.broken)))
