"""A slow answer and a fast one of the same call, echoed, make the very same next prompt: keep-alives leave no trace."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gyre_hpc.gateway.parts import DeliverMode
from gyre_hpc.gateway.rendering import Rendering

from .fakes import RunningGateway
from .faults.clients import DIALECTS, Client

CALL = '<tool_call>\n{"name": "bash", "arguments": {"n": 9000.0, "command": "ls"}}\n</tool_call>'
ANSWERS = {
    "text": "looking  twice\n<|im_end|>",
    "calls": f"looking\n{CALL}\n{CALL}<|im_end|>",
    "bare-call": f"{CALL}<|im_end|>",
    "empty": "<|im_end|>",
}
ASK: Any = [{"role": "user", "content": "go"}]


async def next_prompt(
    rendering: Rendering,
    folder: Path,
    answer: str,
    client: tuple[str, bool],
    *,
    slow: bool,
    mode: DeliverMode,
) -> list[int]:
    """Ids of the prompt that follows the echo of `answer`."""
    folder.mkdir()
    gateway = await RunningGateway.start(rendering, folder, keepalive_s=0.02 if slow else 60.0)
    gateway.app.deliver = mode
    gateway.script.answers = [answer, "done<|im_end|>"]
    engine = gateway.engine(pause_after=len(rendering.tokenizer.encode(answer)) // 2 if slow else None)
    if slow:
        asyncio.get_running_loop().call_later(0.2, engine.go.set)
    asking = Client(*client, gateway.url, 300)
    outcome = await asking.ask(ASK)
    engine.pause_after = None
    await asking.ask([*ASK, *outcome.echo])
    first, second = await gateway.records()
    known = [*first.prompt_ids, *first.output_ids]
    assert second.prompt_ids[: len(known)].tolist() == known
    await gateway.stop()
    return second.prompt_ids.tolist()


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_the_pace_of_an_answer_does_not_show_in_the_next_prompt(
    model_dir: Path, tmp_path: Path, dialect: str, thinking: bool, answer: str
) -> None:
    rendering = Rendering(model_dir, "qwen3", thinking)
    text = f"<think>\n hm,\n\nso \n</think>\n\n{ANSWERS[answer]}" if thinking else ANSWERS[answer]
    prompts = [
        await next_prompt(rendering, tmp_path / f"{place}", text, (dialect, stream), slow=slow, mode=mode)
        for place, (stream, slow, mode) in enumerate(
            [
                (True, False, DeliverMode.ANSWER),
                (True, True, DeliverMode.ANSWER),
                (False, False, DeliverMode.ANSWER),
                (False, True, DeliverMode.ANSWER),
                (True, True, DeliverMode.BLOCKS),
            ]
        )
    ]
    assert all(prompt == prompts[0] for prompt in prompts)
