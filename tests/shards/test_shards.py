"""Shards at rest: round trip, crash safety, refusal of damage, derived data that follows from raw, portable export."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import h5py
import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_hpc.bench.tree import call_record
from gyre_hpc.errors import CorruptRecord, MissingInput, StorageFull
from gyre_hpc.layout import RunLayout
from gyre_hpc.records import (
    Assessment,
    CallRecord,
    ClosingReason,
    Delivery,
    ExecutionId,
    GroupId,
    LeafRole,
    Version,
)
from gyre_hpc.shards.encode import Derivation, ExecutionRecord, decode, encode
from gyre_hpc.shards.export import TargetExists, export
from gyre_hpc.shards.format import Tables, same_column
from gyre_hpc.shards.manifest import read_manifest
from gyre_hpc.shards.reader import ShardReader, find_tables
from gyre_hpc.shards.stats import show, stats
from gyre_hpc.shards.verify import verify
from gyre_hpc.shards.writer import MAX_AGE_S, MAX_EXECUTIONS, ShardWriter
from gyre_hpc.trajectories.strands import Strands

DERIVATION = Derivation(seed=3, j_max=5)


def execution(
    number: int, attempt: int = 0, calls: int = 4, size: int = 50, superseded: bool = False
) -> ExecutionRecord:
    """A chain with a sub-agent and a lost retry."""
    random = np.random.default_rng(number)

    def text(count: int) -> np.ndarray:
        return random.integers(0, 1000, count).astype(np.int32)

    strands, context = Strands(), text(size)
    for ordinal in range(calls):
        output = text(size // 2)
        identity = {"execution": number, "attempt": attempt}
        if ordinal == 1:
            record = call_record(ordinal, text(size), output, role=LeafRole.SUB_AGENT, **identity)
        elif ordinal == 2:
            record = call_record(ordinal, context, output, delivery=Delivery.NONE, accepted=False, **identity)
        else:
            record = call_record(ordinal, context, output, **identity)
            context = np.concatenate([context, output, text(size)])
        strands.add(record)
    return ExecutionRecord(
        execution=ExecutionId(number),
        attempt=attempt,
        group=GroupId(number // 2) if number % 3 else None,
        query=f"patchkit/{number}é",
        reason=None if superseded else ClosingReason.HARNESS_TIMEOUT,
        wall_s=12.5,
        incomplete=superseded,
        superseded=superseded,
        assessment=None if superseded else Assessment(0.25 * (number % 4), True, "", "3 of 4", "/w"),
        strands=strands,
    )


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path / "run")
    layout.create()
    return layout


def sealed(layout: RunLayout, *records: ExecutionRecord) -> Path:
    writer = ShardWriter(layout, "run", DERIVATION)
    for record in records:
        writer.add(record, now=0.0)
    line = writer.seal()
    assert line is not None
    return layout.shards / line.file


def assert_equal(first: Tables, second: Tables) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert first[name].keys() == second[name].keys()
        for column in first[name]:
            assert same_column(first[name][column], second[name][column]), f"{name}/{column}"


def test_executions_come_back_as_they_were_sealed(run: RunLayout) -> None:
    records = [
        execution(1),
        execution(2, calls=0),
        execution(3, attempt=0, superseded=True),
        execution(3, attempt=1),
    ]
    with ShardReader(sealed(run, *records)) as shard:
        assert shard.attempts() == [(1, 0), (2, 0), (3, 0), (3, 1)]
        for index, record in enumerate(records):
            again = shard.record(index)
            assert replace(again, strands=record.strands) == record
            assert_equal(encode(again, DERIVATION), encode(record, DERIVATION))
            for before, after in zip(record.strands.records(), again.strands.records(), strict=True):
                np.testing.assert_array_equal(before.prompt_ids, after.prompt_ids)
                np.testing.assert_array_equal(before.output_ids, after.output_ids)
                np.testing.assert_array_equal(before.logprobs, after.logprobs)


@st.composite
def recorded(draw: st.DrawFn) -> list[CallRecord]:
    calls: list[CallRecord] = []
    for ordinal in range(draw(st.integers(0, 6))):
        base = np.zeros(0, np.int32)
        if calls and draw(st.booleans()):
            earlier = draw(st.sampled_from(calls))
            base = np.concatenate([earlier.prompt_ids, earlier.output_ids])
        delta = np.array(draw(st.lists(st.integers(0, 2), min_size=1, max_size=3)), np.int32)
        output = np.array(draw(st.lists(st.integers(0, 2), max_size=3)), np.int32)
        role, name = draw(st.sampled_from(LeafRole)), draw(st.text(max_size=5))
        call = call_record(ordinal, np.concatenate([base, delta]), output, role=role, call=f"{ordinal}{name}")
        forks = draw(st.sampled_from([(), ("foreign_turn",), ("token_law", "bridge_refused")]))
        deliver = draw(st.sampled_from(["answer", "blocks"]))
        kv_version = draw(st.sampled_from([None, Version(0), Version(3)]))
        calls.append(replace(call, forks=forks, deliver=deliver, kv_version=kv_version))
    return calls


@settings(max_examples=12, deadline=None)
@given(st.lists(recorded(), min_size=1, max_size=3))
def test_any_recorded_calls_survive_and_verify(
    tmp_path_factory: pytest.TempPathFactory, groups: list[list[CallRecord]]
) -> None:
    layout = RunLayout(tmp_path_factory.mktemp("run"))
    layout.create()
    records = []
    for number, calls in enumerate(groups):
        strands = Strands()
        for call in calls:
            strands.add(replace(call, execution=ExecutionId(number)))
        records.append(replace(execution(number), strands=strands))
    path = sealed(layout, *records)
    assert verify(layout.root).ok
    with ShardReader(path) as shard:
        for index, record in enumerate(records):
            assert_equal(shard.tables(index), encode(record, DERIVATION))
            again = shard.record(index).strands.calls
            assert [c.record.forks for c in again] == [c.record.forks for c in record.strands.calls]
            assert [c.record.deliver for c in again] == [c.record.deliver for c in record.strands.calls]
            assert [c.record.kv_version for c in again] == [c.record.kv_version for c in record.strands.calls]


def test_forks_are_counted_by_reason_and_a_broken_token_law_has_no_reward(run: RunLayout) -> None:
    lawful, unlawful = execution(1), execution(2)
    for record, forks in ((lawful, ("foreign_turn",)), (unlawful, ("foreign_turn", "token_law"))):
        laid = record.strands.calls[1]
        laid.record = replace(laid.record, forks=forks)
    sealed(run, lawful, unlawful)
    assert stats(run.root).forks_by_reason == {"foreign_turn": 2, "token_law": 1}
    assert (show(run.root, 1).record.reward, show(run.root, 2).record.reward) == (0.25, None)
    assert show(run.root, 2).calls[1].forks == ("foreign_turn", "token_law")


def test_a_shard_says_how_each_answer_left(run: RunLayout) -> None:
    record = execution(1)
    laid = record.strands.calls[1]
    laid.record = replace(laid.record, deliver="blocks")
    with ShardReader(sealed(run, record)) as shard:
        assert [call.deliver for call in shard.record(0).strands.records()][:2] == ["answer", "blocks"]


def test_calls_of_a_shard_without_the_column_left_as_whole_answers() -> None:
    tables = encode(execution(1), DERIVATION)
    del tables["raw/calls"]["deliver"]
    assert all(laid.record.deliver == "answer" for laid in decode(tables).strands.calls)


def test_a_shard_says_how_old_the_kv_of_each_call_was(run: RunLayout) -> None:
    record = execution(1)
    laid = record.strands.calls[1]
    laid.record = replace(laid.record, kv_version=Version(3))
    with ShardReader(sealed(run, record)) as shard:
        assert [call.kv_version for call in shard.record(0).strands.records()][:2] == [None, 3]


def test_a_shard_without_the_column_does_not_know_how_old_the_kv_was() -> None:
    tables = encode(execution(1), DERIVATION)
    del tables["raw/calls"]["kv_version"]
    assert all(laid.record.kv_version is None for laid in decode(tables).strands.calls)


def test_calls_of_a_shard_without_the_column_have_no_forks() -> None:
    tables = encode(execution(1), DERIVATION)
    del tables["raw/calls"]["forks"]
    assert all(laid.record.forks == () for laid in decode(tables).strands.calls)


def test_a_batch_is_due_by_count_or_age(run: RunLayout) -> None:
    writer = ShardWriter(run, "run", DERIVATION)
    assert not writer.due(1e9) and writer.seal() is None
    writer.add(execution(0), now=10.0)
    assert not writer.due(10.0 + MAX_AGE_S - 1) and writer.due(10.0 + MAX_AGE_S)
    for number in range(1, MAX_EXECUTIONS):
        writer.add(execution(number, calls=0), now=10.0)
    assert writer.due(10.0)


def test_an_attempt_is_sealed_once_also_by_the_next_writer(run: RunLayout) -> None:
    sealed(run, execution(1))
    writer = ShardWriter(run, "run", DERIVATION)
    assert writer.sealed(ExecutionId(1), 0) and not writer.sealed(ExecutionId(1), 1)
    writer.add(execution(1), now=0.0)
    assert writer.seal() is None
    writer.add(execution(1, attempt=1), now=0.0)
    assert writer.seal() is not None
    assert [line.file for line in read_manifest(run)] == ["000000.h5", "000001.h5"]


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_shards import DERIVATION, execution
from gyre_hpc.layout import RunLayout
from gyre_hpc.shards.writer import ShardWriter
writer = ShardWriter(RunLayout(Path(sys.argv[1])), "run", DERIVATION)
number = int(sys.argv[2])
while True:
    writer.add(execution(number, size=400), now=0.0)
    writer.seal()
    print(number, flush=True)
    number += 1
"""


