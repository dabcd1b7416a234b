"""The fault matrix: at every phase of an answer, every fault, under every dialect, streamed and not, all at once.

Law: no client sees a fault; what it has in hand is what was recorded; the record's log-probabilities are those of the
undisturbed model over the joined ids, sampled once; and the next call lives on the recorded ids.
"""

from __future__ import annotations

import asyncio
import enum
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gyre_hpc.records import CallRecord, Delivery

from .clients import DIALECTS, Client, Outcome
from .proxy import Phase, Treatment
from .rig import Cell, Rig, rigged
from .speaking_model import write_speaking_model

CLIENTS = [(dialect, stream) for dialect in DIALECTS for stream in (True, False)]


class Fault(enum.StrEnum):
    """What goes wrong."""

    ABORT = "abort"
    RESET = "reset"
    HANG = "hang"
    GATEWAY_KILLED = "gateway_killed"
    ENGINE_KILLED = "engine_killed"
    CONTROLLER_KILLED = "controller_killed"


@pytest.fixture(scope="session")
def speaking_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speaking_model(tmp_path_factory.mktemp("speaking"))


async def plant(rig: Rig, fault: Fault, phase: Phase, struck: Cell, spare: Cell) -> None:
    """Strike the cell that runs all calls when each of them is in the phase; the spare cell is there to go on."""
    treatment = {Fault.ABORT: Treatment.ABORT, Fault.RESET: Treatment.RESET}.get(fault, Treatment.HOLD)
    struck.proxy.arm(phase, treatment)
    await struck.proxy.until(caught=len(CLIENTS))
    match fault:
        case Fault.ABORT | Fault.RESET:
            rig.route(spare)
        case Fault.HANG:
            rig.route(spare)
            struck.send(signal.SIGSTOP)
        case Fault.ENGINE_KILLED:
            struck.send(signal.SIGKILL)
            await struck.engine.wait()
            del rig.controller.routes[struck.number]
            rig.route(spare)
        case Fault.GATEWAY_KILLED:
            await rig.kill_worker()
        case Fault.CONTROLLER_KILLED:
            await rig.kill_controller()
            rig.route(spare)


async def strike(rig: Rig, fault: Fault, phase: Phase, struck: Cell, spare: Cell) -> None:
    """One fault in one phase, for all clients together."""
    rig.unroute(spare)
    rig.route(struck)
    executions = [await rig.execution() for _ in CLIENTS]
    clients = [Client(*kind, url) for kind, (_, url) in zip(CLIENTS, executions, strict=True)]
    asked: list[dict[str, Any]] = [{"role": "user", "content": f"{fault} {phase}"}]
    struck.proxy.arm(None)
    planted = asyncio.create_task(plant(rig, fault, phase, struck, spare))
    await asyncio.sleep(0)
    outcomes = await asyncio.gather(*(client.ask(asked) for client in clients))
    await planted
    if fault is Fault.HANG:
        struck.send(signal.SIGCONT)
    struck.proxy.arm(None)
    for client in clients:
        client.max_tokens = 2
    await asyncio.gather(
        *(client.ask([*asked, *outcome.echo]) for client, outcome in zip(clients, outcomes, strict=True))
    )
    for (execution, _), client, outcome in zip(executions, clients, outcomes, strict=True):
        sealed = await rig.controller.close_execution(execution)
        assert (sealed.calls, sealed.calls_lost, sealed.incomplete) == (2, 0, False), (fault, phase, client)
        engine_failed = fault is not Fault.GATEWAY_KILLED and phase is not Phase.AFTER_LAST_TOKEN
        assert sealed.calls_rerouted >= engine_failed, (fault, phase, client)
        first, second = rig.records(execution)
        assert outcome.repeats == 0 or fault is Fault.GATEWAY_KILLED, (fault, phase, client)
        judge(rig, first, outcome)
        continues(first, second)


