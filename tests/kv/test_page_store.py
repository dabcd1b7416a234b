"""A page comes back whole and its own, or not at all; the store keeps its bound whoever writes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre_hpc.kv.page_store import PageKey, PageStore, encode_page

LAYOUT, OTHER = b"\x01" * 32, b"\x02" * 32
PAYLOAD = bytes(range(256)) * 4
SIZE = len(encode_page(PageKey("w0", LAYOUT, b"\0" * 32), PAYLOAD))


def key(index: int, namespace: str = "w0", layout: bytes = LAYOUT) -> PageKey:
    return PageKey(namespace, layout, index.to_bytes(32, "little"))


def aged(store: PageStore, index: int, seconds: float) -> None:
    """As if the page had been used last so long ago."""
    then = time.time() - seconds
    os.utime(store.path(key(index)), (then, then))


def test_a_page_comes_back_as_it_was_put_also_for_another_process(tmp_path: Path) -> None:
    store, other = PageStore(tmp_path / "kv", 1 << 20), PageStore(tmp_path / "kv", 1 << 20)
    assert store.put([(key(0), PAYLOAD), (key(1), PAYLOAD[::-1])]) == 2
    assert [other.get(key(0)), other.get(key(1)), other.get(key(2))] == [PAYLOAD, PAYLOAD[::-1], None]
    assert store.put([(key(0), b"other bytes")]) == 1
    assert other.get(key(0)) == PAYLOAD


def test_a_page_of_another_namespace_or_layout_is_not_found(tmp_path: Path) -> None:
    store = PageStore(tmp_path, 1 << 20)
    store.put([(key(0), PAYLOAD)])
    assert store.get(key(0, "w1")) is None and store.get(key(0, layout=OTHER)) is None
    assert store.counts.rejected == 0


@pytest.mark.parametrize("foreign", [key(0, "w1"), key(0, layout=OTHER), key(1)])
def test_a_file_that_lies_under_a_key_of_others_is_not_served(tmp_path: Path, foreign: PageKey) -> None:
    store = PageStore(tmp_path, 1 << 20)
    store.put([(key(0), PAYLOAD)])
    store.path(key(0)).rename(store.path(foreign))
    assert store.get(foreign) is None
    assert store.counts.rejected == 1 and not store.has(foreign)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_never_served(tmp_path: Path, data: st.DataObject) -> None:
    store = PageStore(tmp_path, 1 << 20)
    store.put([(key(7), PAYLOAD)])
    path = store.path(key(7))
    whole = path.read_bytes()
    damage = data.draw(st.sampled_from(["flip", "cut", "grow", "swap"]))
    if damage == "flip":
        at, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
        torn = whole[:at] + bytes([whole[at] ^ (1 << bit)]) + whole[at + 1 :]
    elif damage == "cut":
        torn = whole[: data.draw(st.integers(0, len(whole) - 1))]
    elif damage == "grow":
        torn = whole + data.draw(st.binary(min_size=1, max_size=64))
    else:
        at = data.draw(st.integers(1, len(whole) - 1))
        torn = whole[at:] + whole[:at]
    path.write_bytes(torn)
    served = store.get(key(7))
    assert served is None or (torn == whole and served == PAYLOAD)
    assert store.has(key(7)) == (torn == whole)
    path.unlink(missing_ok=True)


def test_the_least_recently_used_page_goes_first(tmp_path: Path) -> None:
    store = PageStore(tmp_path, 8 * SIZE)
    store.put([(key(index), PAYLOAD) for index in range(8)])
    for index in range(8):
        aged(store, index, 100 - index)
    store.get(key(0))
    store.put([(key(8), PAYLOAD)])
    assert [store.has(key(index)) for index in range(3)] == [True, False, True]
    assert store.used_bytes <= 8 * SIZE and store.get(key(8)) == PAYLOAD


def test_a_leased_page_is_not_evicted_before_its_lease_is_over(tmp_path: Path) -> None:
    store = PageStore(tmp_path, 4 * SIZE)
    store.put([(key(index), PAYLOAD) for index in range(4)], lease_s=60.0)
    store.get(key(0))
    assert store.put([(key(4), PAYLOAD)]) == 0 and store.counts.refused == 1
    aged(store, 2, 1.0)
    assert store.put([(key(4), PAYLOAD)]) == 1 and not store.has(key(2))
    assert store.lease([key(0), key(1), key(2), key(3)], 60.0) == 2


def test_only_the_namespaces_in_use_are_kept(tmp_path: Path) -> None:
    store = PageStore(tmp_path, 1 << 20)
    store.put([(key(index, f"w{index % 2}"), PAYLOAD) for index in range(6)], lease_s=60.0)
    assert store.keep_only(frozenset({"w1"})) == 3
    assert [store.has(key(index, f"w{index % 2}")) for index in range(6)] == [False, True] * 3
    assert store.used_bytes == 3 * SIZE


def test_several_writers_keep_one_bound_and_one_that_dies_leaves_nothing_torn(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from gyre_hpc.kv.page_store import PageKey, PageStore\n"
        "store = PageStore(Path(sys.argv[1]), int(sys.argv[2])); start = int(sys.argv[3])\n"
        "for i in range(start, start + 4000): store.put([(PageKey('w0', b'l', b'%06d' % i), bytes(5000))])\n"
    )
    limit = 300_000
    writers = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(limit), str(start)])
        for start in (0, 2000, 100_000)
    ]
    store = PageStore(tmp_path, limit)
    while store.used_bytes < limit // 2:
        time.sleep(0.01)
    writers[0].kill()
    while any(writer.poll() is None for writer in writers):
        assert store.used_bytes <= limit
        time.sleep(0.02)
    assert [writer.returncode for writer in writers[1:]] == [0, 0]
    there = [i for i in (*range(6000), *range(100_000, 104_000)) if store.has(_numbered(i))]
    assert there and all(store.get(_numbered(i)) == bytes(5000) for i in there)
    store.put([(_numbered(200_000 + i), bytes(5000)) for i in range(60)])
    assert not list(tmp_path.glob(".*")) and store.counts.rejected == 0


def test_only_its_own_hosts_torn_files_are_removed_by_whoever_evicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system of several hosts another's turn need not be known here: its file may be about to be a page."""

    def dies_before_its_rename(host: str, index: int) -> Path:
        with monkeypatch.context() as patch:
            patch.setattr(socket, "gethostname", lambda: host)
            patch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                PageStore(tmp_path, 4 * SIZE).put([(key(index), PAYLOAD)])
        (partial,) = (path for path in tmp_path.glob(".*") if store.path(key(index)).name in path.name)
        return partial

    store = PageStore(tmp_path, 4 * SIZE)
    ours, theirs = dies_before_its_rename("node1", 0), dies_before_its_rename("node1.far", 1)
    monkeypatch.setattr(socket, "gethostname", lambda: "node1")
    store.put([(key(index), PAYLOAD) for index in range(10, 20)])
    assert store.counts.evicted and not ours.exists() and theirs.exists()


def test_two_hosts_write_one_page_under_two_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their processes may have the same number."""
    names: list[str] = []
    rename = Path.rename

    def noted(self: Path, target: Path) -> Path:
        names.append(self.name)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", noted)
    for host in ("node1", "node2"):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        store = PageStore(tmp_path / host, 1 << 20)
        store.put([(key(0), PAYLOAD)])
    assert len(set(names)) == 2


def _numbered(index: int) -> PageKey:
    return PageKey("w0", b"l", b"%06d" % index)
