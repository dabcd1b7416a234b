"""Folders of a run in the memory that all users of a node share: this user's alone, or none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gyre_hpc.errors import StorageFull
from gyre_hpc.transport.mpi.host import EndpointHost
from gyre_hpc.transport.region_files import make_private


async def test_neither_regions_nor_sockets_go_into_another_users_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "gyre-run"
    run.mkdir()
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(StorageFull, match="another user"):
        make_private(run, run / "cell-0")
    host = EndpointHost(run / "mpi" / "cell-0.1", 5.0, lambda message: None, lambda reason: None)
    with pytest.raises(StorageFull, match="another user"):
        await host.start()
    assert list(run.iterdir()) == []


def test_a_run_folder_that_another_process_removes_meanwhile_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, own, mkdir, left = tmp_path / "run", tmp_path / "run" / "cell-0", Path.mkdir, [1]

    def racing(path: Path, *args: object, **kwargs: object) -> None:
        if path == own and left:
            left.pop()
            run.rmdir()
        mkdir(path, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", racing)
    make_private(run, own)
    assert not left and own.stat().st_mode & 0o777 == 0o700
