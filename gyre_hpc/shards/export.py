"""`gyre shards export RUN OUT --portable`: the same shards for readers without our filter plugin.

Every dataset is copied with gzip+shuffle, in a file layout that HDF5 1.10 and plain h5py open; the manifest beside them
has the new sizes and checksums.
"""

from __future__ import annotations

from pathlib import Path

import h5py
import msgspec
import xxhash

from gyre_hpc.errors import GyreError
from gyre_hpc.files import replace_file
from gyre_hpc.layout import RunLayout
from gyre_hpc.shards.format import CHUNK, SMALL
from gyre_hpc.shards.manifest import ShardLine, append_line, read_manifest
from gyre_hpc.shards.reader import ShardReader, damage_named

PORTABLE = ("earliest", "v110")


class TargetExists(GyreError):
    """The export folder already holds shards (names it)."""

    exit_code = 2


def export(run_dir: Path, out_dir: Path) -> list[ShardLine]:
    """Write portable copies to OUT/shards and OUT/manifest.jsonl; returns its lines."""
    source, target = RunLayout(run_dir), RunLayout(out_dir)
    if target.manifest.exists():
        raise TargetExists(f"{target.manifest} exists", fix="name an empty folder")
    target.shards.mkdir(parents=True, exist_ok=True)
    lines = []
    for line in read_manifest(source):
        with ShardReader(source.shards / line.file):
            image = portable_image(source.shards / line.file)
        replace_file(target.shards / line.file, image)
        lines.append(msgspec.structs.replace(line, bytes=len(image), xxh3=xxhash.xxh3_64_hexdigest(image)))
        append_line(target, lines[-1])
    return lines


def portable_image(path: Path) -> bytes:
    """The bytes of a portable copy of one shard."""
    with (
        damage_named(path),
        h5py.File(path, "r", locking=False) as source,
        h5py.File("portable", "w", driver="core", backing_store=False, libver=PORTABLE) as target,
    ):

        def copy(name: str, item: h5py.Group | h5py.Dataset) -> None:
            if isinstance(item, h5py.Group):
                target.create_group(name)
                return
            filters = (
                dict(chunks=(min(CHUNK, len(item)),), compression="gzip", shuffle=True)
                if len(item) > SMALL
                else {}
            )
            target.create_dataset(name, data=item[:], **filters).attrs.update(dict(item.attrs))

        source.visititems(copy)
        target.attrs.update(dict(source.attrs))
        target.flush()
        image: bytes = target.id.get_file_image()
    return image
