"""A harness that keeps a history in one dialect and echoes answers the way real harnesses bend them."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

from gyre_hpc.gateway.canonical import History, Request
from gyre_hpc.gateway.dialects.anthropic import AnthropicMessages
from gyre_hpc.gateway.dialects.base import Dialect, Reply
from gyre_hpc.gateway.dialects.chat import ChatCompletions
from gyre_hpc.gateway.dialects.responses import OpenAIResponses
from gyre_hpc.gateway.lineage import Lineage, Prompt
from gyre_hpc.gateway.rendering import ParsedAnswer, Rendering
from gyre_hpc.records import FinishReason

Json = dict[str, Any]
DIALECTS: list[Callable[[], Dialect]] = [AnthropicMessages, ChatCompletions, OpenAIResponses]


def untidy(rendering: Rendering, text: str, chance: random.Random) -> list[int]:
    """Ids that spell `text` but not as the tokenizer would split it."""
    ids: list[int] = []
    for piece in text.replace("<", "\0<").replace(">", ">\0").split("\0"):
        if rendering.tokenizer.convert_tokens_to_ids(piece) is not None:
            ids += rendering.tokenizer.encode(piece)
            continue
        while piece:
            cut = chance.randint(1, 4)
            ids += rendering.tokenizer.encode(piece[:cut])
            piece = piece[cut:]
    return ids


class Harness:
    """Keeps a history in one dialect and echoes answers the way real harnesses bend them."""

    def __init__(self, rendering: Rendering, dialect: Dialect, chance: random.Random) -> None:
        self.rendering, self.dialect, self.chance = rendering, dialect, chance
        self.history, self.lineage = History(), Lineage(rendering)
        self.messages: list[Json] = []
        self.system: str | None = None
        self.calls = 0
        self.parsed: dict[str, ParsedAnswer] = {}

    def request(self, tools: list[Json] | None = None) -> Request:
        return self.dialect.read(json.dumps(self.body(tools)).encode(), self.history)

    def body(self, tools: list[Json] | None = None) -> Json:
        body: Json = {"model": "m", "max_tokens": 10, "messages": self.bent()}
        if self.dialect.name == "openai-responses":
            body["input"] = body.pop("messages")
        if self.system:
            body["system"] = self.system
        if tools:
            body["tools"] = tools
        return body

    def bent(self) -> list[Json]:
        """The history as this request spells it: strings and blocks flip, cache marks move."""
        result = []
        for message in self.messages:
            content = message.get("content")
            if isinstance(content, str) and content and self.chance.random() < 0.5:
                block: Json = {"type": "text", "text": content}
                if self.chance.random() < 0.5:
                    block["cache_control"] = {"type": "ephemeral"}
                message = {**message, "content": [block]}
            result.append(message)
        return result

    def answer(self, prompt: Prompt, output: list[int]) -> tuple[str, ParsedAnswer]:
        name = f"e1a1c{self.calls}"
        self.calls += 1
        parsed = self.rendering.parse(output)
        self.lineage.answered(name, prompt.digest, output, parsed)
        prompt.context.call = prompt.context.call or name
        self.parsed[name] = parsed
        return name, parsed

    def echo(self, name: str, parsed: ParsedAnswer) -> list[str]:
        """Append the answer as received, bent; the tool handles to answer."""
        reply = Reply(name, "m", 0, parsed, FinishReason.STOP, None, 1, 1, 0)
        body = json.loads(self.dialect.answer(reply))
        if self.dialect.name == "openai-chat":
            message = body["choices"][0]["message"]
            for call in message.get("tool_calls") or []:
                call["function"]["arguments"] = json.dumps(bend(json.loads(call["function"]["arguments"])))
            if self.chance.random() < 0.5:
                message.pop("reasoning_content", None)
            if not message.get("content") and self.chance.random() < 0.5:
                message.pop("content", None)
            self.messages.append(message)
            return [call["id"] for call in message.get("tool_calls") or []]
        if self.dialect.name == "openai-responses":
            return self.echo_items(body["output"])
        blocks = [
            {**block, "input": bend(block["input"])} if "input" in block else block
            for block in body["content"]
        ]
        if self.chance.random() < 0.5:
            blocks = [block for block in blocks if block["type"] != "thinking"] or blocks
        if self.chance.random() < 0.3:
            blocks.insert(0, {"type": "thinking", "thinking": "", "signature": f"keep:{name}"})
        self.messages.append({"role": "assistant", "content": blocks})
        return [block["id"] for block in blocks if block["type"] == "tool_use"]

    def echo_items(self, items: list[Json]) -> list[str]:
        """Items of a Responses answer: arguments re-written, reasoning or ids lost."""
        for item in items:
            if "arguments" in item:
                item["arguments"] = json.dumps(bend(json.loads(item["arguments"])))
        if self.chance.random() < 0.3:
            items = [item for item in items if item["type"] != "reasoning"]
        lost = {"id", "status"} if self.chance.random() < 0.3 else set()
        self.messages += [{k: v for k, v in item.items() if k not in lost} for item in items]
        return [item["call_id"] for item in items if "call_id" in item]

    def results(self, handles: list[str], texts: list[str]) -> None:
        pairs = list(zip(handles, texts, strict=False))
        self.chance.shuffle(pairs)
        if self.dialect.name == "openai-chat":
            self.messages += [{"role": "tool", "tool_call_id": h, "content": t} for h, t in pairs]
        elif self.dialect.name == "openai-responses":
            self.messages += [{"type": "function_call_output", "call_id": h, "output": t} for h, t in pairs]
        else:
            blocks = [{"type": "tool_result", "tool_use_id": h, "content": t} for h, t in pairs]
            self.messages.append({"role": "user", "content": blocks})


def bend(arguments: Json) -> Json:
    """Keys in another order, floats for ints: how a parsed and re-written object comes back."""
    return {
        key: float(value) if type(value) is int else value
        for key, value in sorted(arguments.items(), reverse=True)
    }


class Faithful(random.Random):
    """Chance that never bends an echo but still splits texts at random."""

    def random(self) -> float:
        return 0.99

    def getrandbits(self, k: int) -> int:
        return super().getrandbits(k)


def answered(harness: Harness, reasoning: str, text: str) -> tuple[str, list[int]]:
    """One more answer to the present history: its call and prompt + output ids. Nothing is echoed yet."""
    prompt = harness.lineage.prompt(harness.request())
    think = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
    output = untidy(harness.rendering, f"{think}{text}<|im_end|>", harness.chance)
    name, _ = harness.answer(prompt, output)
    return name, prompt.context.ids().tolist() + output


def begun(rendering: Rendering, dialect: Dialect, seed: int = 1) -> Harness:
    harness = Harness(rendering, dialect, Faithful(seed))
    harness.messages = [{"role": "user", "content": "start"}]
    return harness


def echoed(harness: Harness, name: str, before: list[Json], follow: str = "go on") -> list[int]:
    """Ids of the prompt that continues `before` behind the call's answer."""
    harness.messages = copy.deepcopy(before)
    handles = harness.echo(name, harness.parsed[name])
    if handles:
        harness.results(handles, ["ok"] * len(handles))
    harness.messages.append({"role": "user", "content": follow})
    return harness.lineage.prompt(harness.request()).context.ids().tolist()
