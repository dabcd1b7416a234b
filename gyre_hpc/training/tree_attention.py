"""Attention and rotary positions over a prefix forest, as modules of Megatron's layer spec.

Token j sees token k iff tin[k] <= tin[j] < tout[k] and pos[k] <= pos[j]. One `TreeContext` per model says this for the
micro-step in progress; `TreeAttention` and `TreeRotary` read it. On the host each maximal chain of nodes is one or more
scaled-dot-product blocks over (ancestors + own); where chains are so short that calls cost more than pairs, one dense
mask is used. On a GPU flex_attention runs on a block mask. All three give the same numbers up to rounding.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gyre_hpc.records import Int32
from gyre_hpc.training import host_backend

with host_backend.quiet():
    from megatron.core.transformer.module import MegatronModule

_BLOCK_ROWS = 128
"""A chain is cut into blocks of this many rows: the host kernel computes most of what a causal mask hides (measured: a
causal call over 512 tokens costs as much as one without mask), so a small block is what saves the upper half."""
_CALL_PAIRS = 6000
"""Attention pairs that cost as much as one more block (measured: 4100 to 9200, 3 heads of 32, forward and backward)."""
_FLEX_MULTIPLE = 128
"""flex_attention wants the token count padded to a multiple of its block size."""


@dataclass(frozen=True)
class Block:
    """Query pieces `rows` attend to key pieces `keys` (ancestors, then own chain), causal at the bottom right.

    Both are indices into the context's `pieces`; `rows` are adjacent and end where `keys` end.
    """

    rows: tuple[int, ...]
    keys: tuple[int, ...]
    mask: Tensor | None
    """Additive [rows, keys] mask; None when the block is plain causal over its own rows."""


@dataclass
class TreeContext:
    """The micro-step in progress. Shapes: positions [S], rows [M] (hidden rows whose logits are wanted)."""

    positions: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    rows: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    pieces: tuple[int, ...] = ()
    """Lengths of the runs of tokens that blocks are made of; they partition [0, S)."""
    blocks: tuple[Block, ...] = ()
    dense_mask: Tensor | None = None
    flex_mask: Any = None

    def set(self, tin: Int32, tout: Int32, pos: Int32, rows: Int32, device: torch.device) -> None:
        """Prepare for a micro-step's forest."""
        self.positions = torch.from_numpy(pos).to(device, torch.long)
        self.rows = torch.from_numpy(rows).to(device, torch.long)
        self.blocks, self.dense_mask, self.flex_mask = (), None, None
        if device.type == "cuda":
            self.flex_mask = flex_block_mask(tin, tout, pos, device)
            return
        chains = attention_chains(tin, tout)
        if prefer_dense(chains, len(tin)):
            self.dense_mask = dense_mask(tin, tout, pos)
        else:
            self.pieces, self.blocks = blocks_of(chains)


Chain = tuple[int, int, tuple[tuple[int, int], ...]]
"""(start, stop, ancestor spans): rows that see the ancestors whole and themselves causally."""


def attention_chains(tin: Int32, tout: Int32) -> list[Chain]:
    """Maximal chains of a parent-first forest; a node directly behind its parent continues the parent's chain."""
    if not len(tin):
        return []
    starts = np.flatnonzero(np.r_[True, tin[1:] != tin[:-1]])
    bounds = [*starts.tolist(), len(tin)]
    chains: list[Chain] = []
    path: list[tuple[int, int, int]] = []
    for start, stop in itertools.pairwise(bounds):
        enter, leave = int(tin[start]), int(tout[start])
        path = [node for node in path if enter < node[2]]
        spans = _merge([(first, last) for first, last, _ in path])
        if chains and chains[-1][1] == start and path and path[-1][1] == start:
            chains[-1] = (chains[-1][0], stop, chains[-1][2])
        else:
            chains.append((start, stop, spans))
        path.append((start, stop, leave))
    return chains


