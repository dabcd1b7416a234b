"""What is said about KV pages between gateway and cells: JSON bodies of the page port (`kv/port.py`).

An offer names pages by key and says where they lie; bytes travel only between the ports, as regions.
"""

from __future__ import annotations

import msgspec

from gyre_hpc.kv.page_store import PageKey
from gyre_hpc.transport.messages import Manifest


class ExportIds(msgspec.Struct, frozen=True):
    """POST /kv/export: offer the full pages of these ids under this KV namespace."""

    kv_key: str
    input_ids: list[int]


class Offer(msgspec.Struct, frozen=True):
    """The leading full pages of a prompt that the port at `source` keeps for a while. Hex: `layout`, `prefixes`.

    `kv_key` is the KV namespace of the calls they are good for, `namespace` that of the pages in a store: an engine whose
    prefix hashes cover the former has an empty one.
    """

    kv_key: str
    namespace: str
    layout: str
    page_tokens: int
    prefixes: tuple[str, ...]
    source: str

    def keys(self) -> list[PageKey]:
        """The pages' keys, in the order of the prompt."""
        layout = bytes.fromhex(self.layout)
        return [PageKey(self.namespace, layout, bytes.fromhex(prefix)) for prefix in self.prefixes]


class Import(msgspec.Struct, frozen=True):
    """POST /kv/import: pull what is lacking of an offer within `deadline_s`."""

    offer: Offer
    deadline_s: float


class Imported(msgspec.Struct, frozen=True):
    """`pages` of the offer are here, of which `moved` were pulled: `bytes` in `seconds`. `reason`: why not all of it."""

    pages: int
    moved: int
    bytes: int
    seconds: float
    reason: str = ""


class Lend(msgspec.Struct, frozen=True):
    """POST /kv/lend, from port to port: publish these pages as a region."""

    pages: Offer


class Loan(msgspec.Struct, frozen=True):
    """The region; its fragments are named by prefix hash. Pages that were gone by then are left out."""

    manifest: Manifest


class Return(msgspec.Struct, frozen=True):
    """POST /kv/return: the region of this name has been pulled."""

    name: str
