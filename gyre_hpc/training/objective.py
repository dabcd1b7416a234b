"""The training objective (design section 8) as pure functions on tensors.

With b_t the recorded log-probability, d_t = logpi(t) - b_t, T_j the targets of path j, A the execution's advantage:

    s_j   = exp(mean over T_j of d_t)
    m     = 0 if (A > 0 and ratio > 1 + clip_high) or (A < 0 and ratio < 1 - clip_low), else 1
    rho_t = min(exp d_t, ratio_cap)
    l_t   = -m rho_t A logpi(t)            m and rho_t carry no gradient

`sequence_clip` takes ratio = s_j for every target of path j, `grpo` takes ratio = exp d_t. A target whose recorded
log-probability is NaN is supervised: l_t = -logpi(t), and it belongs to no T_j. The loss is sum over t of weight_t l_t.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gyre_hpc.config import ObjectiveConfig
from gyre_hpc.records import Int32
from gyre_hpc.trajectories.micro_steps import MicroStep


@dataclass(frozen=True)
class Targets:
    """Target arrays of one micro-step on the device of the logits. All shapes [M]; `paths` = P."""

    token: Tensor
    path: Tensor
    weight: Tensor
    advantage: Tensor
    behaviour: Tensor
    version: Int32
    paths: int

    @staticmethod
    def of(micro_step: MicroStep, device: torch.device) -> Targets:
        """Copy a micro-step's targets to `device`."""

        def put(array: np.ndarray[tuple[int], np.dtype[np.generic]], dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device, dtype)

        return Targets(
            token=put(micro_step.target, torch.long),
            path=put(micro_step.path, torch.long),
            weight=put(micro_step.weight, torch.float32),
            advantage=put(micro_step.advantage, torch.float32),
            behaviour=put(micro_step.behaviour_logprob, torch.float32),
            version=micro_step.version,
            paths=micro_step.paths,
        )


def token_logprobs(logits: Tensor, token: Tensor) -> Tensor:
    """logpi of each target: logits [M, vocab], token [M] -> [M]."""
    return -F.cross_entropy(logits, token, reduction="none")


def loss(logprob: Tensor, targets: Targets, config: ObjectiveConfig) -> tuple[Tensor, dict[str, float]]:
    """Weighted loss sum (scalar) and the metric sums of `training.metrics`. logprob [M]."""
    supervised = torch.isnan(targets.behaviour)
    with torch.no_grad():
        difference = torch.where(supervised, 0.0, logprob - targets.behaviour)
        keep = _kept(difference, ~supervised, targets, config)
        ratio = difference.clamp(max=math.log(config.ratio_cap)).exp()
        coefficient = torch.where(supervised, 1.0, keep * ratio * targets.advantage)
    total = -(targets.weight * coefficient * logprob).sum()
    sums = _sums(logprob.detach(), difference, keep, ratio, ~supervised, targets)
    return total, {"loss": total.item(), **sums}


def _kept(difference: Tensor, sampled: Tensor, targets: Targets, config: ObjectiveConfig) -> Tensor:
    """m per target as 0.0 or 1.0 [M]; the ratio is compared as a logarithm, so that it cannot overflow."""
    log_ratio = difference
    if config.kind == "sequence_clip":
        log_ratio = path_mean(difference, sampled, targets.path, targets.paths)[targets.path]
    too_high = (targets.advantage > 0) & (log_ratio > math.log1p(config.clip_high))
    too_low = (targets.advantage < 0) & (log_ratio < math.log1p(-config.clip_low))
    return (~(too_high | too_low)).float()


def path_mean(difference: Tensor, sampled: Tensor, path: Tensor, paths: int) -> Tensor:
    """log s_j: mean of d_t over the sampled targets of each path [P]; 0 for a path without any.

    Summed in float64, so that the order of a path's targets does not move a ratio across the clip.
    """
    total = torch.zeros(paths, dtype=torch.float64, device=path.device)
    count = torch.zeros_like(total)
    total.index_add_(0, path, torch.where(sampled, difference, 0.0).double())
    count.index_add_(0, path, sampled.double())
    return total / count.clamp(min=1.0)


def _sums(
    logprob: Tensor, difference: Tensor, keep: Tensor, ratio: Tensor, sampled: Tensor, targets: Targets
) -> dict[str, float]:
    count = int(sampled.sum())
    sums = _supervised_sums(logprob, ~sampled, count)
    if not count:
        return sums
    weight = ratio[sampled].double()
    sums |= {
        "targets": float(count),
        "clipped": float((1.0 - keep[sampled]).sum()),
        "ratio": float(weight.sum()),
        "ratio_square": float(weight.square().sum()),
        "mismatch": -float(difference.sum()),
        "surprise": -float(logprob[sampled].sum()),
    }
    host_sampled, mismatch = sampled.cpu().numpy(), -difference.cpu().numpy()
    for version in np.unique(targets.version[host_sampled]).tolist():
        chosen = host_sampled & (targets.version == version)
        sums[f"targets/v{version}"] = float(chosen.sum())
        sums[f"mismatch/v{version}"] = float(mismatch[chosen].sum())
    return sums


def _supervised_sums(logprob: Tensor, supervised: Tensor, sampled: int) -> dict[str, float]:
    count = len(logprob) - sampled
    return {"supervised": float(count), "supervised_loss": -float(logprob[supervised].sum())} if count else {}
