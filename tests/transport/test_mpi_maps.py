"""Maps an endpoint keeps: the same file is mapped once; what is gone, replaced or too much is let go."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from gyre_hpc.transport.mpi.maps import Maps


class Files:
    """Files of 100 bytes, and how often they were mapped."""

    def __init__(self, folder: Path, keep_bytes: int = 1000) -> None:
        self.folder, self.maps, self.opened = folder, Maps(keep_bytes), 0

    def write(self, name: str, size: int = 100) -> None:
        part = self.folder / f".{name}"
        part.write_bytes(b"x" * size)
        part.rename(self.folder / name)

    def of(self, name: str, size: int = 100) -> mmap.mmap:
        return self.maps.of(str(self.folder / name), size, lambda: self.open(name, size))

    def open(self, name: str, size: int) -> mmap.mmap:
        self.opened += 1
        with (self.folder / name).open("r+b") as file:
            return mmap.mmap(file.fileno(), size)


def test_a_file_is_mapped_once_as_long_as_it_is_the_same(tmp_path: Path) -> None:
    files = Files(tmp_path)
    files.write("a")
    assert files.of("a") is files.of("a") and files.opened == 1
    files.write("a")
    files.of("a")
    assert files.opened == 2


def test_a_file_that_is_gone_is_let_go_and_not_given_out(tmp_path: Path) -> None:
    files = Files(tmp_path)
    files.write("a")
    files.of("a")
    (tmp_path / "a").unlink()
    files.maps.tidy()
    assert not files.maps._maps
    with pytest.raises(FileNotFoundError):
        files.of("a")


def test_a_file_of_another_size_is_mapped_again(tmp_path: Path) -> None:
    files = Files(tmp_path)
    files.write("a")
    files.of("a")
    with (tmp_path / "a").open("ab") as file:
        file.write(b"y")
    assert len(files.of("a", 101)) == 101 and files.opened == 2


def test_kept_maps_have_a_limit_and_the_oldest_goes(tmp_path: Path) -> None:
    files = Files(tmp_path, keep_bytes=250)
    for name in ("a", "b", "c"):
        files.write(name)
        files.of(name)
    assert [Path(path).name for path, _ in files.maps._maps.values()] == ["b", "c"]
