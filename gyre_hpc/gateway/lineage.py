"""The token law: which ids a request's history has, from what was recorded and never from its text.

A `Context` is a conversation up to a point where the assistant generates, in ids. Contexts are found by the digest of
their messages, handles included. The prompt of a request is folded from the deepest known context: each later assistant
turn is spliced in as the recorded output of the call whose handle it echoes (turns without handles: by normalised
equality under the same context), or, when nobody here sampled it, as one rendered turn; the messages behind it are
bridged. Only where that fails is the conversation rendered afresh, and the reason counted. A child is known by its parent,
the call that was spliced and the messages behind it, so an echo that loses its handles later stays where it was.
Siblings that read the same (one prompt, two answers of equal text) are told apart by handle, else by echoed reasoning,
by what was delivered, by a later turn's handle; where all that says nothing the newest is taken and the doubt counted.
One `Lineage` per execution; pure.
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import xxhash

from gyre_hpc.engines.wire import EncodedIds
from gyre_hpc.gateway.canonical import (
    EchoedCall,
    Request,
    Turn,
    Unit,
    cut_back,
    digest,
    handle_call,
    normal_text,
    reasoning_mark,
)
from gyre_hpc.gateway.rendering import Ids, ParsedAnswer, PromptRewritten, Rendering
from gyre_hpc.records import Int32

MAX_TIPS = 4
"""Branches of one execution (main agent, sub-agents) whose latest prompt is kept encoded: about 6 bytes a token."""


class Mismatch(enum.StrEnum):
    """Why recorded ids could not be spliced."""

    FOREIGN_TURN = "foreign_turn"
    """An assistant turn that no call of this execution produced."""
    UNKNOWN_HANDLE = "unknown_handle"
    PARTIAL_ECHO = "partial_echo"
    """Some tool calls of the answer are missing from its echo."""
    EDITED_TEXT = "edited_text"
    AMBIGUOUS_ECHO = "ambiguous_echo"
    """Several calls under one prompt answered with this text in other ids, and nothing says whose echo it is."""
    BRIDGE_REFUSED = "bridge_refused"
    """The renderer cannot continue this output: the conversation was rendered afresh."""
    TOKEN_LAW = "token_law"
    """The renderer gave a continuation that does not begin with the recorded prompt and output."""


@dataclass(slots=True, eq=False)
class Context:
    """Ids of a conversation up to a generation prompt: the parent's ids and `tail`.

    `spliced` is the call asked with the parent's ids whose output opens `tail` with `kept` ids ("" = none such).
    `call` is the first call that was asked with exactly this prompt, `answers` are those that have an answer, oldest
    first. `children`: what follows, by (call spliced or digest of a foreign turn, digest of the messages behind it).
    """

    parent: Context | None
    tail: Int32
    length: int
    spliced: str = ""
    kept: int = 0
    call: str = ""
    answers: list[str] = field(default_factory=list)
    checksum: xxhash.xxh3_64 = field(init=False)
    """Over all ids, little-endian int32."""
    children: dict[tuple[str | bytes, bytes], Context] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.checksum = self.parent.checksum.copy() if self.parent is not None else xxhash.xxh3_64()
        self.checksum.update(self.tail.astype("<i4", copy=False).tobytes())

    def xxh3(self, more: Sequence[int] = ()) -> str:
        """`engines.wire.ids_xxh3` of all ids and `more`."""
        checksum = self.checksum.copy()
        checksum.update(np.asarray(more, "<i4").tobytes())
        return checksum.hexdigest()

    def ids(self) -> Int32:
        """All ids, shape [length]."""
        parts: list[Int32] = []
        node: Context | None = self
        while node is not None:
            parts.append(node.tail)
            node = node.parent
        return np.concatenate(parts[::-1])

    def base(self) -> tuple[str, int, Int32]:
        """(call, shared, rest): this prompt is the first `shared` ids of that call's prompt + output, then `rest`."""
        rest: list[Int32] = []
        node = self
        while not node.call and node.parent is not None:
            if node.spliced:
                rest.append(node.tail[node.kept :])
                return node.spliced, node.parent.length + node.kept, _joined(rest)
            rest.append(node.tail)
            node = node.parent
        if not node.call:
            rest.append(node.tail)
        return node.call, node.length if node.call else 0, _joined(rest)


class Generated(msgspec.Struct, frozen=True):
    """A call's answer as it may come back."""

    context: Context
    output: list[int]
    turn: Turn
    """Without our handles."""

    def reads_as(self, unit: Unit) -> bool:
        """Whether an echo without handles says the same; most calls are never asked."""
        return digest([self.turn.identity()]) == unit.digest


