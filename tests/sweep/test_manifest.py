"""The manifest of a sweep: one whole line per point, in order, at every moment."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gyre_hpc.errors import CorruptRecord, MissingInput
from gyre_hpc.layout import RunLayout
from gyre_hpc.sweep.manifest import FILE_NAME, Manifest
from tests.sweep.sweeps import FIRST, NOON, SECOND, THIRD, a_run

SNAPSHOT = """\
{"overrides":["experiment=quickstart","schedule=gyre"],"swept":["schedule=gyre"],"run":"../run-1","job":"77","error":null,"time":"2026-01-01T12:00:00Z"}
{"overrides":["experiment=quickstart","schedule=colocate"],"swept":["schedule=colocate"],"run":null,"job":null,"error":"model.path: no such folder","time":"2026-01-01T12:00:00Z"}
{"overrides":["experiment=quickstart","schedule=async"],"swept":["schedule=async"],"run":null,"job":null,"error":null,"time":"2026-01-01T12:00:00Z"}
"""


def filled(root: Path) -> Manifest:
    manifest = Manifest.opened(root / "sweep")
    for point in (FIRST, SECOND, THIRD):
        manifest.record(point, time=NOON)
    manifest.record(SECOND, error="model.path: no such folder", time=NOON)
    manifest.record(FIRST, run=a_run(root), job="77", time=NOON)
    return manifest


def test_the_file_has_a_line_per_point_in_the_order_of_the_sweep(tmp_path: Path) -> None:
    manifest = filled(tmp_path)
    assert (manifest.folder / FILE_NAME).read_text() == SNAPSHOT
    assert [path.name for path in manifest.folder.iterdir()] == [FILE_NAME]
    assert Manifest.existing(manifest.folder).entries == manifest.entries


def test_a_sweep_that_was_moved_with_its_runs_finds_them(tmp_path: Path) -> None:
    filled(tmp_path / "here")
    shutil.move(tmp_path / "here", tmp_path / "there")
    manifest = Manifest.existing(tmp_path / "there" / "sweep")
    assert [manifest.run_of(entry) for entry in manifest.entries] == [
        RunLayout(tmp_path / "there" / "run-1"),
        None,
        None,
    ]


def test_the_newest_job_of_a_run_is_the_points_job_also_if_submitted_by_hand(tmp_path: Path) -> None:
    manifest = filled(tmp_path)
    (entry, *others) = manifest.entries
    assert manifest.job_of(entry) == "77"
    for number in (9, 77, 103):
        (tmp_path / "run-1" / "jobs" / f"{number}_submission.sh").touch()
    assert manifest.job_of(entry) == "103"
    assert [manifest.job_of(other) for other in others] == [None, None]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    manifest = filled(tmp_path)
    with (manifest.folder / FILE_NAME).open("ab") as file:
        file.write(b'{"overrides":[')
    with pytest.raises(CorruptRecord, match=r"manifest\.jsonl, line 4"):
        Manifest.existing(manifest.folder)


def test_a_folder_of_no_sweep_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingInput, match=str(tmp_path)):
        Manifest.existing(tmp_path)
