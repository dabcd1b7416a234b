"""Messages to token ids and back, for one model: the only module that knows the `renderers` library.

Called by the gateway for every prompt and answer, and by the warm start so that demonstrations have the very ids a
policy meets later. Messages are in the OpenAI shape (`role`, `content`, `reasoning_content`, `tool_calls`); tools are
OpenAI tool objects (`{"type": "function", "function": {...}}`), printed as they are.
Laws: `render` ends with the generation prompt; `bridge(p, o, m)` starts with `p + o` (o cut behind its turn close, or
closed when the output was cut by length) and never re-tokenises either; thinking of past turns is kept.
"""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
from msgspec import structs
from renderers import create_renderer
from renderers.base import ParsedResponse, ToolCallParseStatus
from renderers.configs import config_from_name
from tokenizers import Tokenizer

from gyre_hpc.errors import ConfigError, MissingInput
from gyre_hpc.records import Int32

Message = Mapping[str, Any]
Tool = Mapping[str, Any]
Ids = Sequence[int] | Int32

TAIL_BRIDGE = frozenset({"qwen3", "qwen3.5", "qwen3.6", "qwen3.8"})
"""Renderers whose bridge reads only the prompt behind its last turn close, which is the same for all prompts."""
SCAFFOLD_CHARS, SCAFFOLD_TEXTS = 32, 4096
INLINE_SYSTEM_MARK = "<system-reminder>\n{}\n</system-reminder>"
"""A system turn inside the conversation becomes this user turn where the renderer takes none: in place, never hoisted."""
_PROBE = {"role": "user", "content": "x"}
_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Texts are encoded one at a time: threads of the library would only be waited for.


