"""OpenAI Responses: the vendor's client accumulates what we sent, and histories of its items live on recorded ids."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from gyre_hpc.gateway.canonical import History
from gyre_hpc.gateway.dialects.base import Refusal
from gyre_hpc.gateway.dialects.responses import OpenAIResponses, read_turns
from gyre_hpc.gateway.rendering import Rendering
from gyre_hpc.records import CallRecord, FinishReason

from .fakes import RunningGateway

TOOLS: Any = [
    {"type": "function", "name": "bash", "parameters": {"type": "object"}, "strict": False},
    {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"}},
    {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn", "parameters": {}}]},
    {"type": "web_search"},
]  # fmt: skip
ASK: Any = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "be brief"}]},
    {"role": "user", "content": "list"},
]


def call(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


THINKING = "<think>\nhm\n</think>\n\n"
CALLS = "\n".join(
    [
        call("bash", {"command": "ls", "n": 2}),
        call("apply_patch", {"input": "*** Begin Patch"}),
        call("agents.spawn", {}),
    ]
)
ANSWER = f"{THINKING}looking\n{CALLS}<|im_end|>"


def client(gateway: RunningGateway) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0)


def items(response: Any) -> list[dict[str, Any]]:
    """Output items as a client echoes them."""
    own = {"parsed", "parsed_arguments"}
    found = json.loads(
        json.dumps([item.to_dict() for item in response.output]),
        object_hook=lambda o: {k: v for k, v in o.items() if k not in own},
    )
    return list(found)


def results(response: Any) -> list[dict[str, Any]]:
    return [
        {"type": f"{item.type}_output", "call_id": item.call_id, "output": f"result of {item.name}"}
        for item in response.output
        if item.type in ("function_call", "custom_tool_call")
    ]


def continues(child: CallRecord, parent: CallRecord) -> bool:
    known = [*parent.prompt_ids, *parent.output_ids]
    return child.prompt_ids[: len(known)].tolist() == known


async def test_the_vendors_client_accumulates_the_answer_that_is_not_streamed(
    gateway: RunningGateway,
) -> None:
    gateway.engine()
    gateway.script.answers = [ANSWER, ANSWER]
    async with client(gateway).responses.stream(model="m", input=ASK, tools=TOOLS) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    whole = await client(gateway).responses.create(model="m", input=ASK, tools=TOOLS)
    first, second = await gateway.records()

    def plain(response: Any, record: CallRecord) -> str:
        return json.dumps(items(response), sort_keys=True).replace(record.call, "CALL")

    assert plain(final, first) == plain(whole, second)
    assert final.status == whole.status == "completed" and whole.model == "m"
    assert [item.type for item in final.output] == [
        "reasoning", "message", "function_call", "custom_tool_call", "function_call",
    ]  # fmt: skip
    assert final.output_text == "looking" and events[-1].type == "response.completed"
    usage = whole.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens) == (len(second.prompt_ids), len(second.output_ids))


async def test_every_event_has_the_vendors_shape_and_deltas_add_up(gateway: RunningGateway) -> None:
    gateway.engine()
    gateway.script.answers = [ANSWER]
    raw = await client(gateway).responses.create(model="m", input=ASK, tools=TOOLS, stream=True)
    events = [event async for event in raw]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    texts: dict[int, str] = {}
    for event in events:
        type(event).model_validate_json(event.to_json())
        if event.type.endswith(".delta"):
            delta: Any = event
            texts[delta.output_index] = texts.get(delta.output_index, "") + delta.delta
    assert texts == {0: "hm", 1: "looking", 2: '{"command": "ls", "n": 2}', 3: "*** Begin Patch", 4: "{}"}
    opened = [event.output_index for event in events if event.type == "response.output_item.added"]
    closed = [event.output_index for event in events if event.type == "response.output_item.done"]
    assert opened == closed == [0, 1, 2, 3, 4]


async def test_calls_are_written_as_their_tools_want_them(gateway: RunningGateway) -> None:
    gateway.engine()
    gateway.script.answers = [ANSWER]
    response = await client(gateway).responses.create(model="m", input=ASK, tools=TOOLS)
    function, custom, inner = response.output[2:]
    assert function.type == inner.type == "function_call" and custom.type == "custom_tool_call"
    assert (inner.namespace, inner.name) == ("agents", "spawn") and custom.input == "*** Begin Patch"
    (record,) = await gateway.records()
    prompt = gateway.app.rendering.text(record.prompt_ids.tolist())
    assert "agents.spawn" in prompt and "start: X" in prompt and "web_search" not in prompt


@pytest.mark.parametrize("dropped", [(), ("id",), ("id", "status"), ("content", "summary")])
async def test_a_history_of_items_lives_on_recorded_ids(
    gateway: RunningGateway, dropped: tuple[str, ...]
) -> None:
    gateway.engine()
    gateway.script.answers = [ANSWER, f"{THINKING}found<|im_end|>", "bye<|im_end|>"]
    history: list[Any] = list(ASK)
    for question in ("and?", "so?", ""):
        response = await client(gateway).responses.create(model="m", input=history, tools=TOOLS)
        echoed = [
            {k: v for k, v in i.items() if k not in dropped or i["type"] == "message"}
            for i in items(response)
        ]
        mid_turn = {"role": "developer", "content": "a reminder"}
        history += [*echoed, *reversed(results(response)), mid_turn, {"role": "user", "content": question}]
    first, second, third = await gateway.records()
    assert continues(second, first) and continues(third, second)
    assert not gateway.app.executions[7, 1].lineage.mismatches
    delta = gateway.app.rendering.text(
        second.prompt_ids[len(first.prompt_ids) + len(first.output_ids) :].tolist()
    )
    places = [delta.index(text) for text in ("result of spawn", "result of bash", "a reminder", "and?")]
    assert places == sorted(places)


async def test_an_answer_whose_client_lost_everything_but_the_reasoning_is_known(
    gateway: RunningGateway,
) -> None:
    """A harness that reconnects keeps the reasoning item and asks again."""
    gateway.engine()
    gateway.script.answers = [f"{THINKING}one<|im_end|>", "two<|im_end|>"]
    response = await client(gateway).responses.create(model="m", input=ASK)
    again = await client(gateway).responses.create(model="m", input=[*ASK, *items(response)[:1]])
    assert again.output_text == "two" and len(await gateway.records()) == 2


async def test_two_answers_in_a_row_are_two_turns(gateway: RunningGateway) -> None:
    gateway.engine()
    gateway.script.answers = ["one<|im_end|>", "two<|im_end|>", "three<|im_end|>"]
    first = await client(gateway).responses.create(model="m", input=ASK)
    more = [*ASK, *items(first), {"role": "user", "content": "next"}]
    second = await client(gateway).responses.create(model="m", input=more)
    joined = [*ASK, *items(first), *items(second), {"role": "user", "content": "x"}]
    request = OpenAIResponses().read(json.dumps({"input": joined}).encode(), History())
    turns = [request.read(raw)[0] for raw in request.raws]
    assert [turn.content for turn in turns if turn.role == "assistant"] == ["one", "two"]


async def test_progress_events_keep_the_connection_alive(rendering: Rendering, tmp_path: Path) -> None:
    gateway = await RunningGateway.start(rendering, tmp_path, keepalive_s=0.02)
    engine = gateway.engine(pause_after=2)
    gateway.script.answers = ["hello<|im_end|>"]
    kinds: list[str] = []
    async with client(gateway).responses.stream(model="m", input="hi") as stream:
        async for event in stream:
            kinds.append(event.type)
            if kinds[-3:] == ["response.in_progress"] * 3 and not engine.go.is_set():
                assert set(kinds) == {"response.created", "response.in_progress"}
                engine.go.set()
        final = await stream.get_final_response()
    assert final.output_text == "hello" and kinds[0] == "response.created"
    await gateway.stop()


async def test_white_space_keeps_a_whole_response_alive(rendering: Rendering, tmp_path: Path) -> None:
    gateway = await RunningGateway.start(rendering, tmp_path, keepalive_s=0.02)
    engine = gateway.engine(pause_after=2)
    gateway.script.answers = ["hello<|im_end|>"]
    asyncio.get_running_loop().call_later(0.1, engine.go.set)
    assert (await client(gateway).responses.create(model="m", input="hi")).output_text == "hello"
    await gateway.stop()


async def test_an_answer_cut_by_length_is_incomplete(gateway: RunningGateway) -> None:
    gateway.engine()
    gateway.script.answers = ["abcdef<|im_end|>", "abcdef<|im_end|>"]
    whole = await client(gateway).responses.create(model="m", input=ASK, max_output_tokens=3)
    raw = await client(gateway).responses.create(model="m", input="go", max_output_tokens=3, stream=True)
    last = [event async for event in raw][-1]
    assert last.type == "response.incomplete" and whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens" and whole.output_text == "abc"
    assert [record.finish for record in await gateway.records()] == [FinishReason.LENGTH] * 2


async def test_overflow_has_the_code_that_starts_compaction(rendering: Rendering, tmp_path: Path) -> None:
    gateway = await RunningGateway.start(rendering, tmp_path, max_context=20)
    with pytest.raises(openai.BadRequestError) as caught:
        await client(gateway).responses.create(model="m", input="word " * 50)
    assert caught.value.code == "context_length_exceeded" and "context window" in str(caught.value)
    assert await gateway.records() == []
    await gateway.stop()


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [3]}, "input"),
        ({"input": [[]]}, "input"),
        ({}, "input"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "conversation": "c"}, "conversation"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "prompt": {"id": "p"}}, "prompt"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "tools": [3]}, "tools"),
        ({"input": "x", "tools": 3}, "tools"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"input": [{"role": "alien", "content": "x"}]}, "alien"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input_image"),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}]},
            "input_image",
        ),
    ],
)  # fmt: skip
async def test_what_cannot_be_served_is_refused_by_name(
    gateway: RunningGateway, body: Any, named: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=named):
        await client(gateway).post("/responses", body={"model": "m", **body}, cast_to=object)
    assert await gateway.records() == []


def test_instructions_stand_before_everything_else() -> None:
    request = OpenAIResponses().read(b'{"instructions": "be kind", "input": "hi"}', History())
    assert [(m["role"], m["content"]) for m in request.messages(0, 2)] == [
        ("system", "be kind"),
        ("user", "hi"),
    ]


def test_lone_surrogates_do_not_end_a_run() -> None:
    request = OpenAIResponses().read(b'{"input": [{"role": "user", "content": "\\ud83d"}]}', History())
    assert request.messages(0, 1)[0]["content"] == "\ufffd"


def test_an_unknown_role_is_refused_before_it_is_kept() -> None:
    history = History()
    with pytest.raises(Refusal):
        OpenAIResponses().read(b'{"input": [{"role": "alien"}]}', history)
    assert not history.units


@pytest.mark.parametrize("kept", ["id", "encrypted_content"])
def test_reasoning_names_its_call_by_either_handle(kept: str) -> None:
    handles = {"id": "rs_e7a1c0_0", "encrypted_content": "call:e7a1c0"}
    item = {"type": "reasoning", "summary": [], "content": None, kept: handles[kept]}
    (turn,) = read_turns(msgspec.Raw(json.dumps([item]).encode()))
    assert turn.calls == {"e7a1c0"}
