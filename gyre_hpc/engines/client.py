"""The one client of a rollout engine: the gateway generates through it, the cell leader controls through it.

It speaks SGLang's HTTP API and nothing else, so the embedded engine and a real SGLang look alike. Chunks are increments
whatever the server's streaming mode. A stream either ends with a chunk whose `finish` is set or raises: tokens already
yielded stay valid, for the caller continues with prompt + received ids. Closing the iterator early ends the call.
Weight versions travel as decimal text; a `token` as the bearer that SGLang's --api-key asks for. Give the session
`TCPConnector(limit=0)`: every running call holds a connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Literal, TypeVar

import aiohttp
import msgspec

from gyre_hpc.engines import wire
from gyre_hpc.errors import GyreError, PeerLost, ProtocolViolation
from gyre_hpc.records import Version

PauseMode = Literal["abort", "in_place", "retract"]
MemoryTag = Literal["kv_cache", "weights"]
ALL_MEMORY: tuple[MemoryTag, ...] = ("kv_cache", "weights")

CONNECT_TIMEOUT_S = 10.0
CONTROL_TIMEOUT_S = 120.0

_GENERATE_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=None)
_Answer = TypeVar("_Answer")
_event_decoder = msgspec.json.Decoder(wire.GenerateEvent)


class EngineUnreachable(PeerLost):
    """The engine did not answer, or its answer broke off before the call finished."""


class EngineAbsent(EngineUnreachable):
    """Nobody listens at the engine's address: it had ended before it was asked."""


class EngineRefused(GyreError):
    """The engine answered and said no; `status` is the HTTP status, `reason` names the field or state at fault."""

    def __init__(self, url: str, status: int, reason: str) -> None:
        super().__init__(f"engine {url} refused ({status}): {reason}")
        self.status = status
        self.reason = reason


class PromptChanged(ProtocolViolation):
    """The engine says that it was given another prompt than was sent: what it samples is not what was asked for."""


class Chunk(msgspec.Struct, frozen=True):
    """Tokens sampled since the last chunk; the three lists are parallel. `finish` (stop, length, abort) ends the call."""

    ids: list[int]
    logprobs: list[float]
    versions: list[Version]
    finish: str | None
    cached_tokens: int
    prompt_tokens: int
    prompt_xxh3: str = ""
    """As wire.MetaInfo."""


