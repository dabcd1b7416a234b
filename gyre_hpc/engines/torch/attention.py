"""Attention over paged KV (layout in model.py): one batched call for decode, one per segment for ragged prefill.

Decode treats the queries of one KV group as the rows of one attention call, so grouped heads cost no copies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gyre_hpc.engines.torch.model import Attend
from gyre_hpc.models.shape import ModelShape


def decode_attention(kv: Tensor, shape: ModelShape, table: Tensor, mask: Tensor) -> Attend:
    """One query per call. table [calls, pages] page ids; mask [calls, 1, 1, pages * page_tokens] additive."""
    calls, width = table.shape[0], mask.shape[-1]
    flat, page = table.reshape(-1), width // table.shape[1]
    groups, head = shape.num_key_value_heads, shape.head_dim
    pages = kv.view(kv.shape[0], -1, page * shape.kv_width)

    def attend(index: int, queries: Tensor) -> Tensor:
        found = pages[index].index_select(0, flat).view(calls, width, 2, groups, head)
        keys, values = found[:, :, 0].transpose(1, 2), found[:, :, 1].transpose(1, 2)
        grouped = queries.reshape(calls, groups, -1, head)
        return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).reshape(calls, -1)

    return attend


@dataclass(frozen=True)
class Segment:
    """Tokens start..end-1 of a ragged prefill are the last of a call with `context` tokens on `pages`."""

    start: int
    end: int
    context: int
    pages: Tensor


def prefill_attention(kv: Tensor, shape: ModelShape, page_tokens: int, segments: list[Segment]) -> Attend:
    """Causal attention of each segment over its call's cached and new tokens."""
    groups, head = shape.num_key_value_heads, shape.head_dim
    pages = kv.view(kv.shape[0], -1, page_tokens * shape.kv_width)
    masks = [_chunk_mask(part.end - part.start, part.context) for part in segments]

    def attend(index: int, queries: Tensor) -> Tensor:
        outputs = []
        for part, mask in zip(segments, masks, strict=True):
            found = pages[index].index_select(0, part.pages).view(1, -1, 2, groups, head)[:, : part.context]
            mixed = F.scaled_dot_product_attention(
                queries[None, part.start : part.end].transpose(1, 2),
                found[:, :, 0].transpose(1, 2),
                found[:, :, 1].transpose(1, 2),
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=True,
            )
            outputs.append(mixed[0].transpose(0, 1).reshape(part.end - part.start, -1))
        return torch.cat(outputs)

    return attend


def _chunk_mask(tokens: int, context: int) -> Tensor | None:
    """None for a chunk that starts the call (plain causal)."""
    if tokens == context:
        return None
    return torch.ones(tokens, context, dtype=torch.bool).tril(context - tokens)
