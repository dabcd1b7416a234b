"""What outlives a worker: every counter of an account, and for a while the accounts of sealed attempts."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gyre_hpc.composition import compose
from gyre_hpc.engines.client import EngineRefused
from gyre_hpc.gateway.call_log import CallLog
from gyre_hpc.gateway.calls import Account, Call
from gyre_hpc.gateway.pages import PageMover
from gyre_hpc.gateway.rendering import Rendering
from gyre_hpc.gateway.restore import read_for_restore
from gyre_hpc.gateway.routing import Router
from gyre_hpc.gateway.worker import SEALED_KEPT_S
from gyre_hpc.kv.client import PortClient
from gyre_hpc.records import CellId, KvPolicy, LeafRole, Version
from gyre_hpc.transport.messages import ExecutionSealed
from gyre_hpc.transport.peer import SEND_TIMEOUT_S, SILENT_HOST_S

from .fakes import RunningGateway, ScriptedEngine

ASK = {"role": "user", "content": "go"}


class Refusing(ScriptedEngine):
    """An engine that cannot take a call at all."""

    async def generate(self, *_: Any, **__: Any) -> Any:
        raise EngineRefused("url", 400, "no")
        yield


async def restarted(before: RunningGateway, folder: Path, **settings: Any) -> RunningGateway:
    """A gateway that finds the log as it stood when `before` was killed."""
    await before.app.log.sync()
    folder = folder / "restarted"
    folder.mkdir()
    shutil.copy(before.path, folder)
    return await RunningGateway.start(before.app.rendering, folder, **settings)


def cut_with_pages(gateway: RunningGateway) -> None:
    """As if the call under way had had 5 pages on the cell it left."""
    execution, left = gateway.app.executions[7, 1], gateway.app.router.table.cells[CellId(9)]
    for call in execution.calls.values():
        call.pages_cut = 5 if call.finish is None else 0
        call.cut_under = gateway.app.pages.namespace(execution, left)


async def eventful(gateway: RunningGateway) -> tuple[Call, asyncio.Task[dict[str, Any]]]:
    """An attempt with a lost call, a held, moved and complete one, a refusal for its budget, and a call under way."""
    gateway.engines["http://refusing"] = Refusing(gateway.script)
    gateway.app.router.route(CellId(9), "http://refusing", 1, Version(0))
    with pytest.raises(aiohttp.ClientConnectionError):
        await gateway.chat([ASK])
    gateway.app.router.table.block(CellId(9))
    gateway.script.answers = ["one answer<|im_end|>", "another answer<|im_end|>"]
    held = asyncio.create_task(gateway.chat([ASK]))
    await asyncio.sleep(0.15)
    gateway.engine(0, die_after=3, cached=2)
    while not gateway.faults:
        await asyncio.sleep(0.005)
    cut_with_pages(gateway)
    gateway.engine(1, version=1, cached=4)
    assert (await held)["status"] == 200
    gateway.engine(1, version=2, die_after=2)
    running = asyncio.create_task(gateway.chat([{**ASK, "content": "on"}]))
    while len(gateway.faults) < 2:
        await asyncio.sleep(0.005)
    cut_with_pages(gateway)
    last = gateway.engine(2, pause_after=1, cached=4)
    await last.waiting.wait()
    (call,) = [call for call in gateway.app.executions[7, 1].calls.values() if call.finish is None]
    while not call.stalls:
        await asyncio.sleep(0.005)
    assert (await gateway.chat([{**ASK, "content": "more"}]))["status"] == 400
    return call, running


def keeping(router: Router) -> PageMover:
    """No pages are moved, and those of older weights are still found."""

    def no_port(address: str) -> PortClient:
        raise AssertionError(f"{address} is asked")

    return PageMover(no_port, router, KvPolicy.KEEP_EXECUTION, 0.0, 1)


async def test_every_counter_of_an_account_survives_a_restart(rendering: Rendering, tmp_path: Path) -> None:
    before = await RunningGateway.start(rendering, tmp_path, keeping, max_calls=3, stall_alarm_s=0.05)
    call, running = await eventful(before)
    account = asdict(before.app.executions[7, 1].account)
    assert all(value for name, value in account.items() if name not in ("stalls", "law_breaks")), account
    after = await restarted(before, tmp_path)
    restored = after.app.executions[7, 1]
    assert asdict(restored.account) == account
    again = restored.calls[call.id]
    assert call.reroutes == call.stalls == 1 and call.recomputed_tokens and call.held_s
    assert (call.pages_due, call.pages_found) == (5, 4)
    names = ("reroutes", "stalls", "recomputed_tokens", "held_s", "pages_due", "pages_found", "kv_version")
    for counter in names:
        assert getattr(again, counter) == getattr(call, counter)
    running.cancel()
    await after.stop()
    await before.stop()


@pytest.mark.parametrize("open_call", [False, True])
async def test_the_age_of_pages_survives_a_restart(
    rendering: Rendering, tmp_path: Path, open_call: bool
) -> None:
    before = await RunningGateway.start(rendering, tmp_path, keeping)
    before.script.answers = ["an answer<|im_end|>"]
    engine = before.engine(version=1, pause_after=1)
    asking = asyncio.create_task(before.chat([ASK]))
    await engine.waiting.wait()
    if not open_call:
        engine.go.set()
        await asking
    after = await restarted(before, tmp_path, pages=keeping)
    after.script.answers, after.script.outputs = ["another answer<|im_end|>"], before.script.outputs
    after.engine(version=3, cached=4)
    await after.chat([ASK])
    account, _ = await after.app.close_execution(7, 1)
    assert (account.calls, account.kv_lag) == (1 if open_call else 2, 2)
    assert [record.kv_version for record in await after.records()] == [1] * account.calls
    engine.go.set()
    await asking
    await after.stop()
    await before.stop()


async def test_a_role_that_follows_from_an_earlier_call_survives_a_restart(
    rendering: Rendering, tmp_path: Path
) -> None:
    before = await RunningGateway.start(rendering, tmp_path)
    before.app.roles = compose(["harness=opencode"]).harness.roles
    before.script.answers = ["an answer<|im_end|>"]
    before.engine()
    await before.chat([ASK], headers={"x-session-id": "2", "x-parent-session-id": "1"})
    after = await restarted(before, tmp_path)
    after.app.roles = before.app.roles
    after.script.answers = ["a summary<|im_end|>", "a summary<|im_end|>"]
    after.engine()
    for session in ("2", "1"):
        await after.chat([{**ASK, "content": f"sum up {session}"}], headers={"x-session-id": session})
    roles = [record.role_hint for record in await after.records()]
    assert roles == [LeafRole.SUB_AGENT, LeafRole.SUB_AGENT_SUMMARY, LeafRole.MAIN_SUMMARY]
    await after.stop()
    await before.stop()


async def test_stalls_of_a_finished_call_survive_a_restart(rendering: Rendering, tmp_path: Path) -> None:
    before = await RunningGateway.start(rendering, tmp_path, stall_alarm_s=0.05)
    before.script.answers = ["an answer<|im_end|>"]
    engine = before.engine(pause_after=1)
    asking = asyncio.create_task(before.chat([ASK]))
    await engine.waiting.wait()
    while not next(iter(before.app.executions[7, 1].calls.values())).stalls:
        await asyncio.sleep(0.005)
    engine.go.set()
    await asking
    after = await restarted(before, tmp_path)
    assert asdict(after.app.executions[7, 1].account) == asdict(before.app.executions[7, 1].account)
    assert after.app.executions[7, 1].account.stalls == 1
    await after.stop()
    await before.stop()


def test_the_seal_that_is_sent_has_every_counter_of_the_account() -> None:
    names = {field.name for field in fields(Account)}
    assert names <= set(ExecutionSealed.__struct_fields__)


async def test_a_sealed_attempt_is_told_again_for_a_while_and_then_costs_nothing(
    gateway: RunningGateway, tmp_path: Path
) -> None:
    gateway.engine()
    gateway.script.answers = ["x<|im_end|>"]
    await gateway.chat([ASK])
    sealed = await gateway.app.close_execution(7, 1)
    gateway.app.forget_sealed(60.0)
    gateway.app.open_execution(7, 1, "key")
    assert gateway.app.executions == {}
    assert await gateway.app.close_execution(7, 1) == sealed and sealed[0].calls == 1
    after = await restarted(gateway, tmp_path)
    assert (await after.app.close_execution(7, 1))[0] == sealed[0]
    await after.stop()
    gateway.app.open_execution(8, 1, "key")
    await gateway.app.close_execution(8, 1)
    gateway.app.forget_sealed(-1.0)
    assert gateway.app.sealed == {} and gateway.app.executions == {}


def test_a_seal_is_kept_longer_than_its_message_can_be_under_way() -> None:
    assert SEALED_KEPT_S > SEND_TIMEOUT_S + SILENT_HOST_S


async def test_a_restart_reads_the_log_once_and_cuts_its_torn_tail(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.engine()
    gateway.script.answers = ["x<|im_end|>"]
    await gateway.chat([ASK])
    await gateway.app.log.sync()
    whole = gateway.path.read_bytes()
    torn = gateway.path.with_name("torn.log")
    torn.write_bytes(whole + b"torn")
    logged = read_for_restore(torn)

    def again(path: Path) -> int:
        raise AssertionError(f"{path} is read a second time")

    monkeypatch.setattr("gyre_hpc.gateway.call_log._end_of_good_frames", again)
    log = CallLog(torn, 2, end=logged.offset)
    log.close()
    assert torn.read_bytes().startswith(whole) and len(read_for_restore(torn).executions[7, 1]) == 1