def _merge(spans: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for start, stop in spans:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


def prefer_dense(chains: list[Chain], tokens: int) -> bool:
    """Whether one dense-mask call over all pairs is cheaper than one call per block."""
    pairs = calls = 0
    for start, stop, spans in chains:
        above = sum(last - first for first, last in spans)
        for first, last in _row_blocks(start, stop):
            pairs += (last - first) * (above + last - start)
            calls += 1
    return pairs + calls * _CALL_PAIRS > tokens * tokens


def blocks_of(chains: list[Chain]) -> tuple[tuple[int, ...], tuple[Block, ...]]:
    """Piece lengths and blocks. Cutting the tokens once into shared pieces keeps the backward pass linear in them."""
    bounds = [(start, stop, _row_blocks(start, stop), spans) for start, stop, spans in chains]
    cuts = {0} | {stop for _, _, rows, _ in bounds for _, stop in rows}
    cuts |= {edge for _, _, _, spans in bounds for span in spans for edge in span}
    edges = sorted(cuts)
    piece_at = {edge: index for index, edge in enumerate(edges)}

    def pieces(first: int, last: int) -> tuple[int, ...]:
        return tuple(range(piece_at[first], piece_at[last]))

    blocks = []
    for start, _, rows, spans in bounds:
        above = tuple(piece for span in spans for piece in pieces(*span))
        context = sum(last - first for first, last in spans)
        for first, last in rows:
            plain = first == start and not spans
            mask = None if plain else _corner(last - first, context + last - start)
            blocks.append(Block(pieces(first, last), above + pieces(start, last), mask))
    return tuple(last - first for first, last in itertools.pairwise(edges)), tuple(blocks)


def _row_blocks(start: int, stop: int) -> list[tuple[int, int]]:
    return [(first, min(first + _BLOCK_ROWS, stop)) for first in range(start, stop, _BLOCK_ROWS)]


def _corner(rows: int, keys: int) -> Tensor:
    """Additive mask, causal at the bottom right: the last row sees every key."""
    return torch.full((rows, keys), -torch.inf).triu(keys - rows + 1)


def dense_mask(tin: Int32, tout: Int32, pos: Int32) -> Tensor:
    """Boolean [S, S]: row j may attend to column k."""
    enter, leave, depth = (torch.from_numpy(x) for x in (tin, tout, pos))
    inside = (enter[None] <= enter[:, None]) & (enter[:, None] < leave[None])
    return inside & (depth[None] <= depth[:, None])


class TreeRotary(torch.nn.Module):
    """RoPE angles for the positions of the current micro-step: [S, 1, 1, head_dim]."""

    inverse: Tensor

    def __init__(self, context: TreeContext, head_dim: int, base: float) -> None:
        super().__init__()
        self.context = context
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        self.register_buffer("inverse", 1.0 / (base**exponent), persistent=False)

    def get_rotary_seq_len(self, *_: object, **__: object) -> int:
        """Megatron asks for a length; positions come from the context instead."""
        return 0

    def forward(self, *_: object, **__: object) -> Tensor:
        angles = torch.outer(self.context.positions.float(), self.inverse)
        return torch.cat((angles, angles), -1)[:, None, None, :]


class TreeAttention(MegatronModule):  # type: ignore[misc]
    """Megatron core_attention. query [s, 1, heads, d], key and value [s, 1, groups, d] -> [s, 1, heads * d]."""

    def __init__(
        self, config: Any, context: TreeContext, softmax_scale: float | None = None, **_: object
    ) -> None:
        super().__init__(config=config)
        self.context, self.scale = context, softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
        context = self.context
        if context.flex_mask is not None:
            out = flex(query, key, value, context.flex_mask, self.scale)
        elif context.dense_mask is not None:
            out = _attend(query, key, value, context.dense_mask, self.scale)
        else:
            out = self._blockwise(query, key, value)
        return out.reshape(query.shape[0], query.shape[1], -1)

    def _blockwise(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        lengths = list(self.context.pieces)
        queries, keys, values = (torch.split(x, lengths) for x in (query, key, value))
        parts = []
        for block in self.context.blocks:
            q, k, v = _gather(queries, block.rows), _gather(keys, block.keys), _gather(values, block.keys)
            parts.append(_attend(q, k, v, block.mask, self.scale))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def sharded_state_dict(self, *_: object, **__: object) -> dict[str, Any]:
        """No parameters."""
        return {}


def _gather(pieces: tuple[Tensor, ...], indices: tuple[int, ...]) -> Tensor:
    return torch.cat([pieces[index] for index in indices]) if len(indices) > 1 else pieces[indices[0]]


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """[s, 1, heads, d] in and out; plain causal when `mask` is None."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.permute(2, 0, 1, 3)


def flex_block_mask(tin: Int32, tout: Int32, pos: Int32, device: torch.device) -> Any:
    """flex_attention's block mask of the forest, padded to a multiple of the block size (padding sees itself)."""
    from torch.nn.attention.flex_attention import create_block_mask

    padded = -(-len(tin) // _FLEX_MULTIPLE) * _FLEX_MULTIPLE
    extra = np.arange(padded - len(tin), dtype=np.int32) + (int(tout.max(initial=0)) + 1)
    enter, leave, depth = (
        torch.from_numpy(np.concatenate(parts)).to(device)
        for parts in ((tin, extra), (tout, extra + 1), (pos, np.zeros_like(extra)))
    )

    def visible(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        inside = (enter[column] <= enter[row]) & (enter[row] < leave[column])
        return inside & (depth[column] <= depth[row])

    return create_block_mask(visible, None, None, padded, padded, device=str(device))


def flex(query: Tensor, key: Tensor, value: Tensor, block_mask: Any, scale: float | None) -> Tensor:
    """flex_attention on [s, 1, heads, d]; compiled on a GPU, where alone it has a backward pass."""
    rows = query.shape[0]
    pad = block_mask.shape[-1] - rows
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, 0, 0, pad)).permute(1, 2, 0, 3) for x in (query, key, value))
    out: Tensor = _flex_kernel(query.is_cuda)(
        q, k, v, block_mask=block_mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.permute(2, 0, 1, 3)[:rows]


@functools.cache
def _flex_kernel(compiled: bool) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    kernel: Callable[..., Any] = flex_attention
    return torch.compile(kernel, dynamic=False) if compiled else kernel
