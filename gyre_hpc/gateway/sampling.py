"""Drives one call through engines until its generation is complete.

Law: a received token is never discarded or sampled again. Whatever happens to an engine, the call goes on elsewhere with
prompt + received tokens and the remaining budget; a stop token received means complete. The loop ends with
`call.ending` set, or raises CallLost when no engine can continue it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import cast

from gyre_hpc.config import GatewayConfig
from gyre_hpc.engines.client import EngineAbsent, EngineRefused, EngineUnreachable, PromptChanged
from gyre_hpc.engines.wire import EncodedIds
from gyre_hpc.errors import ProtocolViolation
from gyre_hpc.gateway.call_log import CallLog
from gyre_hpc.gateway.calls import Call, CallLost, Execution
from gyre_hpc.gateway.frames import CallProgress, LawBroken, TokensReceived, encode_float32, encode_int32
from gyre_hpc.gateway.pages import PageMover
from gyre_hpc.gateway.rendering import Rendering
from gyre_hpc.gateway.routing import Chunk, Lease, Router
from gyre_hpc.gateway.stops import find_stop
from gyre_hpc.gateway.watch import SilenceWatch
from gyre_hpc.records import FinishReason, Version

log = logging.getLogger(__name__)

BARREN_MOVES = 5
"""Engines in a row that failed a call without a token before it counts as lost: it may be what kills them.

