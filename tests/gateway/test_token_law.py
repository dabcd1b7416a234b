"""The token law at run time: renderers, engines and logs that lie are found out, and the execution is marked."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gyre_hpc.engines.client import Chunk
from gyre_hpc.engines.wire import EncodedIds, ids_xxh3
from gyre_hpc.gateway.call_log import CallLog, read_call_log
from gyre_hpc.gateway.frames import MAGIC, CallOpened, LogOpened, decode_frames
from gyre_hpc.gateway.rendering import Rendering
from gyre_hpc.records import CellId, FinishReason, Version

from .fakes import RunningGateway, ScriptedEngine

ASK = {"role": "user", "content": "go"}
ON = {"role": "user", "content": "on"}
FIRST, SECOND = "one<|im_end|>", "two<|im_end|>"


@dataclass
class Telling(ScriptedEngine):
    """Says which prompt it was given; a liar drops `lost` ids of it first."""

    lost: int = 0

    async def generate(
        self,
        rid: str,
        input_ids: EncodedIds,
        max_new_tokens: int,
        kv_key: str,
        stop_token_ids: Sequence[int] = (),
    ) -> AsyncIterator[Chunk]:
        given = input_ids.ids()[self.lost :]
        async for chunk in super().generate(rid, input_ids, max_new_tokens, kv_key, stop_token_ids):
            yield msgspec.structs.replace(chunk, prompt_xxh3=ids_xxh3(given))


def telling(gateway: RunningGateway, cell: int, **behaviour: Any) -> Telling:
    address = f"http://telling-{cell}"
    engine = gateway.engines[address] = Telling(gateway.script, **behaviour)
    gateway.app.router.route(CellId(cell), address, 4, Version(0))
    return engine


async def two_calls(gateway: RunningGateway) -> None:
    gateway.script.answers = [FIRST, SECOND]
    answer = await gateway.chat([ASK])
    await gateway.chat([ASK, answer["choices"][0]["message"], ON])


def law_breaks(gateway: RunningGateway) -> int:
    return gateway.app.executions[7, 1].account.law_breaks


async def test_honest_parts_are_not_marked(gateway: RunningGateway) -> None:
    telling(gateway, 0, die_after=1)
    telling(gateway, 1)
    await two_calls(gateway)
    assert [(record.forks, record.lawful) for record in await gateway.records()] == [((), True)] * 2
    assert law_breaks(gateway) == 0 and len(gateway.faults) == 1


async def test_an_engine_that_was_given_another_prompt_serves_nothing_and_marks_the_execution(
    gateway: RunningGateway, tmp_path: Path
) -> None:
    liar = telling(gateway, 0, lost=1)
    honest = telling(gateway, 1)
    await two_calls(gateway)
    first, second = await gateway.records()
    assert (first.forks, first.lawful, second.forks) == (("engine_prompt",), False, ())
    assert first.finish is FinishReason.STOP and len(liar.requests) == 1 and len(honest.requests) == 2
    assert honest.requests[0][1] == liar.requests[0][1]
    assert gateway.faults[0][1].startswith("PromptChanged")
    assert law_breaks(gateway) == 1
    (tmp_path / "again").mkdir()
    shutil.copy(gateway.path, tmp_path / "again")
    again = await RunningGateway.start(gateway.app.rendering, tmp_path / "again")
    assert law_breaks(again) == 1
    await again.stop()
    account, incomplete = await gateway.app.close_execution(7, 1)
    assert account.law_breaks == 1 and not incomplete


async def test_a_renderer_that_spells_a_past_output_anew_marks_the_execution(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.engine(0)
    extend = gateway.app.rendering.extend

    def retokenised(prompt: Any, output: Any, *rest: Any) -> list[int] | None:
        tail = extend(prompt, output, *rest)
        return None if tail is None else [tail[0] + 1, *tail[1:]]

    monkeypatch.setattr(gateway.app.rendering, "extend", retokenised)
    await two_calls(gateway)
    assert [record.forks for record in await gateway.records()] == [(), ("token_law",)]
    assert law_breaks(gateway) == 1


async def test_a_renderer_that_rewrites_the_prompt_marks_the_execution_and_is_not_followed(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = gateway.engine(0)
    rendering = gateway.app.rendering
    bridge = rendering._renderer.bridge_to_next_turn

    def rewritten(*arguments: Any, **more: Any) -> Any:
        ids = list(bridge(*arguments, **more).token_ids)
        return SimpleNamespace(token_ids=[ids[0] + 1, *ids[1:]])

    monkeypatch.setattr(rendering._renderer, "bridge_to_next_turn", rewritten)
    await two_calls(gateway)
    messages = [ASK, {"role": "assistant", "content": "one"}, ON]
    assert engine.requests[1][1] == rendering.render(messages)
    assert [record.forks for record in await gateway.records()] == [(), ("token_law", "bridge_refused")]
    assert law_breaks(gateway) == 1


async def test_a_stop_token_that_the_template_closes_itself_is_lawful(gateway: RunningGateway) -> None:
    gateway.engine(0)
    gateway.script.answers = ["one<|endoftext|>", SECOND]
    answer = await gateway.chat([ASK])
    await gateway.chat([ASK, answer["choices"][0]["message"], ON])
    assert [record.forks for record in await gateway.records()] == [(), ()]


async def test_a_log_that_gives_other_ids_than_were_sent_is_unlawful(
    rendering: Rendering, tmp_path: Path
) -> None:
    gateway = await RunningGateway.start(rendering, tmp_path)
    gateway.engine(0)
    await two_calls(gateway)
    await gateway.stop()
    data = gateway.path.read_bytes()[len(MAGIC) :]
    frames = [frame for frame, _ in decode_frames(data, gateway.path, 0, final=True)]
    forged = CallLog(tmp_path / "gateway-000002.log", 1)
    for frame in frames:
        if isinstance(frame, CallOpened) and frame.base:
            frame = msgspec.structs.replace(frame, shared=frame.shared - 1)
        if not isinstance(frame, LogOpened):
            forged.append(frame)
    forged.close()
    assert [record.forks for record in read_call_log(gateway.path)] == [(), ()]
    assert [record.forks for record in read_call_log(forged.path)] == [(), ("token_law",)]