def test_kill_9_of_the_writer_loses_nothing_that_was_sealed(run: RunLayout) -> None:
    code = KILLED.format(tests=str(Path(__file__).parent))
    number = 0
    for delay in (0.0, 0.002, 0.005):
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(run.root), str(number)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        for _ in range(3):
            number = int(child.stdout.readline()) + 1
        signal.sigtimedwait([], delay)
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read()
        child.wait()
        acknowledged = int(rest.split()[-1]) + 1 if rest.split() else number
        listed = [e.execution for line in read_manifest(run) for e in line.executions]
        assert listed == list(range(len(listed))) and len(listed) >= acknowledged
        number = len(listed)
    assert verify(run.root).ok


def test_a_shard_is_durable_before_it_has_its_name_and_named_before_it_is_listed(
    run: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, rename = os.fsync, os.rename

    def spy_fsync(descriptor: int) -> None:
        fsync(descriptor)
        steps.append("fsync " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    def spy_rename(source: Path, target: Path) -> None:
        assert not target.exists() and read_manifest(run) == []
        rename(source, target)
        steps.append(f"rename {target.name}")

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "rename", spy_rename)
    sealed(run, execution(1))
    draft, *rest = steps
    assert draft.startswith("fsync .000000.h5.")
    assert rest == ["rename 000000.h5", "fsync shards", "fsync manifest.jsonl"]


def test_a_torn_manifest_line_does_not_count_and_is_cut(run: RunLayout) -> None:
    sealed(run, execution(1))
    with open(run.manifest, "ab") as file:
        file.write(b'{"file":"000001.h5","by' + b"?" * 5000)
    assert len(read_manifest(run)) == 1
    sealed(run, execution(2))
    assert [line.executions[0].execution for line in read_manifest(run)] == [1, 2]


def test_a_shard_without_its_line_is_reported_and_its_name_taken_again(run: RunLayout) -> None:
    sealed(run, execution(1))
    run.manifest.unlink()
    assert verify(run.root).unlisted == ["000000.h5"]
    sealed(run, execution(2))
    assert verify(run.root).ok and verify(run.root).unlisted == []


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.999])
def test_a_truncated_shard_is_refused_by_name(run: RunLayout, kept: float) -> None:
    path = sealed(run, execution(1))
    other = sealed(run, execution(2))
    with open(path, "r+b") as file:
        file.truncate(int(path.stat().st_size * kept))
    report = verify(run.root)
    assert not report.ok
    assert "000000.h5" in report.shards[0].problem and "fix:" in report.shards[0].problem
    assert report.shards[1].problem == "" and other.exists()
    with pytest.raises(CorruptRecord, match=r"000000\.h5"), ShardReader(path) as shard:
        shard.record(0)


