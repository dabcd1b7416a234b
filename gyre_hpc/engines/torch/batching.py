"""Continuous batching: the engine's only state machine, synchronous, without clocks, sockets or tasks.

A call is WAITING, PREFILLING, LIVE or FINISHED. Each `step` admits what fits, prefills one chunk of at most
`prefill_tokens` over the admitted calls, and decodes one token for every live call; so a long prompt delays the others
by one chunk. A call's state is its ids: whatever happens to its pages (retraction, release), it continues by prefilling
prompt + sampled ids again and never samples a token twice. When pages run out the latest admitted call is retracted;
the oldest always finishes, because a call that could not fit the empty pool is refused at submission.
A call waits for another that is prefilling the same next page, so a group's common prompt is computed once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from gyre_hpc.engines.torch.calls import Call, Finish, Stage
from gyre_hpc.engines.torch.host_pages import HostPages
from gyre_hpc.engines.torch.model import Qwen3
from gyre_hpc.engines.torch.passes import decode_pass, next_chunk, prefill_pass
from gyre_hpc.engines.torch.pool import PagePool, PrefixKeys
from gyre_hpc.engines.torch.sampling import sample
from gyre_hpc.errors import IllegalTransition
from gyre_hpc.kv.page_store import PageStore

PREFILL_TOKENS = 1024
"""Tokens of one prefill chunk: about 50 ms on a CPU core for a model of 0.4M parameters."""


@dataclass
class Counters:
    """Since the engine started. `busy_s` is wall time inside steps that had work."""

    tokens_sampled: int = 0
    tokens_prefilled: int = 0
    tokens_cached: int = 0
    tokens_fetched: int = 0
    """Of those cached, the ones whose pages came from the host store."""
    pages_exported: int = 0
    retractions: int = 0
    busy_s: float = 0.0


class Batcher:
    """Runs calls on one model and one KV pool. `on_finish` is called once per call, when it ends."""

    def __init__(
        self,
        model: Qwen3,
        *,
        page_tokens: int,
        pool_tokens: int,
        capacity: int,
        max_context: int,
        version: str,
        seed: int = 0,
        prefill_tokens: int = PREFILL_TOKENS,
        on_finish: Callable[[Call], None] = lambda call: None,
        store: PageStore | None = None,
    ) -> None:
        self.model, self.version, self.capacity, self.max_context = model, version, capacity, max_context
        self.page_tokens, self.pages = page_tokens, pool_tokens // page_tokens + 1
        self.counters = Counters()
        self.layout = model.shape.layout_digest(page_tokens)
        self.host = HostPages(store, self.layout, page_tokens) if store is not None else None
        self._prefill_tokens, self._on_finish = prefill_tokens, on_finish
        self._generator = torch.Generator().manual_seed(seed)
        self._waiting: deque[Call] = deque()
        self._prefilling: list[Call] = []
        self._live: list[Call] = []
        self._admitted = 0
        self._table = np.zeros((capacity, -(-max_context // page_tokens)), dtype=np.int64)
        self.allocate()

    def allocate(self) -> None:
        """Take memory for an empty pool."""
        shape = self.model.shape
        self.pool = PagePool(self.pages)
        self.kv = torch.zeros(
            shape.num_hidden_layers,
            self.pages * self.page_tokens,
            2,
            shape.num_key_value_heads,
            shape.head_dim,
        ).flatten(2)

    def free(self) -> None:
        """Drop the pool's memory. Only between calls."""
        if self._prefilling or self._live:
            raise IllegalTransition(
                f"pool of {self.running} running calls cannot be released", fix="pause(abort) first"
            )
        self.kv = torch.empty(0)
        self.pool.flush()

    @property
    def pool_tokens(self) -> int:
        """Tokens the pool holds."""
        return (self.pages - 1) * self.page_tokens

    @property
    def running(self) -> int:
        """Calls that hold pages."""
        return len(self._prefilling) + len(self._live)

    @property
    def waiting(self) -> int:
        """Calls that hold none."""
        return len(self._waiting)

    def calls(self) -> list[Call]:
        """Every unfinished call."""
        return [*self._live, *self._prefilling, *self._waiting]

    def submit(self, call: Call) -> None:
        """Queue a call. Raises ValueError naming the field that cannot be served."""
        wanted = call.prompt_tokens + call.max_new_tokens
        limit = min(self.max_context, self.pool_tokens)
        vocabulary = self.model.shape.vocab_size
        if not call.ids:
            raise ValueError("input_ids: empty")
        if min(call.ids) < 0 or max(call.ids) >= vocabulary:
            raise ValueError(f"input_ids: an id is outside 0..{vocabulary - 1}")
        if call.max_new_tokens < 1:
            raise ValueError(f"sampling_params.max_new_tokens={call.max_new_tokens}: must be at least 1")
        if wanted > limit:
            raise ValueError(
                f"sampling_params.max_new_tokens={call.max_new_tokens} after {call.prompt_tokens} input_ids is"
                f" {wanted} tokens; this engine holds {limit} per call"
            )
        call.keys = PrefixKeys(call.namespace, self.layout, self.page_tokens)
        call.keys.extend(call.ids)
        self._waiting.append(call)

    def abort(self, call: Call) -> None:
        """End the call with what it has; nothing if it has ended."""
        if call.stage is not Stage.FINISHED:
            self._leave(call)
            self._finish(call, Finish.ABORT)

    def retract_all(self) -> None:
        """Put every running call back into the queue, oldest first, without pages."""
        for call in sorted([*self._prefilling, *self._live], key=lambda call: call.order, reverse=True):
            self._retract(call)

    def set_version(self, version: str, *, flush: bool) -> None:
        """Weights have changed. `flush` forgets older KV and keeps what running calls hold of it from being shared."""
        self.version = version
        if flush:
            self.flush()

    def flush(self) -> None:
        """Forget all shared KV; running calls keep theirs, unshared."""
        self.pool.flush()
        for call in [*self._prefilling, *self._live]:
            call.shares = False

    def step(self) -> int:
        """Advance every call that can; returns tokens sampled (0 = nothing to do, or only prefill)."""
        started, sampled = time.perf_counter(), self.counters.tokens_sampled
        with torch.inference_mode():
            self._admit()
            if not self.running:
                return 0
            if self._prefilling:
                self._prefill()
            if self._live:
                self._decode()
        self.counters.busy_s += time.perf_counter() - started
        return self.counters.tokens_sampled - sampled

    # ---- admission ----------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Move waiting calls to PREFILLING in order, while rows and pages last."""
        if not self._waiting or self.running >= self.capacity:
            return
        coming = {
            key
            for call in self._prefilling
            if call.shares and call.keys
            for key in call.keys.keys[call.published :]
        }
        behind: list[Call] = []
        while self._waiting and self.running < self.capacity:
            call = self._waiting.popleft()
            if self._follows(call, coming):
                behind.append(call)
            elif not self._take_pages(call):
                self._waiting.appendleft(call)
                break
            elif call.keys:
                coming.update(call.keys.keys[call.published :])
        self._waiting.extendleft(reversed(behind))

    def _reusable(self, call: Call) -> int:
        """Leading pages that may be reused: the last id is always computed, for its logits."""
        return (len(call.ids) - 1) // self.page_tokens

    def _follows(self, call: Call, coming: set[bytes]) -> bool:
        """Whether the next page this call lacks is being computed by another."""
        assert call.keys is not None
        if not coming:
            return False
        keys = call.keys.keys[: self._reusable(call)]
        missing = next((key for key in keys if not self.pool.finds(key)), None)
        return missing is not None and missing in coming

    def _take_pages(self, call: Call) -> bool:
        """Give the call its cached prefix and pages for the rest of its ids; False (nothing taken) if they lack."""
        assert call.keys is not None
        cached = self.pool.acquire_prefix(call.keys.keys[: self._reusable(call)])
        needed = len(call.ids) // self.page_tokens + 1 - len(cached)
        if self.pool.available < needed + self.running:
            self.pool.release(cached)
            return False
        call.pages = cached + [
            page for page in (self.pool.allocate() for _ in range(needed)) if page is not None
        ]
        found = len(cached) + self._fetch(call, len(cached))
        call.computed = found * self.page_tokens
        call.published, call.shares, call.stage = found, True, Stage.PREFILLING
        if call.order < 0:
            call.order, self._admitted = self._admitted, self._admitted + 1
            call.cached_tokens = call.computed
            self.counters.tokens_cached += call.computed
        self._prefilling.append(call)
        return True

    def _fetch(self, call: Call, cached: int) -> int:
        """Fill the call's pages behind its `cached` ones from the host store, as far as it has them; how many."""
        assert call.keys is not None
        if self.host is None:
            return 0
        keys = self.host.keys(call.namespace, call.keys.keys[cached : self._reusable(call)])
        for count, key in enumerate(keys):
            page = call.pages[cached + count]
            if not self.host.read(key, self.kv, page):
                return count
            self.pool.publish(page, key.prefix)
            self.counters.tokens_fetched += self.page_tokens
        return len(keys)

    # ---- prefill ------------------------------------------------------------------------------------------------

    def _prefill(self) -> None:
        """One chunk over the admitted calls, oldest first; calls whose ids are all computed sample and go LIVE."""
        parts = next_chunk(self._prefilling, self._prefill_tokens)
        logits = prefill_pass(self.model, self.kv, self.page_tokens, parts)
        for part in parts:
            self.counters.tokens_prefilled += part.last - part.first
            part.call.computed = part.last
            self._publish(part.call)
        ready = [part.call for part in parts if part.ends]
        for call in ready:
            self._prefilling.remove(call)
            self._go_live(call)
        if ready:
            self._emit(ready, logits)

    def _go_live(self, call: Call) -> None:
        self._table[len(self._live), : len(call.pages)] = call.pages
        call.stage = Stage.LIVE
        self._live.append(call)

    # ---- decode -------------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        """One token for every live call: the last id is computed, the next one sampled."""
        self._grow()
        live = list(self._live)
        if not live:
            return
        logits = decode_pass(self.model, self.kv, self.page_tokens, live, self._table[: len(live)])
        for call in live:
            call.computed += 1
            if call.computed % self.page_tokens == 0:
                self._publish(call)
        self._emit(live, logits)

    def _grow(self) -> None:
        """Give every live call a page for the id it computes next, retracting the latest calls if pages run out."""
        short = [call for call in self._live if len(call.pages) * self.page_tokens < len(call.ids)]
        for call in sorted(short, key=lambda call: call.order):
            while call.stage is Stage.LIVE:
                page = self.pool.allocate()
                if page is not None:
                    self._table[self._live.index(call), len(call.pages)] = page
                    call.pages.append(page)
                    break
                self._retract(max([*self._prefilling, *self._live], key=lambda running: running.order))

    def _emit(self, calls: list[Call], logits: torch.Tensor) -> None:
        """Sample one id per call, record it with its version, and end the calls that are complete."""
        greedy = np.fromiter((call.greedy for call in calls), np.bool_, len(calls))
        ids, logprobs = sample(logits, greedy, self._generator)
        self.counters.tokens_sampled += len(calls)
        for call, token, logprob in zip(calls, ids, logprobs, strict=True):
            if not call.spans or call.spans[-1][0] != self.version:
                call.spans.append((self.version, call.sampled))
            call.ids.append(token)
            call.logprobs.append(logprob)
            if token in call.stop_ids:
                self._leave(call)
                self._finish(call, Finish.STOP)
            elif call.sampled >= call.max_new_tokens:
                self._leave(call)
                self._finish(call, Finish.LENGTH)

    # ---- leaving ------------------------------------------------------------------------------------------------

    def _publish(self, call: Call) -> None:
        """Make the call's full computed pages findable."""
        full = call.computed // self.page_tokens
        if call.shares and call.keys is not None and full > call.published:
            call.keys.extend(call.ids)
            for index in range(call.published, full):
                self.pool.publish(call.pages[index], call.keys.keys[index])
            call.published = full

    def _leave(self, call: Call) -> None:
        """Take the call out of its list and its pages from it."""
        if call.stage is Stage.WAITING:
            self._waiting.remove(call)
        elif call.stage is Stage.PREFILLING:
            self._prefilling.remove(call)
        else:
            row, last = self._live.index(call), self._live.pop()
            if last is not call:
                self._live[row] = last
                self._table[row] = self._table[len(self._live)]
        self.pool.release(call.pages)
        call.pages, call.computed, call.published = [], 0, 0

    def _retract(self, call: Call) -> None:
        self._leave(call)
        call.stage = Stage.WAITING
        call.retractions += 1
        self.counters.retractions += 1
        self._waiting.appendleft(call)

    def _finish(self, call: Call, reason: Finish) -> None:
        call.stage, call.finish = Stage.FINISHED, reason
        self._on_finish(call)
