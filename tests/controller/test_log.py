"""What a person reads when the disk of a run is full."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from gyre_hpc.controller.train import logged_to, resumable
from gyre_hpc.errors import StorageFull


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