def test_a_flipped_bit_is_found_by_the_checksum(run: RunLayout) -> None:
    path = sealed(run, execution(1))
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    assert "xxh3" in verify(run.root).shards[0].problem


def test_a_missing_shard_is_named(run: RunLayout) -> None:
    sealed(run, execution(1)).unlink()
    assert "000000.h5" in verify(run.root).shards[0].problem
    with pytest.raises(MissingInput, match=r"000000\.h5"):
        show(run.root, 1)


@pytest.mark.parametrize(
    "column", ["derived/nodes/target", "derived/paths/leaf", "raw/calls/accepted", "raw/strands/fork"]
)
def test_derived_that_does_not_follow_from_raw_is_found(run: RunLayout, column: str) -> None:
    path = sealed(run, execution(1))
    with h5py.File(path, "r+") as file:
        values = file[column][:]
        values[-1] ^= 1
        file[column][:] = values
    content = path.read_bytes()
    line = msgspec.structs.replace(
        read_manifest(run)[0], bytes=len(content), xxh3=xxhash.xxh3_64_hexdigest(content)
    )
    run.manifest.write_bytes(msgspec.json.encode(line) + b"\n")
    problem = verify(run.root).shards[0].problem
    assert "000000.h5" in problem and ("does not follow" in problem or "fix:" in problem)


