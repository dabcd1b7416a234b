"""The state of calls and executions while they live. Plain data: who may change it is said at each class."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from gyre_hpc.gateway.canonical import History
from gyre_hpc.gateway.frames import CallFinished
from gyre_hpc.gateway.lineage import Context, Lineage
from gyre_hpc.gateway.rendering import ParsedAnswer
from gyre_hpc.gateway.repeats import Repeats
from gyre_hpc.gateway.roles import Past
from gyre_hpc.kv.offers import Imported, Offer
from gyre_hpc.records import CellId, Delivery, FinishReason, Version

TIPS: Final = 4
"""Ends of an execution's conversations whose pages move with it: its own, and those of sub-agents at work."""


class CallLost(Exception):
    """A call that cannot be continued: no answer will ever be sent. The execution closes as infrastructure."""


@dataclass(eq=False)
class Call:
    """One generation. `sampling.Sampler` appends tokens, the app finishes it, `delivery` delivers it.

    `budget` is the most output tokens; `ids`, `logprobs`, `versions` run in parallel; `prompt` are the prompt ids.
    """

    id: str
    context: Context
    digest: bytes
    request: bytes
    budget: int
    stop: tuple[str, ...]
    started: float = field(default_factory=time.time)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)
    ending: FinishReason | None = None
    """Set by the sampler when the generation is complete."""
    stop_sequence: str | None = None
    answer: ParsedAnswer | None = None
    finish: FinishReason | None = None
    """Set when the call is over, complete or not."""
    lost: str = ""
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    reroutes: int = 0
    stalls: int = 0
    """Silences of its engine of `stall_alarm_s` and more."""
    prefilled: bool = False
    kv_version: Version | None = None
    """Oldest weights that may have computed KV its tokens were sampled with."""
    pages_cut: int = 0
    """Full pages it had when it was cut on a cell that lived, until it goes on."""
    cut_under: str = ""
    """KV namespace of these pages: under another nobody can find them again."""
    pages_due: int = 0
    """All pages it should have found where it went on: not those that other weights made void meanwhile."""
    pages_found: int = 0
    """Of these, the ones it found."""
    held_s: float = 0.0
    held_since: float | None = None
    delivery: Delivery = Delivery.NONE
    accepted: bool = False
    contradicted: bool = False
    """A client was sent in parts what is not how the answer begins."""
    clients: int = 0
    left: bool = False
    """Its client left and nobody came for it within the grace: cut at its engine, and open to a repeat that goes on with it."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    grown: asyncio.Event = field(default_factory=asyncio.Event)
    """A part of the answer may have become complete, or the call is over."""
    task: asyncio.Task[None] | None = None
    abandonment: asyncio.TimerHandle | None = None

    @property
    def kv_lag(self) -> int:
        """Versions between its newest token and the oldest KV it may have seen."""
        if self.kv_version is None or not self.versions:
            return 0
        return max(0, self.versions[-1] - self.kv_version)

    def hold(self) -> None:
        """From here on the call waits for us, not for the model."""
        if self.held_since is None:
            self.held_since = time.monotonic()

    def go_on(self) -> None:
        """The model samples (again)."""
        if self.held_since is not None:
            self.held_s += time.monotonic() - self.held_since
            self.held_since = None

    @property
    def held_so_far_s(self) -> float:
        """Seconds it waited for us, a wait under way included."""
        waiting = 0.0 if self.held_since is None else time.monotonic() - self.held_since
        return self.held_s + waiting

    def finished(self) -> CallFinished:
        """Its last frame, from now: what became of it. It has a `finish`."""
        assert self.finish is not None
        return CallFinished(
            call=self.id,
            finish=self.finish.value,
            tokens=len(self.ids),
            finished=time.time(),
            held_s=self.held_s,
            recomputed_tokens=self.recomputed_tokens,
            reroutes=self.reroutes,
            lost=self.lost,
            stalls=self.stalls,
            pages_due=self.pages_due,
            pages_found=self.pages_found,
            kv_version=-1 if self.kv_version is None else self.kv_version,
            kv_lag=self.kv_lag,
            cached_tokens=self.cached_tokens,
        )

    @property
    def left_broken(self) -> bool:
        """Contradicted, and nobody had the whole answer or went on from it since."""
        whole = self.accepted or self.delivery is Delivery.COMPLETE
        return self.contradicted and not whole

    @property
    def attachable(self) -> bool:
        """Undelivered, its client gone, and still to be had."""
        open_end = self.finish is None or self.answer is not None
        return self.clients == 0 and self.delivery is not Delivery.COMPLETE and open_end


@dataclass
class Account:
    """What ExecutionSealed reports."""

    calls: int = 0
    calls_rerouted: int = 0
    calls_lost: int = 0
    calls_unknown: int = 0
    """Of unknown role."""
    tokens_sampled: int = 0
    tokens_recomputed: int = 0
    prompt_tokens: int = 0
    held_s: float = 0.0
    budget_exhausted: bool = False
    stalls: int = 0
    law_breaks: int = 0
    pages_due: int = 0
    pages_found: int = 0
    kv_lag: int = 0
    """Most versions that a token was sampled ahead of the oldest KV it saw; 0 under kv_policy=strict."""
    tokens_on_old_kv: int = 0
    """Tokens sampled by newer weights than the oldest KV they may have seen."""
    tokens_cached: int = 0
    """Prompt tokens that had their KV before the call began."""
    calls_over_versions: int = 0
    """Calls that a publication met under way: sampled by more than one version."""

    def add(self, finished: CallFinished, versions: Sequence[int]) -> None:
        """A call is over; `versions` sampled its tokens."""
        self.calls_lost += bool(finished.lost)
        self.calls_rerouted += finished.reroutes > 0
        self.held_s += finished.held_s
        self.tokens_recomputed += finished.recomputed_tokens
        self.stalls += finished.stalls
        self.pages_due += finished.pages_due
        self.pages_found += finished.pages_found
        self.kv_lag = max(self.kv_lag, finished.kv_lag)
        if finished.kv_version >= 0:
            self.tokens_on_old_kv += sum(version > finished.kv_version for version in versions)
        self.tokens_cached += finished.cached_tokens
        self.calls_over_versions += len(set(versions)) > 1


@dataclass(frozen=True)
class Sealed:
    """An attempt that is over, sealed `at` (monotonic seconds)."""

    account: Account
    at: float = field(default_factory=time.monotonic)


@dataclass(eq=False)
class Parcel:
    """Pages that cell `source` offered. `cells`: where they are, or are on their way to."""

    offer: Offer
    source: CellId
    cells: dict[CellId, asyncio.Future[Imported]] = field(default_factory=dict)


@dataclass(eq=False)
class Execution:
    """One attempt of an execution as the gateway knows it; all of it is freed when it is sealed.

    `calls` holds what may still be attached to or accepted; `home` is the cell with its prefix pages.
    """

    id: int
    attempt: int
    lineage: Lineage
    history: History = field(default_factory=History)
    calls: dict[str, Call] = field(default_factory=dict)
    repeats: Repeats[Call] = field(default_factory=Repeats)
    home: CellId | None = None
    kv_version: Version | None = None
    """Oldest weights that have computed KV of its namespace (kv_policy=keep_execution)."""
    tips: deque[tuple[Context, list[int]]] = field(default_factory=lambda: deque(maxlen=TIPS))
    """Prompt and output of the newest complete calls, whose pages the next ones will look for."""
    parcels: deque[Parcel] = field(default_factory=lambda: deque(maxlen=2 * TIPS))
    """Pages offered when its cells left, newest last."""
    closing: bool = False
    sealed: asyncio.Event = field(default_factory=asyncio.Event)
    account: Account = field(default_factory=Account)
    past_roles: Past = field(default_factory=set)

    def offered(self, offer: Offer, source: CellId) -> None:
        """Its pages can be had from cell `source`, which has them itself. A longer offer takes the place of its beginnings."""
        for parcel in list(self.parcels):
            older = parcel.offer
            same = (older.kv_key, older.source) == (offer.kv_key, offer.source)
            if same and offer.prefixes[: len(older.prefixes)] == older.prefixes:
                self.parcels.remove(parcel)
        self.parcels.append(Parcel(offer, source))

    @property
    def held_s(self) -> float:
        """Seconds for which we held its calls, those under way included."""
        return self.account.held_s + sum(
            call.held_so_far_s for call in self.calls.values() if not call.done.is_set()
        )