class HuggingFaceTokenizer:
    """`tokenizers.Tokenizer` under the names that renderers call. Text may contain special tokens, as in the original."""

    def __init__(self, backend: Tokenizer, name_or_path: str) -> None:
        self.backend = backend
        self.name_or_path = name_or_path
        self.unk_token_id: int | None = None
        self.eos_token_id: int | None = backend.token_to_id("<|im_end|>")
        self._scaffold: dict[str, list[int]] = {}

    def encode(self, text: str, *_: Any, add_special_tokens: bool = False, **__: Any) -> list[int]:
        """Ids of a text. Renderers ask for the same few words of scaffold with every message: those are kept."""
        if len(text) > SCAFFOLD_CHARS or add_special_tokens:
            return self._encoded(text, add_special_tokens)
        ids = self._scaffold.get(text)
        if ids is None:
            ids = self._encoded(text, False)
            if len(self._scaffold) < SCAFFOLD_TEXTS:
                self._scaffold[text] = ids
        return ids.copy()

    def _encoded(self, text: str, special: bool) -> list[int]:
        """The way that does without offsets is there for batches only."""
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=special)
        return encoding.ids

    def decode(self, token_ids: Any, *_: Any, skip_special_tokens: bool = False, **__: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self.backend.token_to_id(tokens)
        return [self.backend.token_to_id(token) for token in tokens]


def load_tokenizer(model_dir: Path) -> HuggingFaceTokenizer:
    """The tokenizer of a model folder. Raises MissingInput when tokenizer.json is absent."""
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise MissingInput(f"{path}: no such file", fix="set model.path to a folder in Hugging Face layout")
    return HuggingFaceTokenizer(Tokenizer.from_file(str(path)), str(model_dir))


class AnswerStatus(enum.StrEnum):
    """How cleanly an answer parsed."""

    OK = "ok"
    MALFORMED_TOOL_CALL = "malformed_tool_call"
    """At least one tool call could not be read; its text stands in `content`."""
    OPEN_REASONING = "open_reasoning"
    """The generation ended inside its thinking block."""


class PromptRewritten(Exception):
    """A bridge that does not begin with the prompt it was given."""


class ParsedToolCall(msgspec.Struct, frozen=True):
    """One readable tool call. `arguments` is the JSON text of an object; `raw` is what the model wrote."""

    name: str
    arguments: str
    raw: str


class ParsedAnswer(msgspec.Struct, frozen=True):
    """One assistant turn as a harness sees it."""

    content: str
    reasoning: str
    tool_calls: tuple[ParsedToolCall, ...]
    status: AnswerStatus


class Rendering:
    """Render, bridge and parse for one model folder."""

    def __init__(self, model_dir: Path, renderer: str, thinking: bool) -> None:
        self.tokenizer = load_tokenizer(Path(model_dir))
        self._renderer = _create(self.tokenizer, renderer, thinking)
        self.stop_ids: tuple[int, ...] = tuple(self._renderer.get_stop_token_ids())
        self.tail_only = renderer in TAIL_BRIDGE
        self._probe_ids = self._ids([_PROBE], None, generation=False)
        self._think_end = self.tokenizer.encode("</think>")
        self._generation = self._ids([_PROBE], None, generation=True)[len(self._probe_ids) :]
        prefilled = "</think>" not in self.text(self._generation) and "<think>" in self.text(self._generation)
        self._before_answer = None if renderer == "qwen3" and not prefilled else self._generation
        self._prompt_tail = [self.stop_ids[0], *(self._before_answer or ())]
        self.inline_system = self._takes_inline_system()

    def _ids(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, *, generation: bool
    ) -> list[int]:
        rendered = self._renderer.render_ids(
            list(messages), tools=list(tools) if tools else None, add_generation_prompt=generation
        )
        return list(rendered)

    def _takes_inline_system(self) -> bool:
        try:
            self._ids([_PROBE, {"role": "system", "content": "x"}, _PROBE], None, generation=True)
        except ValueError:
            return False
        return True

    def _in_place(self, messages: Sequence[Message], *, first: bool) -> list[Message]:
        """Re-role system turns that are not the head, when the renderer refuses them."""
        if self.inline_system:
            return list(messages)
        return [
            {"role": "user", "content": INLINE_SYSTEM_MARK.format(message.get("content") or "")}
            if message["role"] == "system" and (index > 0 or not first)
            else message
            for index, message in enumerate(messages)
        ]

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> list[int]:
        """Prompt ids of a whole conversation, ending with the generation prompt."""
        return self._ids(self._in_place(messages, first=True), tools, generation=True)

    def bridge(
        self,
        previous_prompt: Ids,
        previous_output: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
    ) -> list[int] | None:
        """Prompt of the next turn in recorded ids, or None when it must be rendered afresh."""
        tail = self.extend(previous_prompt, previous_output, new_messages, tools)
        return None if tail is None else [*np.asarray(previous_prompt).tolist(), *tail]

    def extend(
        self,
        previous_prompt: Ids,
        previous_output: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
    ) -> list[int] | None:
        """What `bridge` appends to `previous_prompt` (not read when `tail_only`): the trimmed output and the delta.

        Raises PromptRewritten.
        """
        known = self._prompt_tail if self.tail_only else np.asarray(previous_prompt).tolist()
        bridged = self._renderer.bridge_to_next_turn(
            known,
            list(previous_output),
            self._in_place(new_messages, first=False),
            tools=list(tools) if tools else None,
        )
        if bridged is None:
            return None
        ids = list(bridged.token_ids)
        if ids[: len(known)] != known:
            raise PromptRewritten
        return ids[len(known) :]

    def turn(self, message: Message) -> list[int] | None:
        """Ids of an assistant turn that was not sampled here, as an output behind a generation prompt.

        None when the renderer prints such a turn differently from a generated one.
        """
        ids = self._ids([_PROBE, message], None, generation=False)
        head = len(self._probe_ids) + len(self._generation)
        if ids[:head] != self._probe_ids + self._generation:
            return None
        close = max((i for i in range(head, len(ids)) if ids[i] in self.stop_ids), default=-1)
        return None if close < 0 else ids[head : close + 1]

    def parse(self, output_ids: Sequence[int], tools: Sequence[Tool] | None = None) -> ParsedAnswer:
        """The assistant turn that these output ids spell. Unreadable tool calls stay as text."""
        parsed = self._parse(output_ids, tools)
        calls: list[ParsedToolCall] = []
        broken: list[str] = []
        for attempt in parsed.tool_calls:
            arguments = (
                _arguments_text(attempt.arguments) if attempt.status == ToolCallParseStatus.OK else None
            )
            if arguments is None or not attempt.name:
                broken.append(f"<tool_call>\n{attempt.raw}\n</tool_call>")
            else:
                calls.append(ParsedToolCall(str(attempt.name), arguments, attempt.raw))
        status = AnswerStatus.MALFORMED_TOOL_CALL if broken else AnswerStatus.OK
        if parsed.reasoning_complete is False:
            status = AnswerStatus.OPEN_REASONING
        content = "\n".join([parsed.content, *broken] if parsed.content else broken)
        return ParsedAnswer(content, parsed.reasoning_content or "", tuple(calls), status)

    @property
    def boundary_ids(self) -> frozenset[int]:
        """Ids behind which a part of an answer may be complete: the words of the scaffold."""
        return frozenset(self.tokenizer.backend.get_added_tokens_decoder())

    def completed(self, output_ids: Sequence[int]) -> ParsedAnswer:
        """The parts of the beginning of an answer that no further token changes: what `parse` of the whole begins with.

        Thinking once it is closed, text once a tool call has begun, each tool call that is closed and readable. A tool
        call inside open thinking is still thinking if that is closed later: whether it may be is asked of the parser.
        """
        parsed = self._parse(output_ids)
        later = self._parse([*output_ids, *self._think_end])
        if parsed.reasoning_complete is False or parsed.reasoning_content != later.reasoning_content:
            return ParsedAnswer("", "", (), AnswerStatus.OPEN_REASONING)
        answer = self.parse(output_ids)
        content = parsed.content if parsed.tool_calls else ""
        return structs.replace(answer, content=content, status=AnswerStatus.OK)

    def _parse(self, output_ids: Sequence[int], tools: Sequence[Tool] | None = None) -> ParsedResponse:
        offered = cast(Any, list(tools) if tools else None)
        return self._renderer.parse_response(list(output_ids), tools=offered, prompt_ids=self._before_answer)

    def text(self, ids: Sequence[int]) -> str:
        """Decoded text, special tokens included."""
        return self.tokenizer.decode(list(ids))


def _arguments_text(arguments: Any) -> str | None:
    """JSON text of an arguments object; None when it is no object or no valid JSON."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            return None
    if not isinstance(arguments, dict):
        return None
    try:
        text = _json.encode(arguments)
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(arguments, allow_nan=False)
    except ValueError:
        return None
    return text


def _create(tokenizer: HuggingFaceTokenizer, renderer: str, thinking: bool) -> Any:
    try:
        base = config_from_name(renderer)
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"model.renderer={renderer}: {error}", fix="name a renderer of the `renderers` package"
        ) from error
    if base is None:
        raise ConfigError("model.renderer=auto is not supported", fix="name the renderer, for example qwen3")
    wanted: dict[str, Any] = {"thinking_retention": "all"}
    if "enable_thinking" in type(base).model_fields:
        wanted["enable_thinking"] = thinking
    try:
        return create_renderer(cast(Any, tokenizer), cast(Any, type(base)(**wanted)))
    except AssertionError as error:
        raise ConfigError(
            f"{tokenizer.name_or_path}/tokenizer.json does not fit model.renderer={renderer}: {error}",
            fix="use a tokenizer whose special tokens are single tokens, or another renderer",
        ) from error
