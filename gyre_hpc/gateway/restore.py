"""Brings the executions of a restarted worker back from its call log.

A call that was complete but not delivered answers a repeat at once; one that was cut goes on from its received tokens
when it is asked for again (they are never sampled a second time), and counts as lost when it never is.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from gyre_hpc.gateway.app import GatewayApp
from gyre_hpc.gateway.call_log import CallLogReader
from gyre_hpc.gateway.calls import Account, Call, Execution, Sealed
from gyre_hpc.gateway.frames import TOKEN_BYTES, decode_float32, decode_int32
from gyre_hpc.gateway.lineage import Context, Lineage
from gyre_hpc.gateway.logged_call import LoggedCall
from gyre_hpc.records import LAW_BREAKS, Delivery, FinishReason, LeafRole


def read_for_restore(path: Path) -> CallLogReader:
    """The log as it stands, read once: for `restore`, and for the writer that goes on behind it. Raises CorruptRecord."""
    reader = CallLogReader(path)
    reader.read_on()
    return reader


def restore(gateway: GatewayApp, reader: CallLogReader) -> int:
    """Fill `gateway` with the executions that the log leaves open; how many."""
    for (id, attempt), calls in reader.executions.items():
        execution = Execution(id, attempt, Lineage(gateway.rendering))
        execution.account.budget_exhausted = (id, attempt) in reader.exhausted
        contexts: dict[str, Context] = {}
        for logged in calls.values():
            contexts[logged.opened.call] = context = _context(execution.lineage, logged, contexts)
            _account(execution, logged)
            execution.past_roles.update((value, logged.opened.role_hint) for value in logged.opened.same)
            _restore_call(gateway, execution, logged, context)
        gateway.executions[id, attempt] = execution
        if (id, attempt) in reader.keys:
            gateway.accept_key(reader.keys[id, attempt], execution)
    for frame in reader.sealed:
        account = msgspec.convert(frame.account, Account, strict=False)
        gateway.sealed[frame.execution, frame.attempt] = Sealed(account)
    return len(reader.executions)


def _context(lineage: Lineage, logged: LoggedCall, contexts: dict[str, Context]) -> Context:
    opened, base = logged.opened, logged.base
    if base is None:
        context = Context(None, logged.delta, len(logged.delta))
    elif logged.length == opened.shared == base.length:
        context = lineage.contexts[opened.context] = contexts[base.opened.call]
        return context
    else:
        kept = opened.shared - base.length
        tail = np.concatenate([base.output()[:kept], logged.delta])
        spliced = base.opened.call if kept else ""
        context = Context(contexts[base.opened.call], tail, logged.length, spliced, kept)
    context.call = opened.call
    lineage.contexts[opened.context] = context
    return context


def _account(execution: Execution, logged: LoggedCall) -> None:
    account, finished = execution.account, logged.finished
    known = [version for version in (execution.kv_version, logged.kv_version) if version is not None]
    execution.kv_version = min(known, default=None)
    account.calls = max(account.calls, logged.opened.ordinal + 1)
    account.calls_unknown += logged.opened.role_hint == LeafRole.UNKNOWN
    account.prompt_tokens += logged.length
    account.tokens_sampled += len(logged.ids) // TOKEN_BYTES
    if finished is not None:
        account.add(finished, decode_int32(logged.cut(logged.versions)).tolist())
    account.law_breaks += sum(why in LAW_BREAKS for why in (*logged.opened.reasons, *logged.broken))


def _restore_call(gateway: GatewayApp, execution: Execution, logged: LoggedCall, context: Context) -> None:
    opened, finished = logged.opened, logged.finished
    ids = logged.output().tolist()
    if finished is not None and finished.finish == FinishReason.ABORT:
        return
    answer = stop = None
    if finished is not None:
        answer = gateway.rendering.parse(ids)
        found = [stop for stop in opened.stop if stop and stop in answer.content]
        stop = min(found, key=answer.content.index, default=None)
        answer = msgspec.structs.replace(
            answer, content=answer.content.split(stop)[0] if stop else answer.content
        )
        execution.lineage.answered(opened.call, opened.context, ids, answer)
        if logged.delivery is not Delivery.NONE:
            execution.lineage.delivered.add(opened.call)
    if logged.delivery is Delivery.COMPLETE:
        return
    call = Call(
        id=opened.call,
        context=context,
        digest=opened.context,
        request=opened.request,
        budget=opened.max_tokens,
        stop=opened.stop,
        started=opened.started,
        ids=ids,
        logprobs=decode_float32(logged.cut(logged.logprobs)).tolist(),
        versions=decode_int32(logged.cut(logged.versions)).tolist(),
        answer=answer,
        stop_sequence=stop,
        finish=FinishReason(finished.finish) if finished else None,
        prefilled=bool(ids),
        kv_version=logged.kv_version,
        delivery=logged.delivery,
        accepted=logged.accepted,
        contradicted=logged.contradicted,
    )
    if finished is not None:
        call.done.set()
    elif (progress := logged.progress) is not None:
        call.held_s, call.recomputed_tokens = progress.held_s, progress.recomputed_tokens
        call.reroutes, call.stalls = progress.reroutes, progress.stalls
        call.pages_due, call.pages_found = progress.pages_due, progress.pages_found
        call.left = progress.left
    execution.calls[call.id] = call
    execution.repeats.add(call)
