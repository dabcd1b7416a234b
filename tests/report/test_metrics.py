"""metrics.jsonl: what is written is read; a torn end is no error, any other damage is, by file and line."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from gyre_hpc.errors import CorruptRecord
from gyre_hpc.report import metrics as m
from tests.report import runs


def test_every_kind_of_line_survives_the_file(tmp_path: Path) -> None:
    lines = runs.counted()
    assert {type(line) for line in lines} == set(m.AnyMetric.__args__)
    assert list(m.read_metrics(runs.write(tmp_path / "metrics.jsonl", lines))) == lines


def test_no_file_is_no_lines(tmp_path: Path) -> None:
    assert list(m.read_metrics(tmp_path / "metrics.jsonl")) == []


def test_a_torn_last_line_is_skipped(tmp_path: Path) -> None:
    path = runs.write(tmp_path / "metrics.jsonl", runs.counted())
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    assert list(m.read_metrics(path)) == runs.counted()[:-1]


def test_a_writer_after_a_crash_cuts_the_torn_line_off(tmp_path: Path) -> None:
    first, second, third = m.Opened(0.0), m.Fault(1.0, "cell-1", "died"), m.Opened(2.0)
    path = runs.write(tmp_path / "metrics.jsonl", [first, second])
    path.write_bytes(path.read_bytes()[:-3])
    runs.write(path, [third])
    assert list(m.read_metrics(path)) == [first, third]


def test_a_file_that_is_one_torn_line_starts_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind":"opened"' + b" " * 100_000)
    runs.write(path, [m.Opened(5.0)])
    assert list(m.read_metrics(path)) == [m.Opened(5.0)]


@pytest.mark.parametrize(
    "damage", [b"{not json}\n", b'{"kind":"unheard_of","t":1.0}\n', b'{"kind":"opened"}\n']
)
def test_a_corrupt_line_is_named_by_file_and_line(tmp_path: Path, damage: bytes) -> None:
    path = runs.write(tmp_path / "metrics.jsonl", [m.Opened(0.0), m.Opened(1.0), m.Opened(2.0)])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + damage + lines[2])
    with pytest.raises(CorruptRecord, match=rf"{path}:2: ") as caught:
        list(m.read_metrics(path))
    assert caught.value.fix


def test_a_whole_but_corrupt_last_line_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"{}\n")
    with pytest.raises(CorruptRecord, match=rf"{path}:1: "):
        list(m.read_metrics(path))


def test_a_full_disk_costs_the_line_not_the_run(caplog: pytest.LogCaptureFixture) -> None:
    writer = m.MetricsWriter.__new__(m.MetricsWriter)
    writer._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
    with caplog.at_level(logging.WARNING):
        writer.write(m.Opened(0.0))
    writer.close()
    assert "the line is dropped" in caplog.text
