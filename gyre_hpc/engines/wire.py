"""The subset of SGLang's HTTP API that this project uses, as typed bodies (shapes of SGLang 0.5.21).

The embedded server decodes requests with these structs and the client decodes answers with them, so both keep to one
shape. Requests are closed: an unknown field is refused by name. Answers are open: real SGLang sends many more fields.
A stream carries `data: <GenerateEvent>` lines and ends with `data: [DONE]`; its `output_ids` and
`output_token_logprobs` are cumulative or incremental (server flag `incremental_streaming_output`), while
`completion_tokens` and `weight_versions` always count from the first token of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
import xxhash

from gyre_hpc.records import Int32


class Request(msgspec.Struct, forbid_unknown_fields=True):
    """Base of request bodies."""


class SamplingParams(Request):
    """Only the sampling law is served: temperature 1 (or 0 = greedy), top_p 1, top_k -1."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    """Never stop on a token: neither on `stop_token_ids` nor on the model's own end tokens."""


class GenerateOptions(Request):
    """All of a generation but its prompt. `extra_key` is the KV namespace: pages are shared only inside it."""

    sampling_params: SamplingParams
    rid: str = ""
    return_logprob: bool = False
    logprob_start_len: int = -1
    stream: bool = False
    extra_key: str | None = None


class GenerateRequest(GenerateOptions, kw_only=True):
    """POST /generate."""

    input_ids: list[int]


@dataclass(frozen=True, slots=True)
class EncodedIds:
    """Token ids as the inside of a JSON list: a prompt that grows is encoded once, piece by piece."""

    text: bytes
    count: int

    @classmethod
    def of(cls, ids: Sequence[int]) -> EncodedIds:
        return cls(msgspec.json.encode(ids)[1:-1], len(ids))

    def __add__(self, more: EncodedIds) -> EncodedIds:
        if not self.count or not more.count:
            return self if self.count else more
        return EncodedIds(b"%b,%b" % (self.text, more.text), self.count + more.count)

    def ids(self) -> list[int]:
        return msgspec.json.decode(b"[%b]" % self.text, type=list[int])


def encode_generate(prompt: EncodedIds, options: GenerateOptions) -> bytes:
    """The body of a GenerateRequest."""
    return b'{"input_ids":[%b],%b' % (prompt.text, msgspec.json.encode(options)[1:])


class AbortRequest(Request):
    """POST /abort_request. SGLang matches `rid` as a prefix: no rid may be a prefix of another."""

    rid: str = ""
    abort_all: bool = False


class PauseRequest(Request):
    """POST /pause_generation. abort: all calls end with what they have. in_place, retract: they go on after continue."""

    mode: Literal["abort", "in_place", "retract"] = "abort"


class MemoryRequest(Request):
    """POST /release_memory_occupation and /resume_memory_occupation. None = all tags."""

    tags: list[Literal["kv_cache", "weights"]] | None = None


class UpdateFromDiskRequest(Request):
    """POST /update_weights_from_disk. `flush_cache=False` keeps KV of the old weights findable (kv_policy keep_execution)."""

    model_path: str
    weight_version: str | None = None
    abort_all_requests: bool = False
    flush_cache: bool = True


class ExportRequest(Request):
    """POST /kv/export (embedded engine only): keep the full KV pages of `input_ids` in the host store for `lease_s`."""

    input_ids: list[int]
    extra_key: str = ""
    lease_s: float = 0.0


class ExportAnswer(msgspec.Struct):
    """The leading pages of the ids that the host store has: `keys` are their prefix hashes, `layout` is a digest; hex."""

    layout: str
    page_tokens: int
    keys: list[str]
    namespace: str | None = None
    """Namespace of the pages in the store; None = the `extra_key`."""


class CheckerRequest(Request):
    """POST /weights_checker."""

    action: Literal["checksum"] = "checksum"


class WeightVersionSpan(msgspec.Struct):
    """Tokens start..end-1 of the answer were sampled by `version`."""

    version: str
    start: int
    end: int


class FinishInfo(msgspec.Struct, omit_defaults=True):
    """Why a generation ended: stop (with the matched token), length, or abort (with a message)."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | list[int] | None = None
    length: int | None = None
    message: str | None = None


class MetaInfo(msgspec.Struct):
    """Everything about an answer but its tokens. `output_token_logprobs`: [log-probability, id, text or null]."""

    id: str = ""
    finish_reason: FinishInfo | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    weight_version: str = ""
    weight_versions: list[WeightVersionSpan] = []
    output_token_logprobs: list[tuple[float, int, str | None]] = []
    num_retractions: int = 0
    prompt_xxh3: str = ""
    """`ids_xxh3` of the prompt as the engine was given it, in the first event; "" where an engine does not say (SGLang)."""


def ids_xxh3(ids: Sequence[int] | Int32) -> str:
    """Checksum of token ids: xxh3 (64 bits) of little-endian int32."""
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(ids, "<i4").data)


class ErrorBody(msgspec.Struct):
    """Names the field or state at fault."""

    message: str
    type: str = "invalid_request_error"
    code: int | str = 400


class ErrorAnswer(msgspec.Struct):
    """Body of every refusal."""

    error: ErrorBody


class GenerateEvent(msgspec.Struct):
    """One answer, or one event of a stream."""

    output_ids: list[int] = []
    meta_info: MetaInfo | None = None
    text: str | None = ""
    error: ErrorBody | None = None


class UpdateAnswer(msgspec.Struct):
    """Answer to the weight-update calls."""

    success: bool
    message: str = ""
    num_paused_requests: int = 0


class RankChecksum(msgspec.Struct):
    """Checksums of one rank."""

    checksums: dict[str, str] = {}
    per_gpu_checksum: str = ""


class CheckerAnswer(msgspec.Struct):
    """Answer to /weights_checker. The embedded engine's `per_engine_checksum` is `weights.weights_digest`."""

    success: bool
    message: str = ""
    ranks: list[RankChecksum] = []
    per_engine_checksum: str = ""


class Capabilities(msgspec.Struct):
    """What an engine can do for a role switch."""

    frees_memory: bool = False
    """Released memory goes back to the machine (measured by `resident_bytes`)."""
    can_export_live: bool = False
    """KV pages of a running call can be published."""


class ServerInfo(msgspec.Struct):
    """GET /server_info. Fields real SGLang does not send keep their defaults."""

    version: str = ""
    engine: str = "sglang"
    weight_version: str = ""
    model_path: str = ""
    capacity: int = 0
    running: int = 0
    waiting: int = 0
    pool_tokens: int = 0
    free_pool_tokens: int = 0
    page_tokens: int = 0
    max_context: int = 0
    paused: bool = False
    released: list[str] = []
    memory: dict[str, int] = {}
    """Declared bytes by tag (kv_cache, weights)."""
    resident_bytes: int = 0
    tokens_sampled: int = 0
    tokens_prefilled: int = 0
    tokens_cached: int = 0
    tokens_fetched: int = 0
    """Of those cached, the ones whose KV came from the host store."""
    pages_exported: int = 0
    retractions: int = 0
    busy_s: float = 0.0
    """Seconds spent in engine steps."""
    incremental_streaming_output: bool = False
    capabilities: Capabilities = msgspec.field(default_factory=Capabilities)
