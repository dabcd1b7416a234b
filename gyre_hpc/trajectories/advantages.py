"""Group-relative advantages, from the rewards of the valid executions and before any selection of paths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def advantages(rewards: Sequence[float], eps: float, std: bool) -> list[float] | None:
    """A = (r - mean) / (std + eps), or r - mean; None where all rewards are equal and nothing can be learned."""
    if not rewards or min(rewards) == max(rewards):
        return None
    values = np.asarray(rewards, np.float64)
    centred = values - values.mean()
    return list((centred / (values.std() + eps) if std else centred).tolist())