@dataclass
class Prompt:
    """The prompt of one request. `digest` names the conversation; `spliced` are the calls it echoes."""

    context: Context
    digest: bytes
    spliced: tuple[str, ...]
    reasons: tuple[Mismatch, ...]


@dataclass
class Lineage:
    """Contexts and answers of one execution."""

    rendering: Rendering
    contexts: dict[bytes, Context] = field(default_factory=dict)
    generated: dict[str, Generated] = field(default_factory=dict)
    delivered: set[str] = field(default_factory=set)
    """Calls of whose answer a client received something."""
    mismatches: Counter[Mismatch] = field(default_factory=Counter)
    tips: OrderedDict[Context, EncodedIds] = field(default_factory=OrderedDict)
    """Prompts asked for last, encoded: they grow with their branch."""

    def encoded(self, context: Context) -> EncodedIds:
        """All ids of a context. What the last prompts share with it is not encoded anew."""
        ids = self.tips.pop(context, None)
        if ids is None:
            parent = self.tips.pop(context.parent, None) if context.parent is not None else None
            if parent is None:
                ids = EncodedIds.of(context.ids().tolist())
            else:
                ids = parent + EncodedIds.of(context.tail.tolist())
        self.tips[context] = ids
        if len(self.tips) > MAX_TIPS:
            self.tips.popitem(last=False)
        return ids

    def prompt(self, request: Request) -> Prompt:
        """Ids of everything in the request, ending with the generation prompt."""
        return _Fold(self, request).run()

    def cut(self, size: int) -> None:
        """Forget the contexts that came after the first `size`, with what they hold: the request was refused."""
        forgotten = cut_back(self.contexts, size)
        if not forgotten:
            return
        kept = set(map(id, self.contexts.values()))
        for context in forgotten:
            if context.parent is not None and id(context) not in kept:
                siblings = context.parent.children
                for key in [key for key, child in siblings.items() if child is context]:
                    del siblings[key]

    def answered(self, call: str, digest_before: bytes, output: Sequence[int], answer: ParsedAnswer) -> None:
        """The call's generation is complete: its output may be echoed."""
        context = self.contexts[digest_before]
        calls = tuple(EchoedCall("", item.name, item.arguments) for item in answer.tool_calls)
        turn = Turn("assistant", answer.content, answer.reasoning, calls)
        self.generated[call] = Generated(context, list(output), turn)
        context.answers.append(call)

    def identify(self, unit: Unit, parent: Context, behind: Sequence[Unit]) -> tuple[str, Mismatch | None]:
        """The call that produced an assistant message asked for with `parent`, or why there is none.

        Both for an ambiguous one: the newest, and that it is in doubt. `behind` are the later messages.
        """
        turn = unit.assistant
        if turn is None:
            return "", Mismatch.FOREIGN_TURN
        calls = unit.calls
        if not calls:
            return self._same_text(unit, turn, parent, behind)
        call = next(iter(calls))
        known = self.generated.get(call)
        if known is None:
            return "", Mismatch.UNKNOWN_HANDLE
        ours = sum(handle_call(item.id) == call for item in turn.tool_calls)
        if len(calls) > 1 or ours != len(known.turn.tool_calls) or len(turn.tool_calls) != ours:
            return "", Mismatch.PARTIAL_ECHO
        if normal_text(turn.content) not in ("", normal_text(known.turn.content)):
            return "", Mismatch.EDITED_TEXT
        return call, None

    def _same_text(
        self, unit: Unit, turn: Turn, parent: Context, behind: Sequence[Unit]
    ) -> tuple[str, Mismatch | None]:
        """Among the calls under this context whose answer reads the same without handles."""
        same = [call for call in parent.answers if self.generated[call].reads_as(unit)]
        if not same:
            return "", Mismatch.FOREIGN_TURN
        if len(same) > 1:
            same = self._narrowed(same, turn, behind)
        outputs = [self.generated[call].output for call in same]
        return same[-1], None if all(ids == outputs[-1] for ids in outputs) else Mismatch.AMBIGUOUS_ECHO

    def _narrowed(self, same: list[str], turn: Turn, behind: Sequence[Unit]) -> list[str]:
        """Those of `same` for which the most speaks."""
        reasoning = reasoning_mark(turn.reasoning)
        if reasoning:
            marks = [reasoning_mark(self.generated[call].turn.reasoning) for call in same]
            same = [call for call, mark in zip(same, marks, strict=True) if mark == reasoning] or same
        same = [call for call in same if call in self.delivered] or same
        above = self._ancestry(behind)
        return [call for call in same if call in above] or same

    def _ancestry(self, units: Sequence[Unit]) -> set[str]:
        """The calls spliced above the first call that a handle in these messages names."""
        known = (self.generated[call] for unit in units for call in unit.calls if call in self.generated)
        first = next(known, None)
        node = first.context if first else None
        found: set[str] = set()
        while node is not None:
            found.add(node.spliced)
            node = node.parent
        return found


