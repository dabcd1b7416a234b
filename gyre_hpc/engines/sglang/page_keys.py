"""Which page of our store holds which tokens, as SGLang names them: whoever moves a call asks for its pages by these keys.

SGLang (0.5.21, mem_cache/utils.py) chains SHA-256 over the tokens of each page; the chain begins with the request's
`extra_key`, our KV namespace, so pages of another namespace have other keys. The namespace of a `PageKey` is therefore
empty here, and whatever forgets namespaces must leave the empty one alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import numpy as np

from gyre_hpc.kv.page_store import PageKey

NAMESPACE: Final = ""
_SEED: Final = b"sglang-cache-namespace-v1"


def chain_seed(kv_key: str) -> bytes:
    """What the chain of a call with this `extra_key` and no `cache_salt` begins with."""
    encoded = kv_key.encode()
    part = b"\x01" + len(encoded).to_bytes(8, "little") + encoded
    return hashlib.sha256(_SEED + part + b"\x00").digest()


def prefix_hashes(kv_key: str, ids: Sequence[int], page_tokens: int) -> list[bytes]:
    """Hash of each full page of `ids`, in order."""
    tokens = np.asarray(ids, dtype="<u4")
    hashes, last = [], chain_seed(kv_key)
    for first in range(0, len(ids) - page_tokens + 1, page_tokens):
        last = hashlib.sha256(last + tokens[first : first + page_tokens].tobytes()).digest()
        hashes.append(last)
    return hashes


def rank_layout(
    seed: str, *, tp: tuple[int, int] = (0, 1), pp: tuple[int, int] = (0, 1), cp: tuple[int, int] = (0, 1)
) -> bytes:
    """Layout digest of one rank's part of a page. Pairs are (rank, size); `tp` of MLA models is (0, 1), all ranks hold the same."""
    return hashlib.sha256(f"{seed}|tp{tp}|pp{pp}|cp{cp}".encode()).digest()


def page_keys(seed: str, kv_key: str, ids: Sequence[int], page_tokens: int) -> list[PageKey]:
    """Keys of the full pages of `ids` on an engine of one rank, in order."""
    layout = rank_layout(seed)
    return [PageKey(NAMESPACE, layout, prefix) for prefix in prefix_hashes(kv_key, ids, page_tokens)]
