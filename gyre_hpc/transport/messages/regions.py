"""Manifests: where a published region lies and how to check it."""

from __future__ import annotations

import enum

import msgspec
import xxhash


class RegionKind(enum.StrEnum):
    """What a region holds (design section 4)."""

    WEIGHTS = "weights"
    GRADIENT = "gradient"
    KV_PAGE = "kv_page"
    MICRO_STEPS = "micro_steps"


class Fragment(msgspec.Struct, frozen=True):
    """One array of a region. `xxh3` is the hex xxh3-64 of its bytes; `dtype` is numpy's (little-endian)."""

    id: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    xxh3: str


class Manifest(msgspec.Struct, frozen=True):
    """Where an immutable, versioned region lies and how to check it. `address` is host:port of the owner's server.

    `path` is the region's file on the owner's host; a puller that sees it maps it, any other takes one of the `ways`
    (backend name -> address of the region there) or asks `address`.
    """

    kind: RegionKind
    name: str
    version: int
    layout: str
    owner: str
    address: str
    fragments: tuple[Fragment, ...]
    path: str = ""
    ways: dict[str, str] = {}

    @property
    def content(self) -> str:
        """xxh3-64, hex, of the names and checksums of its arrays: equal wherever and whenever equal arrays are published."""
        told = "".join(f"{fragment.id}={fragment.xxh3};" for fragment in self.fragments)
        return xxhash.xxh3_64_hexdigest(told.encode())
