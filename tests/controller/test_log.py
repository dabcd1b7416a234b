"""What a person reads when the disk of a run is full, and what is left there."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest

from gyre_hpc.controller.train import logged_to, resumable
from gyre_hpc.errors import StorageFull
from gyre_hpc.files import replace_file


def test_a_log_on_a_full_disk_does_not_hide_why_the_run_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "controller.log").symlink_to("/dev/full")
    with pytest.raises(StorageFull, match="the journal"), logged_to(tmp_path):
        logging.getLogger("gyre_hpc").warning("this line stays in the buffer")
        raise StorageFull("no room for the journal", fix="free space")
    assert "Traceback" not in capsys.readouterr().err


def test_whatever_has_no_room_says_how_to_go_on(tmp_path: Path) -> None:
    with pytest.raises(StorageFull) as met, resumable(tmp_path, "gyre submit"):
        raise StorageFull("shards/000001.h5: full", fix="free space")
    assert met.value.fix == f"free space; then: gyre submit resume={tmp_path}"
    assert met.value.message == "shards/000001.h5: full"


def test_a_file_that_could_not_be_replaced_leaves_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    replace_file(tmp_path / "owner", b"before")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace_file(tmp_path / "owner", b"after")
    assert [path.name for path in tmp_path.iterdir()] == ["owner"]
    assert (tmp_path / "owner").read_bytes() == b"before"
