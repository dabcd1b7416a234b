"""The call log: what was appended is read back, a torn tail waits, corruption is named, a full disk loses nothing."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_hpc.errors import CorruptRecord, StorageFull
from gyre_hpc.gateway.call_log import CallLog, CallLogReader, ExecutionEnd, read_call_log
from gyre_hpc.gateway.frames import (
    HEADER_BYTES,
    MAGIC,
    AttemptSealed,
    CallAccepted,
    CallDelivered,
    CallFinished,
    CallOpened,
    Frame,
    TokensReceived,
    encode_float32,
    encode_frame,
    encode_int32,
)
from gyre_hpc.records import CallRecord, Delivery, FinishReason


def opened(
    call: str, ordinal: int, delta: list[int], base: str = "", shared: int = 0, execution: int = 1
) -> CallOpened:
    return CallOpened(
        call=call,
        execution=execution,
        attempt=1,
        ordinal=ordinal,
        base=base,
        shared=shared,
        delta=encode_int32(delta),
        context=b"c",
        request=b"r",
        max_tokens=9,
        stop=(),
        constrained=False,
        role_hint="main",
        dialect="openai-chat",
        started=1.5,
        wishes={"temperature": 0},
        reasons=(),
    )


def tokens(call: str, ids: list[int], version: int | None = None) -> TokensReceived:
    versions = encode_int32([version] if version is not None else [7] * len(ids))
    return TokensReceived(call, encode_int32(ids), encode_float32([-float(i) for i in ids]), versions)


def finished(call: str, count: int) -> CallFinished:
    return CallFinished(call, FinishReason.STOP.value, count, 2.5, 0.25, 3, 1, "")


CALL: list[Frame] = [
    opened("a", 0, [1, 2, 3]),
    tokens("a", [4, 5], version=2),
    tokens("a", [6]),
    finished("a", 3),
]


def write(path: Path, frames: list[Frame]) -> None:
    log = CallLog(path, 1)
    for frame in frames:
        log.append(frame)
    log.close()


def test_a_call_is_given_once_when_it_was_delivered(tmp_path: Path) -> None:
    log, reader = CallLog(tmp_path / "log", 1), CallLogReader(tmp_path / "log")
    for frame in CALL:
        log.append(frame)
        assert reader.poll() == []
    log.append(CallDelivered("a", Delivery.COMPLETE))
    (record,) = reader.poll()
    assert isinstance(record, CallRecord)
    assert (record.prompt_ids.tolist(), record.output_ids.tolist()) == ([1, 2, 3], [4, 5, 6])
    assert (record.versions.tolist(), record.logprobs.tolist()) == ([2, 2, 7], [-4.0, -5.0, -6.0])
    assert (record.accepted, record.finish, record.recomputed_tokens) == (True, FinishReason.STOP, 3)
    log.append(AttemptSealed(1, 1, 1, {}))
    assert reader.poll() == [ExecutionEnd(record.execution, 1, 1)]
    log.close()


@pytest.mark.parametrize(
    ("delivery", "echoed"), [("none", True), ("partial", True), ("partial", False), ("none", False)]
)
def test_an_undelivered_call_waits_for_an_echo_or_the_end(
    tmp_path: Path, delivery: Any, echoed: bool
) -> None:
    frames = [*CALL, CallDelivered("a", Delivery(delivery)), *([CallAccepted("a")] if echoed else [])]
    write(tmp_path / "log", frames)
    reader = CallLogReader(tmp_path / "log")
    assert len(reader.poll()) == (1 if echoed else 0)
    (record,) = read_call_log(tmp_path / "log")
    assert (record.accepted, record.delivery) == (echoed, Delivery(delivery))


def test_output_behind_a_stop_string_is_not_part_of_the_record_but_of_the_log(tmp_path: Path) -> None:
    write(tmp_path / "log", [opened("a", 0, [1]), tokens("a", [4, 5, 6]), finished("a", 2)])
    (record,) = read_call_log(tmp_path / "log")
    assert record.output_ids.tolist() == [4, 5] and len(record.logprobs) == len(record.versions) == 2


def test_a_closed_execution_frees_its_memory(tmp_path: Path) -> None:
    write(tmp_path / "log", [*CALL, AttemptSealed(1, 1, 1, {})])
    reader = CallLogReader(tmp_path / "log")
    reader.poll()
    assert reader.executions == {} and reader._calls == {}


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_prompts_stored_as_differences_come_back_whole(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    ids = st.lists(st.integers(0, 2**31 - 1), max_size=6)
    whole: dict[str, tuple[list[int], list[int]]] = {}
    frames: list[Frame] = []
    for number in range(data.draw(st.integers(1, 6))):
        name, base, shared, delta = f"c{number}", "", 0, data.draw(ids)
        if whole and data.draw(st.booleans()):
            base = data.draw(st.sampled_from(sorted(whole)))
            shared = data.draw(st.integers(0, len(whole[base][0]) + len(whole[base][1])))
        prompt = [*whole[base][0], *whole[base][1]][:shared] + delta if base else delta
        output = data.draw(ids)
        whole[name] = (prompt, output)
        frames += [
            opened(name, number, delta, base, shared),
            tokens(name, output),
            finished(name, len(output)),
        ]
    path = tmp_path_factory.mktemp("log") / "log"
    write(path, frames)
    records = read_call_log(path)
    assert {r.call: (r.prompt_ids.tolist(), r.output_ids.tolist()) for r in records} == whole
    assert all(r.prompt_ids.dtype == np.int32 for r in records)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_log_cut_anywhere_is_a_prefix_and_goes_on(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("log")
    path = folder / "log"
    write(path, [*CALL, CallDelivered("a", Delivery.COMPLETE)])
    content = path.read_bytes()
    cut = data.draw(st.integers(0, len(content)))
    path.write_bytes(content[:cut])
    reader = CallLogReader(path)
    early = reader.poll()
    path.write_bytes(content)
    assert len(early) + len(reader.poll()) == 1

    path.write_bytes(content[:cut])
    kept = read_call_log(path)
    log = CallLog(path, 2)
    log.append(opened("z", 9, [8]))
    log.close()
    assert [record.call for record in read_call_log(path)] == [*(record.call for record in kept), "z"]


@pytest.mark.parametrize("where", ["header", "payload"])
def test_corruption_before_the_tail_is_named_with_file_and_offset(tmp_path: Path, where: str) -> None:
    path = tmp_path / "log"
    write(path, CALL)
    content = bytearray(path.read_bytes())
    first = len(MAGIC) + HEADER_BYTES + int.from_bytes(content[len(MAGIC) : len(MAGIC) + 4], "little")
    content[first + (1 if where == "header" else HEADER_BYTES + 2)] ^= 0x40
    path.write_bytes(content)
    for read in (read_call_log, lambda path: CallLog(path, 2)):
        with pytest.raises(CorruptRecord, match=rf"{path}: corrupt call log at byte {first}"):
            read(path)


def test_a_damaged_or_zeroed_last_frame_is_a_torn_tail(tmp_path: Path) -> None:
    path = tmp_path / "log"
    write(path, CALL[:1])
    good = path.read_bytes()
    frame = bytearray(encode_frame(CALL[1]))
    frame[-1] ^= 1
    for tail in (bytes(frame), bytes(len(frame))):
        path.write_bytes(good + tail)
        assert len(read_call_log(path)) == 1
        CallLog(path, 2).close()
        assert path.read_bytes().startswith(good) and len(read_call_log(path)) == 1


def test_a_file_that_is_no_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"something else")
    with pytest.raises(CorruptRecord, match="not a call log"):
        read_call_log(tmp_path / "log")


async def test_a_full_disk_refuses_holds_and_loses_nothing(tmp_path: Path) -> None:
    path, room = tmp_path / "log", [60]

    def narrow(handle: int, data: bytes) -> int:
        if room[0] == 0:
            raise OSError(errno.ENOSPC, "full")
        count = os.write(handle, data[: room[0]])
        room[0] -= count
        return count

    log = CallLog(path, 1, write=narrow)
    for frame in CALL:
        log.append(frame)
    with pytest.raises(StorageFull, match=str(path)):
        log.check()
    waiting = asyncio.create_task(log.written())
    await asyncio.sleep(0)
    assert not waiting.done() and read_call_log(path) == []
    room[0] = 1 << 20
    log.check()
    await waiting
    await log.sync()
    (record,) = read_call_log(path)
    assert record.output_ids.tolist() == [4, 5, 6]
    log.close()


def test_another_error_of_the_disk_is_not_taken_for_fullness(tmp_path: Path) -> None:
    def broken(handle: int, data: bytes) -> int:
        raise OSError(errno.EIO, "broken")

    with pytest.raises(OSError, match="broken"):
        CallLog(tmp_path / "log", 1, write=broken)


async def test_no_answer_leaves_behind_a_write_that_failed(tmp_path: Path) -> None:
    fails = False

    def write(handle: int, data: bytes) -> int:
        if fails:
            raise OSError(errno.EIO, "broken")
        return os.write(handle, data)

    log = CallLog(tmp_path / "log", 1, write=write)
    fails = True
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    log.append_soon(CALL[0])
    waiting = asyncio.create_task(log.written())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(OSError, match="broken"):
        await log.keep_synced(0.0)
    fails = False
    log.close()


async def test_frames_of_one_turn_of_the_loop_are_one_write_in_order(tmp_path: Path) -> None:
    written: list[int] = []

    def count(handle: int, data: bytes) -> int:
        written.append(len(data))
        return os.write(handle, data)

    path = tmp_path / "log"
    log = CallLog(path, 1, write=count)
    written.clear()
    for frame in CALL:
        log.append_soon(frame)
    assert written == [] and read_call_log(path) == []
    await asyncio.sleep(0)
    (record,) = read_call_log(path)
    assert len(written) == 1 and record.output_ids.tolist() == [4, 5, 6]
    log.append_soon(CallDelivered("a", Delivery.PARTIAL))
    log.append(CallAccepted("a"))
    await asyncio.sleep(0)
    (record,) = read_call_log(path)
    assert len(written) == 2 and (record.delivery, record.accepted) == (Delivery.PARTIAL, True)
    log.append_soon(CallDelivered("a", Delivery.COMPLETE))
    log.close()
    assert path.read_bytes().endswith(encode_frame(CallDelivered("a", Delivery.COMPLETE)))
