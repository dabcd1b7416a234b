"""One generation as the engine sees it. Its ids are its state: pages can be taken away at any time."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from gyre_hpc.engines.torch.pool import PrefixKeys


class Stage(enum.StrEnum):
    """Where a call stands."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    LIVE = "live"
    FINISHED = "finished"


class Finish(enum.StrEnum):
    """Why a call ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(eq=False)
class Call:
    """One generation. `ids` = prompt + sampled; `spans` = (version, index of its first sampled token)."""

    rid: str
    ids: list[int]
    max_new_tokens: int
    namespace: str
    stop_ids: frozenset[int] = frozenset()
    greedy: bool = False
    stage: Stage = Stage.WAITING
    finish: Finish | None = None
    prompt_tokens: int = field(init=False)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[str, int]] = field(default_factory=list)
    cached_tokens: int = 0
    retractions: int = 0
    order: int = -1
    """Rank of its first admission; -1 = never admitted."""
    keys: PrefixKeys | None = None
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    """Leading ids whose KV is on `pages`."""
    published: int = 0
    """Leading pages that are findable, or that an equal findable page made needless."""
    shares: bool = True
    """False once weights changed under its KV and older KV was flushed: its further pages fit no namespace."""

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.ids)

    @property
    def sampled(self) -> int:
        """Tokens sampled so far."""
        return len(self.ids) - self.prompt_tokens