class _Fold:
    """One request folded over the contexts of its execution."""

    def __init__(self, lineage: Lineage, request: Request) -> None:
        self.lineage = lineage
        self.request = request
        self.spliced: list[str] = []
        self.reasons: list[Mismatch] = []
        self.turns = [index for index, unit in enumerate(request.units) if unit.assistant is not None]
        self.digest = request.prefix(len(request.units))

    def run(self) -> Prompt:
        context = self.lineage.contexts.get(self.digest)
        if context is None:
            context = self._extend()
        elif self.turns and context.parent is not None:
            self._doubt(context.parent)
        self.lineage.contexts[self.digest] = context
        self.lineage.mismatches.update(self.reasons)
        return Prompt(context, self.digest, tuple(self.spliced), tuple(self.reasons))

    def _doubt(self, parent: Context) -> None:
        """A prompt that was asked for before, but perhaps behind another answer of the same text."""
        last, units = self.turns[-1], self.request.units
        if self.lineage.identify(units[last], parent, ())[1] is Mismatch.AMBIGUOUS_ECHO:
            self.reasons.append(Mismatch.AMBIGUOUS_ECHO)

    def _extend(self) -> Context:
        """The context of the whole request, from the deepest known one."""
        contexts, request, turns = self.lineage.contexts, self.request, self.turns
        context = None
        first = len(turns)
        while first > 0 and context is None:
            first -= 1
            before = request.prefix(turns[first])
            context = contexts.get(before)
        if context is None:
            if not turns or turns[0] == 0:
                return self._root(len(request.units))
            context = contexts[before] = self._root(turns[0])
        for index, end in zip(turns[first:], [*turns[first + 1 :], len(request.units)], strict=True):
            child = self._child(context, index, end)
            if child is None:
                self.reasons.append(Mismatch.BRIDGE_REFUSED)
                return self._root(len(request.units))
            context = contexts[request.prefix(end)] = child
        return context

    def _child(self, parent: Context, index: int, end: int) -> Context | None:
        """`parent`, the assistant message `index`, and the messages up to `end`; None if it cannot be bridged."""
        lineage, request = self.lineage, self.request
        unit = request.units[index]
        call, reason = lineage.identify(unit, parent, request.units[index + 1 :])
        if call:
            self.spliced.append(call)
        key = (call or unit.digest, request.between(index + 1, end))
        known = parent.children.get(key)
        if reason is not None and (known is None or reason is Mismatch.AMBIGUOUS_ECHO):
            self.reasons.append(reason)
        if known is None and (known := self._bridged(parent, call, index, end)) is not None:
            parent.children[key] = known
        return known

    def _bridged(self, parent: Context, call: str, index: int, end: int) -> Context | None:
        lineage, request = self.lineage, self.request
        if call:
            output: list[int] | None = lineage.generated[call].output
        else:
            output = lineage.rendering.turn(request.messages(index, index + 1)[0])
        fresh = request.messages(index + 1, end)
        if output is None or not fresh:
            return None
        prompt: Ids = () if lineage.rendering.tail_only else parent.ids()
        try:
            tail = lineage.rendering.extend(prompt, output, fresh, request.tools)
        except PromptRewritten:
            self.reasons.append(Mismatch.TOKEN_LAW)
            return None
        if tail is None:
            return None
        native = call if call and lineage.generated[call].context is parent else ""
        kept = _common(output, tail)
        if call and kept < _lawful(output, lineage.rendering.stop_ids):
            self.reasons.append(Mismatch.TOKEN_LAW)
        return Context(parent, np.asarray(tail, np.int32), parent.length + len(tail), native, kept)

    def _root(self, end: int) -> Context:
        ids = self.lineage.rendering.render(self.request.messages(0, end), self.request.tools)
        return Context(None, np.asarray(ids, np.int32), len(ids))


def _joined(parts: list[Int32]) -> Int32:
    """The arrays, last one first."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts[::-1]) if parts else np.zeros(0, np.int32)


def _common(output: list[int], tail: list[int]) -> int:
    """Ids of the output that the child prompt kept (all but what lies behind its turn close)."""
    if tail[: len(output)] == output:
        return len(output)
    kept = 0
    for ours, theirs in zip(output, tail, strict=False):
        if ours != theirs:
            break
        kept += 1
    return kept


def _lawful(output: list[int], stop_ids: Sequence[int]) -> int:
    """Ids of a sampled output that its child prompt must keep: all, but for a stop token that the template closes itself."""
    return len(output) - (bool(output) and output[-1] in stop_ids)
