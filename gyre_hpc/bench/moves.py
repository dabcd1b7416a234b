"""What happened to calls that moved, read off the call logs of a run.

A *move* is one change of engine of a call that had sampled already: n tokens of prompt and output, of which it recomputed
what its destination did not find. A move whose next token has another weight version is a publication.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gyre_hpc.gateway.frames import (
    MAGIC,
    CallFinished,
    CallOpened,
    CallProgress,
    Frame,
    TokensReceived,
    decode_frames,
    decode_int32,
)


@dataclass(frozen=True)
class Move:
    """`tokens` of prompt and output, of which `recomputed`; seconds from the cut to the next token."""

    tokens: int
    recomputed: int
    held_s: float
    same_version: bool


@dataclass
class _Call:
    tokens: int
    version: int | None = None
    progress: tuple[float, int, int] = (0.0, 0, 0)
    """held_s, recomputed_tokens, reroutes as noted last."""
    moved: tuple[int, int, float, int | None] | None = None
    """Prompt, recomputed tokens, seconds and version before, of a move whose next token is awaited."""
    moves: list[Move] = field(default_factory=list)


class MoveReader:
    """Takes the frames of a log in order. `longest_held_s`: the longest time that one call waited for us at once."""

    def __init__(self) -> None:
        self.moves: list[Move] = []
        self.longest_held_s = 0.0
        self._calls: dict[str, _Call] = {}

    def read(self, frames: Iterable[Frame]) -> None:
        """Take these frames."""
        for frame in frames:
            match frame:
                case CallOpened():
                    self._calls[frame.call] = _Call(frame.shared + len(decode_int32(frame.delta)))
                case TokensReceived():
                    self._received(self._calls[frame.call], frame)
                case CallProgress():
                    self._progress(self._calls[frame.call], frame)
                case CallFinished():
                    self._calls.pop(frame.call, None)
                case _:
                    pass

    def _received(self, call: _Call, frame: TokensReceived) -> None:
        version = int(decode_int32(frame.versions)[0])
        if call.moved is not None:
            tokens, recomputed, held_s, before = call.moved
            self.moves.append(Move(tokens, recomputed, held_s, version == before))
            call.moved = None
        call.tokens += len(decode_int32(frame.ids))
        call.version = int(decode_int32(frame.versions)[-1])

    def _progress(self, call: _Call, frame: CallProgress) -> None:
        held_s, recomputed, _ = call.progress
        waited_s = frame.held_s - held_s
        self.longest_held_s = max(self.longest_held_s, waited_s)
        if frame.reroutes and call.version is not None and waited_s > 0:
            call.moved = (call.tokens, frame.recomputed_tokens - recomputed, waited_s, call.version)
        call.progress = (frame.held_s, frame.recomputed_tokens, frame.reroutes)


def read_moves(logs: Sequence[Path]) -> MoveReader:
    """All moves of a run. Raises CorruptRecord."""
    reader = MoveReader()
    for path in logs:
        reader.read(_frames(path))
    return reader


def _frames(path: Path) -> Iterator[Frame]:
    data = path.read_bytes()
    for frame, _ in decode_frames(data[len(MAGIC) :], path, len(MAGIC), final=True):
        yield frame