Engines that were gone before they were asked do not count: with a controller all of them end at once."""
ABORT_S = 5.0
"""Seconds an engine gets to end a cut stream at a token boundary; what was received counts either way."""
BAD_REQUEST = 400
NOTED_S = 0.1
"""A call that waited so long for its engine is noted before it ends."""


class Sampler:
    """One per gateway; `run` once per call."""

    def __init__(
        self,
        rendering: Rendering,
        router: Router,
        call_log: CallLog,
        settings: GatewayConfig,
        sampled: Callable[[Execution, int], None],
        pages: PageMover,
    ) -> None:
        self._rendering = rendering
        self._router = router
        self._log = call_log
        self._settings = settings
        self._sampled = sampled
        self._pages = pages
        self._stop_ids = frozenset(rendering.stop_ids)
        self._boundary_ids = rendering.boundary_ids
        self._aborts: set[asyncio.Task[None]] = set()
        self._salt, self._requests = secrets.token_hex(4), itertools.count()

    async def run(self, execution: Execution, call: Call) -> None:
        """Returns with the generation complete. Raises CallLost."""
        barren = 0
        self._judge(execution, call, 0, None)
        while call.ending is None:
            call.hold()
            received = len(call.ids)
            lease = await self._router.acquire(call.id, execution.home)
            execution.home = lease.cell
            try:
                await self._pages.arrive(execution, lease)
                # Its siblings may have spent the budget meanwhile, and no engine takes a call for 0 tokens.
                self._judge(execution, call, received, None)
                failed = call.ending is None and await self._serve(execution, call, lease)
                if call.ending is None:
                    await self._pages.depart(execution, call, lease)
            finally:
                self._router.release(lease)
            if call.ending is None:
                call.reroutes += 1
                self.note(call)
            barren = barren + 1 if failed and len(call.ids) == received else 0
            if barren >= BARREN_MOVES and call.ending is None:
                raise CallLost(f"{barren} engines in a row failed call {call.id} without a token")
        call.go_on()

    async def _serve(self, execution: Execution, call: Call, lease: Lease) -> bool:
        """Sample on one cell until complete, told to leave, or failed. Returns whether an engine failed that was there."""
        if not call.prefilled:
            call.go_on()
        absent = False
        try:
            finish = await self._consume(execution, call, lease)
            cause = f"a call ended with {finish!r} that nobody cut"
        except EngineRefused as error:
            if error.status == BAD_REQUEST:
                raise CallLost(f"call {call.id}: {error.message}") from error
            cause = error.message
        except (EngineUnreachable, ProtocolViolation) as error:
            if isinstance(error, PromptChanged):
                self._law_broken(execution, call, error)
            cause = f"{type(error).__name__}: {error.message}"
            absent = isinstance(error, EngineAbsent)
        except TimeoutError:
            cause = f"TimeoutError: no token within {self._settings.engine_silence_s:g} s"
        if call.ending is not None or lease.leave.done():
            return False
        self._router.failed(lease, cause)
        return not absent

    async def _consume(self, execution: Execution, call: Call, lease: Lease) -> str | None:
        """Take chunks until the engine ends the stream or the call is complete; the engine's finish.

        Raises what the engine client raises, and TimeoutError when the engine is silent or does not let the call go.
        """
        prompt = execution.lineage.encoded(call.context) + EncodedIds.of(call.ids)
        rid = self._fresh_rid(call)
        namespace = self._pages.namespace(execution, lease)
        generated = lease.engine.generate(
            rid, prompt, self._room(execution, call), namespace, self._rendering.stop_ids
        )
        first = True
        async with (
            asyncio.timeout(None) as limit,
            contextlib.aclosing(cast("AsyncGenerator[Chunk, None]", generated)) as chunks,
        ):
            watch = self._watch(call, lease, limit)
            leave = partial(self._leave, call, lease, rid, limit, watch)
            lease.leave.add_done_callback(leave)
            try:
                async for chunk in chunks:
                    watch.heard()
                    if first:
                        _check_prompt(call, lease, chunk)
                        self._pages.found(execution, call, chunk.cached_tokens, lease)
                        self._started(call, prompt.count, chunk.cached_tokens)
                        first = False
                    self._take(execution, call, chunk)
                    if call.ending is not None or chunk.finish:
                        return chunk.finish
            finally:
                lease.leave.remove_done_callback(leave)
                watch.stop()
        return None

    def _fresh_rid(self, call: Call) -> str:
        """A name that no engine has heard, from a worker killed before either, and that is no prefix of another.

        An engine may still hold a request whose connection has ended: SGLang notices within 2 s, refuses a second request
        of that name meanwhile, and aborts whatever has the name then (tokenizer_manager.py, create_abort_task).
        """
        return f"{call.id}.{self._salt}.{next(self._requests)}."

    def _watch(self, call: Call, lease: Lease, limit: asyncio.Timeout) -> SilenceWatch:
        """Warns of a stall of this stream and ends it after `engine_silence_s`."""
        settings, now = self._settings, asyncio.get_running_loop().time

        def stalled(seconds: float) -> None:
            log.warning("cell %d: no token of call %s for %.0f s", lease.cell, call.id, seconds)
            call.stalls += 1
            self.note(call)

        return SilenceWatch(
            settings.stall_alarm_s, settings.engine_silence_s, stalled, lambda: limit.reschedule(now())
        )

    def _leave(
        self,
        call: Call,
        lease: Lease,
        rid: str,
        limit: asyncio.Timeout,
        watch: SilenceWatch,
        _: asyncio.Future[None],
    ) -> None:
        """The call must go: cut it at a token boundary and take what the stream still brings, but not for long."""
        call.hold()
        watch.stop()
        loop = asyncio.get_running_loop()
        if limit.expired():
            return
        if lease.gone:
            limit.reschedule(loop.time())
            return
        limit.reschedule(loop.time() + ABORT_S)
        task = loop.create_task(_abort(lease, rid))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    def _law_broken(self, execution: Execution, call: Call, error: PromptChanged) -> None:
        """The engine was given another prompt than is recorded: nothing of the execution is trained."""
        log.error("execution %d: call %s: %s", execution.id, call.id, error.message)
        execution.account.law_breaks += 1
        self._log.append(LawBroken(call.id, "engine_prompt"))

    def _started(self, call: Call, prompt: int, cached: int) -> None:
        call.go_on()
        if call.prefilled:
            call.recomputed_tokens += max(0, prompt - cached)
        else:
            call.cached_tokens = cached
        call.prefilled = True
        if call.reroutes or call.held_s >= NOTED_S or self._pages.keeps:
            self.note(call)

    def note(self, call: Call) -> None:
        """What the call went through is on disk, for a worker that has to go on with it."""
        self._log.append_soon(
            CallProgress(
                call.id,
                call.held_s,
                call.recomputed_tokens,
                call.reroutes,
                call.stalls,
                call.pages_due,
                call.pages_found,
                call.left,
                -1 if call.kv_version is None else call.kv_version,
            )
        )

    def _take(self, execution: Execution, call: Call, chunk: Chunk) -> None:
        """Record the tokens of a chunk, up to a stop token or the end of the budget."""
        known = len(call.ids)
        end = self._end(chunk.ids, self._room(execution, call))
        ids, logprobs, versions = chunk.ids[:end], chunk.logprobs[:end], chunk.versions[:end]
        if ids:
            call.ids += ids
            call.logprobs += logprobs
            call.versions += versions
            self._log.append_soon(
                TokensReceived(call.id, encode_int32(ids), encode_float32(logprobs), _pack_versions(versions))
            )
            self._sampled(execution, len(ids))
            if not self._boundary_ids.isdisjoint(ids):
                call.grown.set()
        self._judge(execution, call, known, chunk.finish)

    def _room(self, execution: Execution, call: Call) -> int:
        """How many more ids the call may have: its own budget, and what all calls of its execution have left."""
        room, limit = call.budget - len(call.ids), self._settings.max_sampled_tokens
        return min(room, max(0, limit - execution.account.tokens_sampled)) if limit else room

    def _end(self, ids: list[int], room: int) -> int:
        """How many of the ids belong to the call: up to a stop token, and not beyond the budget."""
        count = min(len(ids), room)
        if self._stop_ids.isdisjoint(ids):
            return count
        return next((i + 1 for i, token in enumerate(ids[:count]) if token in self._stop_ids), count)

    def _judge(self, execution: Execution, call: Call, known: int, finish: str | None) -> None:
        """Set `call.ending` when the generation is complete; the first `known` ids were judged before."""
        if (
            (call.stop and self._stopped(call, known))
            or (call.ids and call.ids[-1] in self._stop_ids)
            or finish == "stop"
        ):
            call.ending = FinishReason.STOP
        elif finish == "length" or self._room(execution, call) < 1:
            call.ending = FinishReason.LENGTH

    def _stopped(self, call: Call, known: int) -> bool:
        """Look for a stop string in the joined text; cut the output behind the token that completes it."""
        found = find_stop(self._rendering.text, call.ids, known, call.stop)
        if found is None:
            return False
        call.stop_sequence, count = found
        del call.ids[count:], call.logprobs[count:], call.versions[count:]
        return True


def _check_prompt(call: Call, lease: Lease, chunk: Chunk) -> None:
    """An engine that says what it was given was given what is recorded. Raises PromptChanged."""
    if chunk.prompt_xxh3 and chunk.prompt_xxh3 != call.context.xxh3(call.ids):
        raise PromptChanged(f"engine {lease.address} was given other prompt ids than are recorded")


async def _abort(lease: Lease, rid: str) -> None:
    with contextlib.suppress(EngineUnreachable, EngineRefused):
        await lease.engine.abort(rid)


def _pack_versions(versions: list[Version]) -> bytes:
    same = versions.count(versions[0]) == len(versions)
    return encode_int32(versions[:1] if same else versions)
