"""Folders outside the run folder go with their run, or when it is dead for long; those of a run that may go on stay."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre_hpc.composition import compose
from gyre_hpc.config import RunConfig, load_run_config, save_run_config
from gyre_hpc.errors import GyreError
from gyre_hpc.kv.page_store import PageKey, PageStore
from gyre_hpc.kv.shared import shared_folder
from gyre_hpc.launch.choice import tidy_nodes
from gyre_hpc.launch.job import state as job_state
from gyre_hpc.launch.local import LocalLauncher
from gyre_hpc.launch.nodes import leftovers
from gyre_hpc.launch.nodes.leftovers import KEPT_S, discard, mark, nobody_left, remove_stale, stale
from gyre_hpc.launch.nodes.scratch import entered, job_folder, main, remove_pages
from gyre_hpc.layout import RunLayout
from gyre_hpc.transport.region_files import make_owner_folder, remove_bare, remove_owner_folder, run_folder
from gyre_hpc.transport.regions import run_key
from gyre_hpc.transport.rendezvous import read_secret, write_secret

CONTROLLER = """
import sys
from pathlib import Path
from gyre_hpc.launch.nodes.scratch import entered
from gyre_hpc.launch.owner import acquire, release
from gyre_hpc.layout import RunLayout
layout = RunLayout(Path(sys.argv[1]))
owner = acquire(layout.root)
with entered(sys.argv[2], layout, "cell-0"):
    print("owned", flush=True)
    if sys.stdin.readline():
        release(layout.root, owner)
"""
"""A process that owns the run and works on its node, until it is told to end in order, or is killed."""

WORKER = """
import sys
from pathlib import Path
from gyre_hpc.launch.nodes.scratch import entered
from gyre_hpc.layout import RunLayout
with entered(sys.argv[2], RunLayout(Path(sys.argv[1])), "cell-0"):
    print("entered", flush=True)
    sys.stdin.readline()
"""
"""One that does not own it."""


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    folder = tmp_path / "node"
    folder.mkdir()
    return folder


def a_run(tmp_path: Path, node: Path, name: str) -> tuple[RunLayout, RunConfig]:
    layout = RunLayout(tmp_path / name)
    layout.root.mkdir()
    overrides = [f"cluster.scratch={node}", f"engine.sglang.kv_folder={tmp_path / 'shared'}"]
    save_run_config(compose(overrides), layout.root)
    write_secret(layout)
    return layout, load_run_config(layout.root)


def pages_of(layout: RunLayout, config: RunConfig) -> Path:
    """The run's shared pages, with one in it."""
    folder = shared_folder(config.engine, run_key(read_secret(layout)))
    assert folder is not None
    PageStore(folder, 1 << 20).put([(PageKey("", b"layout", b"prefix"), b"page")])
    mark(folder, layout)
    return folder


def a_page(folder: Path) -> memoryview | None:
    return PageStore(folder, 1 << 20).get(PageKey("", b"layout", b"prefix")) if folder.exists() else None