class EngineClient:
    """One engine at `base_url`."""

    def __init__(self, base_url: str, session: aiohttp.ClientSession, token: str = "") -> None:
        self.base_url = base_url.rstrip("/")
        self._session = session
        self._credential = {"Authorization": f"Bearer {token}"} if token else {}
        self._unacknowledged: dict[str, asyncio.Event] = {}

    async def generate(
        self,
        rid: str,
        input_ids: Sequence[int] | wire.EncodedIds,
        max_new_tokens: int,
        kv_key: str,
        stop_token_ids: Sequence[int] = (),
    ) -> AsyncIterator[Chunk]:
        """Sample under the sampling law until a stop token, the budget, or an abort. The stop token is part of the output.

        Raises EngineRefused before the first chunk, EngineUnreachable and ProtocolViolation at any time.
        """
        prompt = input_ids if isinstance(input_ids, wire.EncodedIds) else wire.EncodedIds.of(input_ids)
        body = wire.encode_generate(prompt, generate_options(rid, max_new_tokens, kv_key, stop_token_ids))
        acknowledged = self._unacknowledged[rid] = asyncio.Event()
        try:
            async with self._open("POST", "/generate", body, _GENERATE_TIMEOUT) as response:
                acknowledged.set()
                received = 0
                async for event in _events(response):
                    chunk = self._increment(event, received, prompt.count)
                    received += len(chunk.ids)
                    if chunk.ids or chunk.finish:
                        yield chunk
                    if chunk.finish:
                        return
            raise EngineUnreachable(f"engine {self.base_url}: stream of call {rid} ended unfinished")
        finally:
            acknowledged.set()
            self._unacknowledged.pop(rid, None)

    def _increment(self, event: wire.GenerateEvent, received: int, prompt_tokens: int) -> Chunk:
        """What `event` adds to `received` tokens, for cumulative and incremental streams alike."""
        if event.error is not None:
            raise EngineRefused(self.base_url, int(event.error.code), event.error.message)
        meta = event.meta_info
        if meta is None:
            raise ProtocolViolation(f"engine {self.base_url}: stream event without meta_info")
        fresh = max(0, meta.completion_tokens - received)
        logprobs = meta.output_token_logprobs[-fresh:] if fresh else []
        if len(event.output_ids) < fresh or len(logprobs) != fresh:
            raise ProtocolViolation(
                f"engine {self.base_url}: {meta.completion_tokens} tokens declared, {received} received,"
                f" {len(event.output_ids)} ids and {len(logprobs)} log-probs sent"
            )
        if meta.prompt_tokens not in (0, prompt_tokens):
            raise PromptChanged(
                f"engine {self.base_url}: prompt of {prompt_tokens} tokens counted as {meta.prompt_tokens}"
            )
        return Chunk(
            ids=event.output_ids[-fresh:] if fresh else [],
            logprobs=[entry[0] for entry in logprobs],
            versions=self._versions(meta, received, fresh),
            finish=meta.finish_reason.type if meta.finish_reason else None,
            cached_tokens=meta.cached_tokens,
            prompt_tokens=prompt_tokens,
            prompt_xxh3=meta.prompt_xxh3,
        )

    def _versions(self, meta: wire.MetaInfo, received: int, fresh: int) -> list[Version]:
        spans = meta.weight_versions or [wire.WeightVersionSpan(meta.weight_version, 0, received + fresh)]
        try:
            by_span = [
                (Version(int(span.version)), span.start, span.end) for span in spans if span.end > received
            ]
        except ValueError:
            raise ProtocolViolation(
                f"engine {self.base_url}: weight version {meta.weight_version!r} is not a number",
                fix="start the engine with --weight-version N",
            ) from None
        return [version for version, start, end in by_span for _ in range(max(start, received), end)]

    async def abort(self, rid: str) -> None:
        """Cut the call at a token boundary; its stream ends with finish="abort". Unknown calls are ignored."""
        pending = self._unacknowledged.get(rid)
        if pending is not None:
            await pending.wait()
        await self._post("/abort_request", wire.AbortRequest(rid=rid))

    async def abort_all(self) -> None:
        """Cut every call of this engine."""
        await self._post("/abort_request", wire.AbortRequest(abort_all=True))

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Stop sampling. `abort` ends all calls with what they have; the other modes let them go on after resume."""
        await self._post("/pause_generation", wire.PauseRequest(mode))

    async def resume_generation(self) -> None:
        """Sample again."""
        await self._post("/continue_generation", None)

    async def flush(self) -> None:
        """Forget all shared KV. Refused while calls run."""
        await self._post("/flush_cache", None)

    async def release(self, tags: Sequence[MemoryTag] = ALL_MEMORY) -> None:
        """Give memory back to the machine. Refused while calls run."""
        await self._post("/release_memory_occupation", wire.MemoryRequest(list(tags)))

    async def resume(self, tags: Sequence[MemoryTag] = ALL_MEMORY) -> None:
        """Take memory again. Resumed weights are empty: `load` must follow before the engine serves."""
        await self._post("/resume_memory_occupation", wire.MemoryRequest(list(tags)))

    async def load(
        self,
        model_path: str,
        version: Version,
        *,
        keep_kv: bool = False,
        timeout_s: float = CONTROL_TIMEOUT_S,
    ) -> None:
        """Serve the weights in folder `model_path` as `version`. `keep_kv`: KV of older weights stays findable.

        Under running calls pause first: a real SGLang that is not paused waits until they have ended.
        """
        update = wire.UpdateFromDiskRequest(model_path, str(version), flush_cache=not keep_kv)
        await self._post("/begin_weight_update", {})
        try:
            await self._post("/update_weights_from_disk", update, timeout_s)
        except EngineRefused:
            with contextlib.suppress(EngineRefused):
                await self._post("/end_weight_update", {})
            raise
        await self._post("/end_weight_update", {})

    async def export(self, ids: wire.EncodedIds, kv_key: str, lease_s: float) -> wire.ExportAnswer:
        """Have the cell's host store keep the full KV pages of `ids`, running calls or not; says which it has."""
        options = msgspec.json.encode({"extra_key": kv_key, "lease_s": lease_s})
        body = b'{"input_ids":[%b],%b' % (ids.text, options[1:])
        return _decode(await self._request("POST", "/kv/export", body), wire.ExportAnswer)

    async def checksum(self) -> str:
        """Digest of the weights being served (embedded engine: `weights.weights_digest`)."""
        answer = _decode(await self._post("/weights_checker", wire.CheckerRequest()), wire.CheckerAnswer)
        return answer.per_engine_checksum or ",".join(rank.per_gpu_checksum for rank in answer.ranks)

    async def health(self) -> bool:
        """The process answers."""
        return await self._probe("/health")

    async def ready(self) -> bool:
        """The engine holds weights and KV memory and samples."""
        return await self._probe("/ready")

    async def server_info(self) -> wire.ServerInfo:
        """State, counters, declared memory and capabilities."""
        return _decode(await self._request("GET", "/server_info", b""), wire.ServerInfo)

    async def _probe(self, path: str) -> bool:
        try:
            await self._request("GET", path, b"")
        except (EngineRefused, EngineUnreachable):
            return False
        return True

    async def _post(self, path: str, body: object, timeout_s: float = CONTROL_TIMEOUT_S) -> bytes:
        encoded = msgspec.json.encode({} if body is None else body)
        return await self._request("POST", path, encoded, timeout_s)

    async def _request(
        self, method: str, path: str, body: bytes, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> bytes:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        async with self._open(method, path, body, timeout) as response:
            return await response.read()

    @contextlib.asynccontextmanager
    async def _open(
        self, method: str, path: str, body: bytes, timeout: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answered request with status 200; transport faults inside the block become EngineUnreachable."""
        headers = self._credential | ({"Content-Type": "application/json"} if body else {})
        url = self.base_url + path
        try:
            async with self._session.request(
                method, url, data=body, headers=headers, timeout=timeout
            ) as response:
                if response.status != 200:
                    raise EngineRefused(url, response.status, _reason(await response.read()))
                yield response
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            kind = EngineAbsent if isinstance(error, aiohttp.ClientConnectorError) else EngineUnreachable
            raise kind(f"engine {url}: {type(error).__name__}: {error}") from error


def generate_options(
    rid: str, max_new_tokens: int, kv_key: str, stop_token_ids: Sequence[int]
) -> wire.GenerateOptions:
    """A streamed generation under the sampling law."""
    return wire.GenerateOptions(
        rid=rid,
        sampling_params=wire.SamplingParams(max_new_tokens, stop_token_ids=list(stop_token_ids)),
        return_logprob=True,
        stream=True,
        extra_key=kv_key,
    )


def _reason(body: bytes) -> str:
    """The message of a refusal in any of the shapes SGLang uses."""
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(body, type=wire.ErrorAnswer).error.message
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(body, type=wire.UpdateAnswer).message
    return body[:500].decode("utf-8", "replace")


def _decode(body: bytes, kind: type[_Answer]) -> _Answer:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise ProtocolViolation(f"engine answer is not a {kind.__name__}: {error}") from error


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[wire.GenerateEvent]:
    """Events of a server-sent stream up to [DONE]. Lines may be of any length."""
    pending = b""
    async for piece in response.content.iter_any():
        *lines, pending = (pending + piece).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            if data:
                try:
                    yield _event_decoder.decode(data)
                except msgspec.DecodeError as error:
                    raise ProtocolViolation(f"engine {response.url}: bad stream event: {error}") from error
