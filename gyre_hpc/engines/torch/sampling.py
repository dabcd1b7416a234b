"""The sampling law: temperature 1, no truncation, with the exact log-probability of what was drawn; or greedy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor


def sample(
    logits: Tensor, greedy: npt.NDArray[np.bool_], generator: torch.Generator
) -> tuple[list[int], list[float]]:
    """One id per row of `logits` [rows, vocabulary] at temperature 1 (argmax where `greedy`), with its exact log-prob.

    Inverse transform on a float64 cumulative sum: one uniform number per row instead of one exponential per entry.
    """
    logprobs = F.log_softmax(logits, -1)
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    uniform = torch.rand(len(logits), 1, dtype=torch.float64, generator=generator)
    ids = torch.searchsorted(cumulative, uniform.mul_(cumulative[:, -1:]), right=True).clamp_(
        max=logits.shape[-1] - 1
    )
    if greedy.any():
        ids = torch.where(torch.from_numpy(greedy)[:, None], logprobs.argmax(-1, keepdim=True), ids)
    return ids[:, 0].tolist(), logprobs.gather(1, ids)[:, 0].tolist()
