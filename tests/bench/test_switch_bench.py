"""What `gyre bench switch` reads off a run: moves of calls, memory over switches, calls lost; and one short real run."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre_hpc.bench import page_move, switch
from gyre_hpc.bench.memory import files_mib, growth, growth_by_kind
from gyre_hpc.bench.moves import Move, MoveReader
from gyre_hpc.gateway.frames import (
    CallFinished,
    CallOpened,
    CallProgress,
    Frame,
    TokensReceived,
    encode_float32,
    encode_int32,
)
from gyre_hpc.report import metrics as m


def opened(call: str, prompt: int) -> CallOpened:
    delta = encode_int32(list(range(prompt)))
    return CallOpened(
        call, 1, 1, 0, "", 0, delta, b"c", b"r", 9, (), False, "main", "openai-chat", 1.0, {}, ()
    )


def tokens(call: str, count: int, version: int) -> TokensReceived:
    return TokensReceived(
        call, encode_int32([7] * count), encode_float32([-0.5] * count), encode_int32([version])
    )


def progress(call: str, held_s: float, recomputed: int, reroutes: int) -> CallProgress:
    return CallProgress(call, held_s, recomputed, reroutes, 0)


def moves_of(*frames: Frame) -> MoveReader:
    reader = MoveReader()
    reader.read(frames)
    return reader


def test_a_move_counts_what_was_recomputed_and_how_long_the_call_waited() -> None:
    reader = moves_of(
        opened("a", 100),
        tokens("a", 29, 0),
        progress("a", 0.0, 0, 1),
        progress("a", 1.5, 17, 1),
        tokens("a", 3, 0),
        progress("a", 1.5, 17, 2),
        progress("a", 4.0, 149, 2),
        tokens("a", 1, 0),
        CallFinished("a", "stop", 33, 1.0, 4.0, 149, 2, ""),
    )
    assert reader.moves == [Move(129, 17, 1.5, True), Move(132, 132, 2.5, True)]
    assert reader.longest_held_s == 2.5


def test_a_call_that_meets_other_weights_is_no_move_of_pages() -> None:
    reader = moves_of(
        opened("a", 20), tokens("a", 2, 0), progress("a", 0.5, 22, 1), tokens("a", 2, 1),
        opened("b", 20), progress("b", 9.0, 0, 1), tokens("b", 2, 1),
    )  # fmt: skip
    assert [move.same_version for move in reader.moves] == [False]
    assert reader.longest_held_s == 9.0, (
        "a call that waited before its first token has no pages, but it waited"
    )


def test_growth_is_the_slope_and_its_error_knows_the_noise() -> None:
    counts = [float(count) for count in range(200)]
    slope, error = growth(counts, [5.0 + 0.25 * count for count in counts])
    assert slope == pytest.approx(0.25) and error == pytest.approx(0.0, abs=1e-9)
    noisy, error = growth(counts, [5.0 + 8.0 * (count * 7919 % 13) for count in counts])
    assert abs(noisy) < 3 * error
    with pytest.raises(ValueError, match="3 samples"):
        growth([1, 2, 3], [1, 2, 3])


def test_all_kinds_of_processes_grow_together() -> None:
    counts = [float(count) for count in range(40)]
    found = growth_by_kind(counts, [{"engine": count, "leader": 100.0 + 2 * count} for count in counts])
    assert {kind: round(slope, 6) for kind, (slope, _) in found.items()} == {
        "engine": 1.0,
        "leader": 2.0,
        "all": 3.0,
    }


def test_files_that_no_process_maps_are_counted_and_pages_that_are_bounded_are_not(tmp_path: Path) -> None:
    (tmp_path / "engine-0").mkdir()
    (tmp_path / "engine-0" / "model.safetensors").write_bytes(bytes(3 << 20))
    before = files_mib(tmp_path)
    (tmp_path / "engine-0" / "0123.page").write_bytes(bytes(1 << 20))
    assert before == pytest.approx(3.0, abs=0.1) and files_mib(tmp_path) == before
    (tmp_path / "engine-0" / "model.safetensors").unlink()
    assert files_mib(tmp_path) == 0.0


def ended(reason: str, lost: int) -> m.Ended:
    return m.Ended(1.0, 0, 0, reason, 0.5, 1.0, 4, 2, lost, 9, 0, 9, 0.0, pages_due=6, pages_found=4)


def finished(*lines: m.AnyMetric) -> switch.Run:
    counts = list(range(0, 120, 2))
    memory = [{"engine": 100.0 + 0.5 * count, "leader": 50.0} for count in counts]
    reader = MoveReader()
    reader.moves = [Move(129, 1, 0.5, True), Move(65, 65, 0.5, True), Move(129, 129, 9.0, False)]
    reader.longest_held_s = 1.25
    files = [300.0] * (len(counts) // 4) + [100.0 + 0.25 * count for count in counts[len(counts) // 4 :]]
    return switch.Run(list(lines), reader, counts, memory, files)


def test_figures_name_both_ways_and_lose_nothing_from_sight() -> None:
    found = switch.figures(
        finished(
            m.Switch(1.0, 0, "training", 2.0, {"drain": 0.5, "release": 1.0}),
            m.Switch(2.0, 0, "training", 4.0, {"drain": 1.5, "release": 1.0}),
            m.Switch(3.0, 0, "rollout", 1.0, {"load": 0.25}),
            ended("completed", 0),
            ended("infrastructure", 1),
            ended("harness_timeout", 0),
        )
    )
    assert found["switches"].value == 3
    assert found["to_training_s"].value == 3.0 and found["to_training_drain_s"].value == 1.0
    assert found["to_rollout_load_s"].value == 0.25
    assert (found["calls_lost"].value, found["calls_lost"].unit) == (1, "calls")
    failed = found["executions_failed"]
    assert (failed.value, failed.unit) == (2, "executions"), "that of the lost call, and a client that failed"
    assert found["harness_stall_s"].value == 1.25
    assert found["moved_call_s"].value == 0.5
    assert found["pages_moved_share"].value == pytest.approx(12 / 18)
    assert found["memory_growth_mib_per_switch"].value == pytest.approx(0.5)
    assert found["files_growth_mib_per_switch"].value == pytest.approx(0.25), "whatever there was at first"


@pytest.mark.full
def test_cells_switch_under_long_calls_and_none_is_lost(tmp_path: Path) -> None:
    """About a minute."""
    run = switch.make_switches(tmp_path, 8)
    found = switch.figures(run)
    assert {line.role for line in run.switches} == {"training", "rollout"}
    assert found["calls_lost"].value == found["executions_failed"].value == 0
    assert run.moves.moves, "calls were under way at the switches"
    assert all(sample["engine"] > 0 for sample in run.memory[-1:]) and run.files[-1] > 0


@pytest.mark.full
async def test_a_prompts_pages_move_between_two_engines(tmp_path: Path) -> None:
    rounds = await page_move.measure(tmp_path, tokens=200, rounds=1)
    assert [(one.moved, one.full) for one in rounds] == [(12, 12)]
    assert page_move.figures(rounds)["prefill_over_move"].value > 0
