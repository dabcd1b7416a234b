"""Metrics of training as additive sums, so that micro-steps, cells and batches can be merged in any grouping.

A micro-step reports sums under the keys below; `merge` adds them, `summarise` turns sums into the numbers people read.
Needs no torch: the controller calls this too.

Sums: loss, tokens, targets, supervised, supervised_loss, clipped (targets whose gradient the clip removed), ratio and
ratio_square (token importance weights), mismatch (recorded minus current log-probability), surprise (minus current
log-probability), and targets/vN, mismatch/vN per sampling version N.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

CLIP_SHARE_ALARM = 0.8
"""Above this share of clipped targets a step learns next to nothing."""


def merge(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Sum of the sums."""
    total: dict[str, float] = {}
    for part in parts:
        for key, value in part.items():
            total[key] = total.get(key, 0.0) + value
    return total


def summarise(sums: Mapping[str, float]) -> dict[str, float]:
    """Readable metrics; a metric without its tokens is absent, never 0.

    clip_share in [0, 1]; effective_sample_size = (sum rho)^2 / (n sum rho^2) in (0, 1]; mismatch and mismatch/vN in nats
    per token; surprise = estimate of the policy's entropy in nats; supervised_loss in nats per token.
    """
    summary = {key: sums[key] for key in ("loss", "tokens", "targets", "supervised") if key in sums}
    targets = sums.get("targets", 0.0)
    if targets:
        summary["clip_share"] = sums["clipped"] / targets
        summary["effective_sample_size"] = sums["ratio"] ** 2 / (targets * sums["ratio_square"])
        summary["mismatch"] = sums["mismatch"] / targets
        summary["surprise"] = sums["surprise"] / targets
    for key, value in sums.items():
        if key.startswith("mismatch/"):
            summary[key] = value / sums["targets/" + key.removeprefix("mismatch/")]
    if sums.get("supervised"):
        summary["supervised_loss"] = sums["supervised_loss"] / sums["supervised"]
    return summary


def alarms(metrics: Mapping[str, float]) -> list[str]:
    """What in a step's summarised metrics a person should look at, in words."""
    clipped = metrics.get("clip_share", 0.0)
    if clipped <= CLIP_SHARE_ALARM:
        return []
    return [
        f"the clip removed the gradient of {clipped:.0%} of the targets: the step learned next to nothing; look at the "
        "mismatch between engine and trainer, the staleness, and the objective's bounds"
    ]
