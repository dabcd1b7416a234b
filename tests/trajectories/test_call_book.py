"""What is kept of an attempt between its last record and the shard."""

from __future__ import annotations

import asyncio
from pathlib import Path

from gyre_hpc.gateway.call_log import CallLog, call_log_path
from gyre_hpc.gateway.frames import AttemptOpened, AttemptSealed
from gyre_hpc.layout import RunLayout
from gyre_hpc.records import ExecutionId
from gyre_hpc.trajectories.call_book import CallBook

KEY = (ExecutionId(3), 1)


def log_of_one_attempt(folder: Path) -> RunLayout:
    layout = RunLayout(folder)
    layout.create()

    async def write() -> None:
        log = CallLog(call_log_path(layout, 1000), 1000)
        log.append(AttemptOpened(*KEY, "key"))
        log.append(AttemptSealed(*KEY, 0, {}))
        log.close()

    asyncio.run(write())
    return layout


def test_an_attempt_is_complete_from_its_seal_until_it_is_forgotten(tmp_path: Path) -> None:
    book = CallBook(log_of_one_attempt(tmp_path), lambda execution, attempt: False)
    book.read()
    assert book.complete(KEY)
    book.forget(KEY)
    assert not book.complete(KEY)


def test_nothing_is_kept_of_an_attempt_at_rest(tmp_path: Path) -> None:
    book = CallBook(log_of_one_attempt(tmp_path), lambda execution, attempt: True)
    book.read()
    assert not book.complete(KEY)
