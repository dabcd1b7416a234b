"""An answer in the parts that dialects write: reasoning, text, tool calls; and which of them a client has already. Pure.

With `harness.deliver=blocks` parts leave while the generation goes on. Law: what was sent is a beginning of the final
answer, so a part leaves only once no further token can change it; what then still comes is the rest.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from gyre_hpc.gateway.rendering import ParsedAnswer, ParsedToolCall


class DeliverMode(enum.StrEnum):
    """When an answer leaves: whole, or each part as it is complete."""

    ANSWER = "answer"
    BLOCKS = "blocks"

    def of(self, stream: bool) -> DeliverMode:
        """The mode of one request: only a stream can bring an answer in parts."""
        return self if stream else DeliverMode.ANSWER


@dataclass(frozen=True)
class Reasoning:
    """All thinking of an answer."""

    text: str


@dataclass(frozen=True)
class Text:
    """Text; the `number`-th of the answer (a second one follows the tool calls when some cannot be read)."""

    number: int
    text: str


@dataclass(frozen=True)
class ToolCall:
    """The tool call with this index."""

    index: int
    call: ParsedToolCall


Part = Reasoning | Text | ToolCall


class Contradiction(Exception):
    """The final answer does not begin with what was sent: nothing that could be sent would make it right."""


@dataclass
class Sent:
    """What one client has of an answer."""

    reasoning: str = ""
    text: str = ""
    texts: int = 0
    tools: int = 0

    def rest(self, answer: ParsedAnswer) -> Iterator[Part]:
        """The parts of `answer` not sent yet, which count as sent from here on. Raises Contradiction."""
        if not (answer.reasoning.startswith(self.reasoning) and answer.content.startswith(self.text)):
            raise Contradiction("the text sent is not how the answer begins")
        if answer.reasoning != self.reasoning:
            if self.reasoning or self.text or self.tools:
                raise Contradiction("there is more thinking than was sent before")
            self.reasoning = answer.reasoning
            yield Reasoning(answer.reasoning)
        fresh = answer.content[len(self.text) :]
        if fresh:
            yield Text(self.texts, fresh)
            self.text, self.texts = answer.content, self.texts + 1
        for index in range(self.tools, len(answer.tool_calls)):
            yield ToolCall(index, answer.tool_calls[index])
        self.tools = max(self.tools, len(answer.tool_calls))
