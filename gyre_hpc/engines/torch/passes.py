"""The engine's two forward passes: a chunk of prompts laid end to end, and one token of every live call.

Called by batching.py, which decides what is computed. Nothing here changes a call or the pool: a pass reads the ids and pages
of its calls, writes the KV of the ids that it computes into `kv`, and gives logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gyre_hpc.engines.torch.attention import Segment, decode_attention, prefill_attention
from gyre_hpc.engines.torch.calls import Call
from gyre_hpc.engines.torch.model import Qwen3


class Part(NamedTuple):
    """Ids first..last-1 of a call, to be computed in one pass."""

    call: Call
    first: int
    last: int

    @property
    def ends(self) -> bool:
        """Whether it reaches the call's last id, whose logits give the next one."""
        return self.last == len(self.call.ids)


def next_chunk(calls: Sequence[Call], tokens: int) -> list[Part]:
    """What to prefill next: the ids that the calls lack, in order, at most `tokens` in all."""
    parts = []
    for call in calls:
        last = min(call.computed + tokens, len(call.ids))
        if last > call.computed:
            parts.append(Part(call, call.computed, last))
            tokens -= last - call.computed
    return parts


def prefill_pass(model: Qwen3, kv: torch.Tensor, page_tokens: int, parts: Sequence[Part]) -> torch.Tensor:
    """Logits [parts that end their call, vocabulary] after the last ids of these calls."""
    ids, positions, slots, segments = _ragged(parts, page_tokens)
    ends = [segment.end - 1 for part, segment in zip(parts, segments, strict=True) if part.ends]
    return model.logits(
        torch.tensor(ids),
        positions,
        slots,
        kv,
        prefill_attention(kv, model.shape, page_tokens, segments),
        torch.tensor(ends, dtype=torch.int64),
    )


def _ragged(
    parts: Sequence[Part], page_tokens: int
) -> tuple[list[int], torch.Tensor, torch.Tensor, list[Segment]]:
    """Ids, positions and KV slots of the parts end to end, and which rows are whose."""
    ids: list[int] = []
    positions, slots, segments = [], [], []
    for call, first, last in parts:
        where = np.arange(first, last)
        pages = np.asarray(call.pages[: -(-last // page_tokens)])
        positions.append(where)
        slots.append(pages[where // page_tokens] * page_tokens + where % page_tokens)
        segments.append(Segment(len(ids), len(ids) + last - first, last, torch.from_numpy(pages)))
        ids += call.ids[first:last]
    joined = [torch.from_numpy(np.concatenate(rows)) for rows in (positions, slots)]
    return ids, joined[0], joined[1], segments


def decode_pass(
    model: Qwen3, kv: torch.Tensor, page_tokens: int, calls: Sequence[Call], table: npt.NDArray[np.int64]
) -> torch.Tensor:
    """Logits [calls, vocabulary] after the last id of each call; row i of `table` [calls, pages] holds the pages of call i."""
    positions = np.fromiter((len(call.ids) for call in calls), np.int64, len(calls)) - 1
    columns = int(positions.max()) // page_tokens + 1
    table = table[:, :columns]
    page = table[np.arange(len(calls)), positions // page_tokens]
    seen = np.arange(columns * page_tokens) <= positions[:, None]
    mask = np.where(seen, np.float32(0), np.float32(-np.inf))
    attend = decode_attention(kv, model.shape, torch.from_numpy(table), torch.from_numpy(mask)[:, None, None])
    return model.logits(
        torch.tensor([call.ids[-1] for call in calls]),
        torch.from_numpy(positions),
        torch.from_numpy(page * page_tokens + positions % page_tokens),
        kv,
        attend,
        None,
    )