def judge(rig: Rig, record: CallRecord, outcome: Outcome) -> None:
    """What the client has is what was sampled, once, by the model that was never disturbed."""
    ids = record.output_ids.tolist()
    answer = rig.rendering.parse(ids)
    assert outcome.thinking == answer.reasoning and outcome.text == answer.content
    assert [arguments for _, arguments in outcome.tools] == [
        json.loads(call.arguments) for call in answer.tool_calls
    ]
    assert outcome.thinking and outcome.text and outcome.tools
    assert (outcome.output_tokens, outcome.prompt_tokens) == (len(ids), len(record.prompt_ids))
    assert (record.delivery, record.accepted) == (Delivery.COMPLETE, True)
    prompt = record.prompt_ids.tolist()
    expected = undisturbed(rig.layout.model, prompt, ids)
    np.testing.assert_allclose(record.logprobs, expected, atol=1e-5, rtol=0)


def undisturbed(model: Path, prompt: list[int], ids: list[int]) -> Any:
    """Log-probabilities of `ids` behind `prompt` in one plain forward pass of transformers, in float64."""
    import torch
    from transformers import Qwen3ForCausalLM

    with torch.no_grad():
        network = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float64)
        table = network(torch.tensor([prompt + ids])).logits[0].log_softmax(-1)
    return table[torch.arange(len(prompt) - 1, len(prompt) + len(ids) - 1), torch.tensor(ids)].numpy()


def continues(parent: CallRecord, child: CallRecord) -> None:
    known = [*parent.prompt_ids, *parent.output_ids]
    assert child.prompt_ids[: len(known)].tolist() == known


async def strike_all(
    root: Path, model: Path, strikes: Sequence[tuple[Fault, Phase]], deliver: str = "answer"
) -> None:
    """Every strike in turn on one rig; a cell that dies with it is replaced."""
    async with rigged(root, model, deliver) as rig:
        deaths = sum(fault in (Fault.ENGINE_KILLED, Fault.CONTROLLER_KILLED) for fault, _ in strikes)
        cells = list(await asyncio.gather(*(rig.cell() for _ in range(deaths + 1 + (deaths == 0)))))
        for fault, phase in strikes:
            struck, spare = cells[:2]
            await strike(rig, fault, phase, struck, spare)
            if fault in (Fault.ENGINE_KILLED, Fault.CONTROLLER_KILLED):
                cells.remove(struck)
                await struck.proxy.close()


DIAGONAL = [
    (Fault.ABORT, Phase.MID_THINKING),
    (Fault.RESET, Phase.MID_TEXT),
    (Fault.HANG, Phase.BEFORE_FIRST_TOKEN),
    (Fault.GATEWAY_KILLED, Phase.MID_TOOL_CALL),
    (Fault.ENGINE_KILLED, Phase.AFTER_LAST_TOKEN),
    (Fault.CONTROLLER_KILLED, Phase.MID_TEXT),
]


@pytest.mark.timeout(900)
async def test_no_client_sees_a_fault(tmp_path: Path, speaking_model: Path) -> None:
    await strike_all(tmp_path, speaking_model, DIAGONAL)


@pytest.mark.full
@pytest.mark.parametrize("phase", list(Phase))
async def test_no_client_sees_any_fault_in_any_phase(
    tmp_path: Path, speaking_model: Path, phase: Phase
) -> None:
    await strike_all(tmp_path, speaking_model, [(fault, phase) for fault in Fault])


@pytest.mark.full
@pytest.mark.parametrize("phase", list(Phase))
async def test_what_happens_to_an_engine_is_not_seen_in_answers_that_leave_in_parts(
    tmp_path: Path, speaking_model: Path, phase: Phase
) -> None:
    """Such a stream lives as long as its gateway."""
    strikes = [(fault, phase) for fault in Fault if fault is not Fault.GATEWAY_KILLED]
    await strike_all(tmp_path, speaking_model, strikes, "blocks")