def test_a_full_disk_is_said_and_the_batch_is_kept(run: RunLayout) -> None:
    writer = ShardWriter(run, "run", DERIVATION)
    writer.add(execution(1), now=0.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(StorageFull, match=r"000000\.h5"):
            writer.seal()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert read_manifest(run) == []
    assert writer.seal() is not None
    assert verify(run.root).ok


PLAIN = """
import sys
sys.modules["hdf5plugin"] = None
import h5py
with h5py.File(sys.argv[1], "r") as file:
    total = []
    file.visititems(lambda name, item: total.append(item[:].nbytes) if isinstance(item, h5py.Dataset) else None)
print(sum(total))
"""


def read_plainly(path: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "HDF5_PLUGIN_PATH"}
    return subprocess.run(
        [sys.executable, "-c", PLAIN, str(path)], capture_output=True, text=True, env=environment
    )


def test_portable_export_opens_with_plain_h5py(run: RunLayout, tmp_path: Path) -> None:
    original = sealed(run, execution(1, calls=20, size=2000))
    assert read_plainly(original).returncode != 0
    export(run.root, tmp_path / "out")
    plain = read_plainly(tmp_path / "out" / "shards" / original.name)
    assert plain.returncode == 0, plain.stderr
    assert int(plain.stdout) > 0
    with h5py.File(tmp_path / "out" / "shards" / original.name) as file:
        assert file["raw/strands/tokens"].compression == "gzip"
    assert verify(tmp_path / "out").ok
    assert_equal(
        find_tables(tmp_path / "out", ExecutionId(1)) or {}, find_tables(run.root, ExecutionId(1)) or {}
    )
    with pytest.raises(TargetExists):
        export(run.root, tmp_path / "out")


def test_show_gives_the_attempt_that_counts(run: RunLayout) -> None:
    sealed(run, execution(4, attempt=0, superseded=True), execution(4, attempt=1))
    shown = show(run.root, 4)
    assert (shown.record.attempt, shown.record.reward) == (1, 0.0)
    assert show(run.root, 4, attempt=0).record.reward is None
    assert [call.accepted for call in shown.calls] == [True, True, False, True]
    targets = {node for path in shown.paths for node in path.targets}
    assert all(shown.nodes[node].target for node in targets)
    assert sum(path.target_tokens for path in shown.paths) == 3 * 25
    with pytest.raises(MissingInput, match="execution 9"):
        show(run.root, 9)


def test_stats_add_up(run: RunLayout) -> None:
    sealed(run, execution(1), execution(2))
    sealed(run, execution(3, superseded=True), execution(3, attempt=1))
    found = stats(run.root)
    assert (found.shards, found.executions, found.superseded, found.calls) == (2, 3, 1, 16)
    assert found.by_reason == {"harness_timeout": 3}
    assert found.calls_by_role == {"main": 12, "sub-agent": 4}
    assert found.reward_mean == pytest.approx((0.25 + 0.5 + 0.75) / 3)
    assert found.sampled_tokens == 16 * 25
    assert found.target_tokens == 4 * 3 * 25


def test_one_execution_is_read_without_the_others(run: RunLayout) -> None:
    path = sealed(run, *[execution(number, size=3000) for number in range(4)])
    with ShardReader(path) as shard:
        tables = shard.tables(2)
    assert len(tables["raw/calls"]["ordinal"]) == 4
    assert_equal(tables, encode(execution(2, size=3000), DERIVATION))


def test_a_run_without_shards_is_empty_not_an_error(run: RunLayout) -> None:
    assert verify(run.root).ok and stats(run.root).executions == 0
    shutil.rmtree(run.root)
    with pytest.raises(MissingInput):
        verify(run.root)