def started(program: str, layout: RunLayout, node: Path) -> subprocess.Popen[bytes]:
    """The program, once it has entered."""
    command = [sys.executable, "-c", program, str(layout.root), str(node)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    return process


@pytest.fixture
def controller(tmp_path: Path, node: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A living one, of the run `run`."""
    layout, _ = a_run(tmp_path, node, "run")
    process = started(CONTROLLER, layout, node)
    yield process
    process.kill()
    process.wait()


def test_what_a_dead_run_left_goes_once_nobody_has_used_it_for_long(
    tmp_path: Path, node: Path, controller: subprocess.Popen[bytes]
) -> None:
    layout = RunLayout(tmp_path / "run")
    config = load_run_config(layout.root)
    pages, (scratch,) = pages_of(layout, config), node.glob("gyre-*")
    regions = make_owner_folder(run_key(read_secret(layout)), "cell-0").parents[1]
    folders = [*leftovers.on_node(node, regions.parent), *leftovers.shared(config)]
    assert {pages, scratch, regions} <= set(folders)
    later = time.time() + 2 * KEPT_S
    assert not nobody_left(layout) and remove_stale([pages, scratch, regions], later) == []
    controller.kill()
    controller.wait()
    assert nobody_left(layout) and remove_stale([pages, scratch, regions]) == [], "it may be resumed"
    assert a_page(pages) == b"page"
    assert remove_stale([pages, scratch, regions], later) == [pages, scratch, regions]
    assert not any(folder.exists() for folder in (pages, scratch, regions))
    assert layout.config.is_file()


def test_a_run_that_waits_in_the_queue_keeps_what_it_left(
    tmp_path: Path, node: Path, controller: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = RunLayout(tmp_path / "run")
    pages = pages_of(layout, load_run_config(layout.root))
    controller.communicate(b"end\n")
    layout.jobs.mkdir()
    (layout.jobs / "7_submission.sh").touch()
    layout.service_job.parent.mkdir()
    layout.service_job.write_text("8\n")
    later = time.time() + 2 * KEPT_S
    for answer, whether in (("7|PENDING", False), ("7|COMPLETED\n8|RUNNING", False), ("7|COMPLETED", True)):
        monkeypatch.setattr(job_state, "query", lambda *argv, answer=answer: answer)
        assert stale(pages, later) is whether


def test_what_names_no_run_or_is_a_link_is_nobodys_to_remove(tmp_path: Path, node: Path) -> None:
    layout, config = a_run(tmp_path, node, "run")
    pages, later = pages_of(layout, config), time.time() + 2 * KEPT_S
    link = pages.with_name("link")
    link.symlink_to(pages)
    unmarked = pages.with_name("unmarked")
    unmarked.mkdir()
    assert remove_stale([link, unmarked, pages.with_name("absent")], later) == []
    assert a_page(pages) == b"page" and unmarked.exists()


def test_pages_of_a_run_folder_that_is_gone_go_by_their_age(tmp_path: Path, node: Path) -> None:
    """Another host may see the run that this one does not."""
    layout, config = a_run(tmp_path, node, "run")
    pages = pages_of(layout, config)
    layout.root.rename(tmp_path / "moved")
    assert remove_stale([pages]) == []
    moved = RunLayout(tmp_path / "moved")
    mark(pages, moved, anew=False)
    assert leftovers.is_of(pages, layout) and not leftovers.is_of(pages, moved)
    assert remove_stale([pages], time.time() + 2 * KEPT_S) == [pages]


def test_a_run_that_is_over_takes_its_own_pages_with_it_and_no_others(tmp_path: Path, node: Path) -> None:
    runs = [a_run(tmp_path, node, name) for name in ("run", "other")]
    pages, others = (pages_of(*run) for run in runs)
    assert main(["--run", str(runs[0][0].root)]) == 0
    assert a_page(pages) == b"page", "a job has ended, or started again, and the run goes on"
    assert main(["--run", str(runs[0][0].root), "--over"]) == 0
    assert not pages.exists() and a_page(others) == b"page"
    assert list(pages.parent.iterdir()) == [others]


@pytest.mark.parametrize("over", [False, True])
async def test_on_one_machine_too_only_the_end_for_good_takes_the_pages(
    tmp_path: Path, node: Path, over: bool
) -> None:
    layout, config = a_run(tmp_path, node, "run")
    pages = pages_of(layout, config)
    regions = make_owner_folder(run_key(read_secret(layout)), "cell-0")
    await tidy_nodes(LocalLauncher(), config, layout, over=over)
    assert pages.exists() is not over and not regions.exists()


def test_who_still_writes_when_the_run_is_over_leaves_nothing(tmp_path: Path, node: Path) -> None:
    layout, config = a_run(tmp_path, node, "run")
    pages = pages_of(layout, config)
    store, begun, end = PageStore(pages, 1 << 24), threading.Event(), threading.Event()

    def write() -> None:
        for number in range(1 << 20):
            try:
                store.put([(PageKey("", b"layout", b"%d" % number), bytes(4096))])
            except OSError:
                return
            begun.set()
            if end.is_set():
                return

    writer = threading.Thread(target=write)
    writer.start()
    begun.wait()
    remove_pages(config, layout)
    end.set()
    writer.join()
    remove_pages(config, layout)
    assert not list(pages.parent.iterdir())


def test_what_a_removal_left_half_done_is_found_again(tmp_path: Path, node: Path) -> None:
    layout, config = a_run(tmp_path, node, "run")
    pages = pages_of(layout, config)
    going = pages.rename(pages.with_name(f".going-{pages.name}"))
    assert going in list(leftovers.shared(config))
    assert remove_stale([going]) == [going] and not going.exists()
    discard(pages)


def test_a_removal_that_was_cut_short_loses_its_mark_and_hinders_none(tmp_path: Path, node: Path) -> None:
    layout, config = a_run(tmp_path, node, "run")
    pages = pages_of(layout, config)
    going = pages.with_name(f".going-{pages.name}")
    going.mkdir()
    (going / "page").touch()
    discard(pages)
    assert not pages.exists() and not going.exists()
    going.mkdir()
    assert remove_stale([going]) == [going] and not going.exists()


def test_a_folder_that_a_process_holds_stays_whoever_cannot_see_its_run(tmp_path: Path, node: Path) -> None:
    layout, _ = a_run(tmp_path, node, "run")
    later = time.time() + 2 * KEPT_S
    process = started(WORKER, layout, node)
    try:
        (scratch,), regions = node.glob("gyre-*"), run_folder(run_key(read_secret(layout)))
        layout.root.rename(tmp_path / "out of sight")
        assert stale(scratch, later) and remove_stale([scratch, regions], later) == []
        assert (scratch / "cell-0").is_dir()
    finally:
        process.kill()
        process.wait()
    assert remove_stale([scratch, regions], later) == [scratch, regions]


def test_a_place_that_cannot_be_read_ends_no_run(
    tmp_path: Path, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, config = a_run(tmp_path, node, "run")

    def broken(self: Path, pattern: str) -> Iterator[Path]:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(Path, "glob", broken)
    assert list(leftovers.shared(config)) == [] == list(leftovers.on_node(node, node))


def test_nothing_is_written_into_a_folder_of_another_user(
    tmp_path: Path, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, _ = a_run(tmp_path, node, "run")
    planted, victim = job_folder(str(node), layout), tmp_path / "victim"
    planted.mkdir()
    victim.write_text("mine")
    (planted / leftovers.MARK).symlink_to(victim)
    monkeypatch.setattr("os.getuid", lambda: planted.stat().st_uid + 1)
    with pytest.raises(GyreError, match="belongs to another user"), entered(str(node), layout, "cell-0"):
        pass
    assert victim.read_text() == "mine"


def test_a_job_that_hands_its_run_back_does_not_tidy_up_after_others(
    tmp_path: Path, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is little time."""
    layout, _ = a_run(tmp_path, node, "run")
    told: list[bool] = []
    monkeypatch.setattr("gyre_hpc.launch.nodes.scratch.remove_stale", lambda config: told.append(True))
    assert main(["--run", str(layout.root)]) == 0 and told == []
    assert main(["--run", str(layout.root), "--over"]) == 0 and told == [True]


def test_a_process_that_ends_leaves_the_marks_of_folders_that_others_use(tmp_path: Path, node: Path) -> None:
    """A process that has just entered has nothing of its own in them yet."""
    layout, _ = a_run(tmp_path, node, "run")
    key = run_key(read_secret(layout))
    job, regions = job_folder(str(node), layout), run_folder(key)
    with started(WORKER, layout, node) as other:
        (job / "cell-0").rmdir()
        remove_owner_folder(make_owner_folder(key, "gateway-0"))
        remove_bare(job)
        assert leftovers.is_of(job, layout) and leftovers.is_of(regions, layout)
        other.communicate(b"end\n")
    assert not job.exists() and not regions.exists()


def test_the_last_of_a_run_takes_the_mark_of_its_regions_along(tmp_path: Path, node: Path) -> None:
    layout, _ = a_run(tmp_path, node, "run")
    key = run_key(read_secret(layout))
    first, second = make_owner_folder(key, "cell-0"), make_owner_folder(key, "cell-1")
    mark(run_folder(key), layout)
    remove_owner_folder(first)
    assert leftovers.is_of(run_folder(key), layout)
    remove_owner_folder(second)
    assert not run_folder(key).exists()
