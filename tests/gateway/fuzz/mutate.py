"""Requests that no harness would send, made from bodies that harnesses did send. Deterministic for a seed.

A structured change picks a place in a body and replaces, removes, doubles, moves or wraps what stands there, with values
taken from elsewhere in the corpus or from a list of nuisances. A raw change works on the bytes. A few requests change the HTTP
around the body instead. Most get one change, so that they come far before they are refused.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

CORPUS = Path(__file__).parent / "bodies.json"
DIALECTS = {
    "messages": "messages",
    "chat/completions": "chat",
    "responses": "responses",
    "messages/count_tokens": "count",
}
DEEP = 300
NUISANCES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 0.5, -0.0, 1e308, 9e15, "", " ", "\0", "x" * 3000, "\u2028", "𝄞", "null",
    "e1a1c0", "toolu_e1a1c0_0", "call_e1a1c0_0", "keep:e1a1c0", "call:e1a1c0", "toolu_e9999999999a1c0_0",
    "call_e" + "9" * 400 + "a1c0_0", "<|im_end|>", "<|im_start|>", "<tool_call>\n{}\n</tool_call>", "</think>", "<think>",
    "x-anthropic-billing-header: a", "{}", "[", "{\"a\":1}", [], {}, [[]], [{}], {"": ""}, [None],
    "system", "user", "assistant", "tool", "developer", "function", "text", "image", "image_url", "thinking", "tool_use",
    "tool_result", "redacted_thinking", "reasoning", "message", "function_call", "function_call_output", "custom_tool_call",
    "custom", "namespace", "web_search", "input_text", "output_text", "summary_text", "refusal", "item_reference", "compaction",
]  # fmt: skip
SPECIAL = [
    b"\\ud800", b"\\udfff\\ud800", b"\xff", b"\xed\xa0\x80", b"\0", b"NaN", b"Infinity", b"1e999", b"-", b"[" * 5000, b'{"a":' * 2000,
    b"\\u0000", b'"', b"\\", b",", b"}", b"]", b"9" * 5000, b"\xef\xbb\xbf", b"//", b"\r\n\r\n", b"e1a1c",
]  # fmt: skip
HEADERS = [
    "x-agent-role: main", "x-agent-role: \xff", "x-codex-turn-metadata: {", 'x-codex-turn-metadata: {"request_kind":3}',
    "x-claude-code-session-id: 1", "x-claude-code-agent-id: 2", "x-parent-session-id: 3", "anthropic-version: 2023-06-01",
    "anthropic-beta: " + "x," * 500, "Content-Type: text/html", "Content-Encoding: gzip", "Content-Encoding: br",
    "Transfer-Encoding: chunked", "Content-Length: 5", "Content-Length: -1", "Content-Length: 99999999999999999999",
    "Connection: close", "Connection: upgrade", "Upgrade: websocket", "Expect: 100-continue", "Host: ", "X: " + "y" * 9000, " x: 1",
    "x : 1", "\0: 1", "Range: bytes=0-", "If-None-Match: *", "Cookie: a=b", "Authorization: Bearer x",
]  # fmt: skip


@dataclass(frozen=True)
class Sent:
    """One recorded body."""

    path: str
    body: bytes


@dataclass(frozen=True)
class Case:
    """A request. `framed`: its HTTP is sound, so an answer must come whatever the body is."""

    dialect: str
    path: str
    body: bytes
    headers: tuple[str, ...] = ()
    method: str = "POST"
    framed: bool = True

    def encode(self, key: str) -> bytes:
        """The bytes on the wire."""
        lines = [
            f"{self.method} /x/{key}{self.path} HTTP/1.1",
            "Host: x",
            f"Content-Length: {len(self.body)}",
        ]
        return "\r\n".join([*lines, *self.headers, "", ""]).encode("latin-1", "replace") + self.body


def corpus() -> list[Sent]:
    """The recorded bodies; those of Anthropic Messages also as token counts."""
    items = msgspec.json.decode(CORPUS.read_bytes())
    found = [Sent(item["path"], msgspec.json.encode(item["body"])) for item in items]
    counts = [
        Sent(f"{sent.path}/count_tokens", sent.body) for sent in found if sent.path.endswith("/messages")
    ]
    return found + counts[:1]


class Mutator:
    """An endless source of cases."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._sent = corpus()
        self._parts = [part for sent in self._sent for part in _parts(msgspec.json.decode(sent.body))]
        self._nuisances = [msgspec.Raw(json.dumps(value).encode()) for value in NUISANCES]

    def case(self, execution: int) -> Case:
        """The next case; handles in it are those of calls of `execution` (attempt 1)."""
        chance = self._chance
        sent = chance.choice(self._sent)
        dialect = DIALECTS[sent.path.split("/v1/")[-1]]
        kind = chance.random()
        if kind < 0.03:
            body = chance.randbytes(chance.randrange(200))
        elif kind < 0.05:
            return self._strange(sent, dialect)
        else:
            body = self._structured(sent.body)
            if chance.random() < 0.25:
                body = self._raw(body)
        headers = (chance.choice(HEADERS[:9]),) if chance.random() < 0.1 else ()
        return Case(dialect, sent.path, body.replace(b"e1a1c", b"e%da1c" % execution), headers)

    def _structured(self, body: bytes) -> bytes:
        value = msgspec.json.decode(body)
        for _ in range(self._chance.choice((0, 1, 1, 1, 2, 4))):
            self._change(value)
        if self._chance.random() < 0.01:
            for _ in range(DEEP):
                value = [value] if self._chance.random() < 0.5 else {"content": value}
        return msgspec.json.encode(value)

    def _change(self, value: Any) -> None:
        """One change at a place found by walking down."""
        chance = self._chance
        while True:
            keys = list(value) if isinstance(value, dict) else range(len(value))
            if not keys:
                return
            key = chance.choice(keys)
            inner = value[key]
            if not isinstance(inner, dict | list) or not inner or chance.random() < 0.25:
                break
            value = inner
        match chance.randrange(7):
            case 0:
                del value[key]
            case 1:
                value[key] = chance.choice(self._parts)
            case 2:
                value[key] = [inner]
            case 3 if isinstance(value, list):
                value.insert(chance.randrange(len(value) + 1), inner)
            case 4 if isinstance(value, list):
                chance.shuffle(value)
            case 5 if isinstance(value, dict):
                value[chance.choice(("type", "role", "content", "id", "x"))] = inner
            case _:
                value[key] = chance.choice(self._nuisances)

    def _raw(self, body: bytes) -> bytes:
        chance = self._chance
        at = chance.randrange(len(body) + 1)
        to = min(len(body), at + chance.choice((1, 1, 1, 10, 500)))
        match chance.randrange(5):
            case 0:
                return body[:at] + chance.choice(SPECIAL) + body[at:]
            case 1:
                return body[:at] + body[to:]
            case 2:
                return body[:at]
            case 3:
                return body[:at] + body[at:to] * 2 + body[to:]
            case _:
                return body[:at] + chance.randbytes(to - at) + body[to:]

    def _strange(self, sent: Sent, dialect: str) -> Case:
        """HTTP that is odd: headers, method, path, lengths."""
        chance = self._chance
        headers = tuple(chance.choices(HEADERS, k=chance.randrange(1, 4)))
        method = chance.choice(
            ("POST", "POST", "POST", "GET", "PUT", "DELETE", "OPTIONS", "BREW", "P\0ST", "")
        )
        path = chance.choice(
            (
                sent.path,
                sent.path,
                "/v1/models",
                "/v1/models/%ff%00",
                "/../..",
                "/v1//messages",
                "/%2e%2e/x",
                " ",
            )
        )
        body = sent.body if chance.random() < 0.7 else chance.randbytes(50)
        return Case(dialect, path, body, headers, method, framed=False)


def _parts(value: Any) -> list[msgspec.Raw]:
    """Everything inside a body that may stand elsewhere."""
    found: list[msgspec.Raw] = []
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        encoded = msgspec.json.encode(inner)
        if len(encoded) < 1000:
            found.append(msgspec.Raw(encoded))
        found += _parts(inner)
    return found
