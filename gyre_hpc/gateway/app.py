"""The gateway without its wires: executions and their calls, from admission to the sealed record.

server.py speaks HTTP for it, process.py obeys the controller through it. Order of a call: put the prompt together, attach
to an earlier call or refuse what can be refused, log the opening, generate in a task of its own (it outlives its
client), log the finish; server.py delivers and reports the client's coming and going.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from dataclasses import asdict
from typing import Any

from msgspec import structs

from gyre_hpc.config import GatewayConfig, RoleRule
from gyre_hpc.errors import StorageFull
from gyre_hpc.gateway.call_log import CallLog
from gyre_hpc.gateway.calls import Account, Call, CallLost, Execution, Sealed
from gyre_hpc.gateway.canonical import Request, call_id, digest
from gyre_hpc.gateway.dialects.base import Refusal, RefusalKind, invalid
from gyre_hpc.gateway.frames import (
    AttemptOpened,
    AttemptSealed,
    BudgetExhausted,
    CallAccepted,
    CallDelivered,
    CallOpened,
    encode_int32,
)
from gyre_hpc.gateway.keys import Keys
from gyre_hpc.gateway.lineage import Lineage, Prompt
from gyre_hpc.gateway.pages import PageMover
from gyre_hpc.gateway.parts import DeliverMode
from gyre_hpc.gateway.rendering import Rendering
from gyre_hpc.gateway.roles import Asker
from gyre_hpc.gateway.routing import Router
from gyre_hpc.gateway.sampling import Sampler
from gyre_hpc.gateway.sessions import SHARED_SESSION, Sessions
from gyre_hpc.records import LAW_BREAKS, Delivery, ExecutionId, FinishReason, LeafRole

log = logging.getLogger(__name__)


class GatewayApp:
    """One gateway. All methods belong to its event loop."""

    def __init__(
        self,
        rendering: Rendering,
        router: Router,
        call_log: CallLog,
        settings: GatewayConfig,
        max_context: int,
        roles: Sequence[RoleRule] = (),
        pages: PageMover | None = None,
        deliver: DeliverMode = DeliverMode.ANSWER,
        session: str = "",
    ) -> None:
        self.rendering = rendering
        self.router = router
        self.log = call_log
        self.settings = settings
        self.max_context = max_context
        self.roles = roles
        self.deliver = deliver
        self.executions: dict[tuple[int, int], Execution] = {}
        self.sealed: dict[tuple[int, int], Sealed] = {}
        """Attempts sealed of late, oldest first, for a controller that asks again."""
        self._keys: Keys[Execution] = Keys()
        self.sessions: Sessions[Execution] = Sessions(session)
        self.pages = pages or PageMover.still(router)
        self._sampler = Sampler(rendering, router, call_log, settings, self._sampled, self.pages)
        self._tasks: set[asyncio.Task[None]] = set()
        self.tokens = 0

    # ---- executions -------------------------------------------------------------------------------

    def open_execution(self, execution: int, attempt: int, key: str) -> None:
        """Accept calls under `key`. A repeat changes nothing; a sealed attempt stays closed."""
        if (execution, attempt) in self.sealed:
            return
        known = self.executions.get((execution, attempt))
        if known is None:
            known = self.executions[execution, attempt] = Execution(
                execution, attempt, Lineage(self.rendering)
            )
            self.log.append(AttemptOpened(execution, attempt, key))
        self.accept_key(key, known)

    def accept_key(self, key: str, execution: Execution) -> None:
        """From here on calls under `key` belong to the execution."""
        self._keys.add(key, execution)

    async def close_execution(self, execution: int, attempt: int) -> tuple[Account, bool]:
        """Refuse further calls, abandon running ones, make all records durable. (account, whether the log lacks any)."""
        if (execution, attempt) in self.sealed:
            return self.sealed[execution, attempt].account, False
        known = self.executions.get((execution, attempt))
        if known is None:
            return Account(), True
        if known.closing:
            await known.sealed.wait()
            return known.account, False
        known.closing = True
        self._keys.revoke(known)
        self.sessions.forget(known)
        for call in list(known.calls.values()):
            await self._abandon(known, call)
        known.account.calls_lost += sum(call.left_broken for call in known.calls.values())
        self.log.append(AttemptSealed(execution, attempt, known.account.calls, asdict(known.account)))
        await self.log.sync()
        self.executions.pop((execution, attempt), None)
        self.sealed[execution, attempt] = Sealed(known.account)
        known.sealed.set()
        return known.account, False

    def held(self) -> tuple[tuple[ExecutionId, int], ...]:
        """Attempts that are open, and those sealed of late: (execution, attempt)."""
        return tuple((ExecutionId(id), attempt) for id, attempt in (*self.executions, *self.sealed))

    def keep_sealed(self) -> None:
        """Somebody asks from here on for what was sealed before."""
        self.sealed = {key: Sealed(item.account) for key, item in self.sealed.items()}

    def forget_sealed(self, kept_s: float) -> None:
        """Drop what was sealed more than `kept_s` ago: nobody asks for it any more."""
        oldest = time.monotonic() - kept_s
        while self.sealed and (key := next(iter(self.sealed))) and self.sealed[key].at < oldest:
            del self.sealed[key]

    async def close(self) -> None:
        """End every generation; undelivered calls are recorded as aborted."""
        for execution in list(self.executions.values()):
            for call in list(execution.calls.values()):
                await self._abandon(execution, call)

    def execution(self, key: str) -> Execution:
        """The execution that may call under this key. Raises Refusal."""
        execution = self._keys.find(key)
        if execution is None:
            raise Refusal(RefusalKind.NOT_FOUND, "no execution is open under this base URL")
        return execution

    # ---- one call -----------------------------------------------------------------------------------------------

    def call(self, execution: Execution, request: Request, asker: Asker) -> Call:
        """The call that answers this request: an earlier one to attach to, or one that begins. Raises Refusal."""
        known = len(execution.lineage.contexts)
        try:
            return self._call(execution, request, asker)
        except Refusal:
            execution.lineage.cut(known)
            raise

    def _call(self, execution: Execution, request: Request, asker: Asker) -> Call:
        try:
            prompt = execution.lineage.prompt(request)
        except ValueError as error:
            raise invalid(f"the model's renderer refuses this conversation: {error}") from error
        self._accept(execution, request, prompt)
        key = digest([prompt.digest, request.max_tokens, request.stop])
        earlier = execution.repeats.attachable(key)
        if earlier is not None:
            if earlier.task is None and earlier.finish is None:
                self._start(execution, earlier)
            return earlier
        budget = self._admit(execution, request, prompt)
        return self._open(execution, request, prompt, key, budget, asker)

    def _admit(self, execution: Execution, request: Request, prompt: Prompt) -> int:
        """Everything that can refuse a call; the output budget of one that is admitted."""
        settings, account = self.settings, execution.account
        room = self.max_context - prompt.context.length
        if room < 1:
            raise Refusal(RefusalKind.TOO_LONG, "", tokens=prompt.context.length, limit=self.max_context)
        left = settings.max_sampled_tokens - account.tokens_sampled
        if settings.max_calls and account.calls >= settings.max_calls:
            raise self._exhausted(execution, f"{settings.max_calls} model calls")
        if self._spent(execution):
            raise self._exhausted(execution, f"{settings.max_sampled_tokens} output tokens")
        try:
            self.log.check()
        except StorageFull as error:
            raise Refusal(RefusalKind.OVERLOADED, error.message) from error
        wanted = request.max_tokens or settings.max_output_tokens
        return min(wanted, settings.max_output_tokens, room, left if settings.max_sampled_tokens else wanted)

    def _spent(self, execution: Execution) -> bool:
        limit = self.settings.max_sampled_tokens
        return limit > 0 and execution.account.tokens_sampled >= limit

    def _exhausted(self, execution: Execution, budget: str) -> Refusal:
        self._note_exhausted(execution)
        return Refusal(RefusalKind.BUDGET, f"the budget of {budget} is used up")

    def _note_exhausted(self, execution: Execution) -> None:
        """The record says that a call was refused or cut by the execution's budget."""
        if not execution.account.budget_exhausted:
            execution.account.budget_exhausted = True
            self.log.append(BudgetExhausted(execution.id, execution.attempt))

    def _open(
        self, execution: Execution, request: Request, prompt: Prompt, key: bytes, budget: int, asker: Asker
    ) -> Call:
        """A call begins: recorded, then started."""
        ordinal = execution.account.calls
        execution.account.calls += 1
        execution.account.prompt_tokens += prompt.context.length
        context = prompt.context
        call = Call(
            id=call_id(execution.id, execution.attempt, ordinal),
            context=context,
            digest=prompt.digest,
            request=key,
            budget=budget,
            stop=request.stop,
        )
        breaks = sum(reason in LAW_BREAKS for reason in prompt.reasons)
        if breaks:
            execution.account.law_breaks += breaks
            log.error("execution %d: the prompt of call %s breaks the token law", execution.id, call.id)
        base, shared, delta = context.base()
        context.call = context.call or call.id
        self.log.append_soon(
            CallOpened(
                call=call.id,
                execution=execution.id,
                attempt=execution.attempt,
                ordinal=ordinal,
                base=base,
                shared=shared,
                delta=encode_int32(delta),
                context=prompt.digest,
                request=key,
                max_tokens=budget,
                stop=request.stop,
                constrained=request.constrained,
                role_hint=asker.role.value,
                dialect=request.dialect,
                started=call.started,
                wishes=request.wishes,
                reasons=(*prompt.reasons, *((SHARED_SESSION,) if asker.shared else ())),
                prompt_xxh3=context.xxh3(),
                deliver=self.deliver.of(request.stream).value,
                same=asker.same,
            )
        )
        execution.account.calls_unknown += asker.role is LeafRole.UNKNOWN
        execution.calls[call.id] = call
        execution.repeats.add(call)
        self._start(execution, call)
        return call

    def _start(self, execution: Execution, call: Call) -> None:
        """Generate, from the tokens received so far if it was cut before."""
        if call.left:
            call.left = False
            self._sampler.note(call)
        call.task = self._spawn(self._generate(execution, call))

    async def _generate(self, execution: Execution, call: Call) -> None:
        """Generate to the end and record the finish, whatever the end is, unless its client left it."""
        deadline = asyncio.get_running_loop().call_later(self.settings.call_deadline_s, self._late, call)
        try:
            await self._sampler.run(execution, call)
            self._complete(execution, call)
        except CallLost as error:
            call.lost = str(error)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            call.lost = f"call {call.id}: {error!r}"
            raise
        finally:
            deadline.cancel()
            call.go_on()
            if call.left and call.answer is None and not call.lost:
                self._lay_aside(execution, call)
            else:
                self._finish(execution, call)

    def _lay_aside(self, execution: Execution, call: Call) -> None:
        """The call is cut at its engine and keeps what it received; a client that came meanwhile makes it go on."""
        call.task = None
        self._sampler.note(call)
        if call.clients:
            self._start(execution, call)

    def _late(self, call: Call) -> None:
        """The call's deadline is over."""
        assert call.task is not None
        call.lost = f"call {call.id} was not complete within {self.settings.call_deadline_s:g} s"
        call.task.cancel()

    def _complete(self, execution: Execution, call: Call) -> None:
        """Read the answer and make it spliceable."""
        assert call.ending is not None
        answer = self.rendering.parse(call.ids)
        execution.tips.append((call.context, call.ids))
        if call.stop_sequence is not None:
            answer = structs.replace(answer, content=answer.content.split(call.stop_sequence)[0])
        execution.lineage.answered(call.id, call.digest, call.ids, answer)
        if call.ending is FinishReason.LENGTH and self._spent(execution):
            self._note_exhausted(execution)
        tools = call.ending is FinishReason.STOP and answer.tool_calls and call.stop_sequence is None
        call.answer, call.finish = answer, FinishReason.TOOL_CALLS if tools else call.ending

    def _finish(self, execution: Execution, call: Call) -> None:
        """The call is over: recorded and accounted for, once."""
        call.finish = call.finish or FinishReason.ABORT
        finished = call.finished()
        execution.account.add(finished, call.versions)
        if call.lost:
            log.error("execution %d: %s", execution.id, call.lost)
        self.log.append(finished)
        call.done.set()
        call.grown.set()

    def _sampled(self, execution: Execution, count: int) -> None:
        self.tokens += count
        execution.account.tokens_sampled += count

    # ---- clients ------------------------------------------------------------------------------------------------

    def arrive(self, call: Call) -> None:
        call.clients += 1
        if call.abandonment is not None:
            call.abandonment.cancel()
            call.abandonment = None

    def leave(self, execution: Execution, call: Call) -> None:
        """A client is served or gone. Nobody left: the generation goes on for a repeat to attach to, for a while."""
        call.clients -= 1
        if call.delivery is not Delivery.NONE and not execution.closing:
            execution.lineage.delivered.add(call.id)
            self.log.append_soon(CallDelivered(call.id, call.delivery, call.contradicted))
        if call.delivery is Delivery.COMPLETE:
            execution.calls.pop(call.id, None)
            execution.repeats.forget(call)
        elif call.clients == 0 and call.finish is None and call.task is not None:
            loop = asyncio.get_running_loop()
            call.abandonment = loop.call_later(self.settings.attach_grace_s, self._leave_alone, call)

    @staticmethod
    def _leave_alone(call: Call) -> None:
        """Nobody came back for the call: its engine has better things to do."""
        assert call.task is not None
        call.left = True
        call.task.cancel()

    def _accept(self, execution: Execution, request: Request, prompt: Prompt) -> None:
        """Calls whose handles come back were accepted, however they were delivered."""
        echoed = (call for index in request.fresh for call in request.units[index].calls)
        for name in {*echoed, *prompt.spliced}:
            if (call := execution.calls.get(name)) is not None and not call.accepted:
                call.accepted = True
                self.log.append(CallAccepted(name))

    async def _abandon(self, execution: Execution, call: Call) -> None:
        """End a call's generation; its records say how far it came."""
        if call.abandonment is not None:
            call.abandonment.cancel()
        unclaimed, call.left = call.left, False
        if call.task is not None:
            call.task.cancel()
            await asyncio.wait({call.task})
        if call.finish is None:
            if not unclaimed:
                call.lost = f"call {call.id} was cut by a restart of the gateway and never asked for again"
            self._finish(execution, call)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a generation failed", exc_info=error)
