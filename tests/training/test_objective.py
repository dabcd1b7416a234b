"""The objective equals a slow float64 reading of its definition, also exactly at the edges of the clip."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_hpc.config import ObjectiveConfig
from gyre_hpc.training import metrics, objective
from gyre_hpc.training.objective import Targets

CONFIGS = [
    ObjectiveConfig(),
    ObjectiveConfig(clip_low=0.3, clip_high=0.4, ratio_cap=1.5),
    ObjectiveConfig(kind="grpo", clip_low=0.2, clip_high=0.28),
]


def make(path: list[int], advantage: list[float], difference: list[float], weight: list[float]) -> Targets:
    """Targets whose recorded log-probability is `difference` below a current one of -2 (NaN = supervised)."""
    return Targets(
        token=torch.zeros(len(path), dtype=torch.long),
        path=torch.tensor(path),
        weight=torch.tensor(weight),
        advantage=torch.tensor(advantage)[torch.tensor(path)],
        behaviour=-2.0 - torch.tensor(difference),
        version=np.array([index % 2 for index in range(len(path))], np.int32),
        paths=len(advantage),
    )


def oracle(logprob: torch.Tensor, targets: Targets, config: ObjectiveConfig) -> tuple[float, list[float]]:
    """(loss, d loss / d logprob), one target at a time in float64."""
    behaviour, current = targets.behaviour.double().tolist(), logprob.double().tolist()
    difference = [now - then for now, then in zip(current, behaviour, strict=True)]
    total, slopes = 0.0, []
    for index, own in enumerate(difference):
        weight, advantage = float(targets.weight[index]), float(targets.advantage[index])
        if math.isnan(own):
            slope = -1.0
        else:
            mates = [
                other
                for place, other in enumerate(difference)
                if targets.path[place] == targets.path[index] and not math.isnan(other)
            ]
            ratio = math.exp(own if config.kind == "grpo" else sum(mates) / len(mates))
            clipped = (advantage > 0 and ratio > 1 + config.clip_high) or (
                advantage < 0 and ratio < 1 - config.clip_low
            )
            slope = 0.0 if clipped else -min(math.exp(own), config.ratio_cap) * advantage
        slopes.append(weight * slope)
        total += weight * slope * current[index]
    return total, slopes


def check(targets: Targets, config: ObjectiveConfig) -> None:
    logprob = torch.full((len(targets.path),), -2.0, requires_grad=True)
    total, sums = objective.loss(logprob, targets, config)
    total.backward()  # type: ignore[no-untyped-call]
    expected, slopes = oracle(logprob.detach(), targets, config)
    assert logprob.grad is not None
    assert logprob.grad.tolist() == pytest.approx(slopes, rel=1e-5, abs=1e-9)
    assert total.item() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert sums["loss"] == total.item()


@pytest.mark.parametrize("config", CONFIGS, ids=["paper", "wide", "grpo"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_loss_and_gradient_equal_the_oracle(config: ObjectiveConfig, data: st.DataObject) -> None:
    paths = data.draw(st.integers(1, 4))
    path = list(range(paths)) + data.draw(st.lists(st.integers(0, paths - 1), max_size=12))
    sizes = st.sampled_from([-3.0, -0.25, -0.004, 0.0, 0.004, 0.25, 1.7, math.nan])
    difference = [data.draw(sizes) for _ in path]
    advantage = [data.draw(st.sampled_from([-1.5, 0.0, 0.8])) for _ in range(paths)]
    check(make(path, advantage, difference, [0.125] * len(path)), config)


@pytest.mark.parametrize(
    ("advantage", "ratio", "kept"),
    [(1, 1.004, 1), (1, 1.006, 0), (1, 0.5, 1), (-1, 0.996, 1), (-1, 0.994, 0), (-1, 2.0, 1), (0, 9.0, 1)],
)
def test_the_sequence_clip_removes_only_what_the_advantage_already_got(
    advantage: float, ratio: float, kept: int
) -> None:
    shift = math.log(ratio)
    targets = make([0, 0], [float(advantage)], [shift + 0.3, shift - 0.3], [1.0, 1.0])
    _, sums = objective.loss(torch.full((2,), -2.0), targets, ObjectiveConfig())
    assert sums["clipped"] == 2 * (1 - kept)


def test_a_clip_by_path_spares_the_other_path() -> None:
    logprob = torch.full((4,), -2.0, requires_grad=True)
    targets = make([0, 0, 1, 1], [1.0, 1.0], [0.1, 0.1, 0.1, -0.1], [1.0] * 4)
    objective.loss(logprob, targets, ObjectiveConfig())[0].backward()  # type: ignore[no-untyped-call]
    assert logprob.grad is not None
    assert logprob.grad[:2].tolist() == [0.0, 0.0]
    assert (logprob.grad[2:] < 0).all()


def test_the_importance_weight_is_capped_and_a_huge_ratio_stays_finite() -> None:
    logprob = torch.full((2,), -2.0, requires_grad=True)
    total, sums = objective.loss(logprob, make([0, 0], [-1.0], [200.0, 200.0], [1.0, 1.0]), ObjectiveConfig())
    total.backward()  # type: ignore[no-untyped-call]
    assert logprob.grad is not None and logprob.grad.tolist() == pytest.approx([5.0, 5.0])
    assert sums["ratio"] == pytest.approx(10.0)


def test_supervised_targets_do_not_move_the_ratio_of_their_path() -> None:
    alone = objective.loss(torch.full((1,), -2.0), make([0], [1.0], [0.004], [1.0]), ObjectiveConfig())[1]
    mixed = make([0, 0], [1.0], [0.004, math.nan], [1.0, 1.0])
    beside = objective.loss(torch.full((2,), -2.0), mixed, ObjectiveConfig())[1]
    assert alone["clipped"] == beside["clipped"] == 0.0
    assert (beside["targets"], beside["supervised"], beside["supervised_loss"]) == (1.0, 1.0, 2.0)


def test_token_logprobs_are_normalised() -> None:
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    token = torch.tensor([0, 6, 3, 3, 1])
    expected = torch.log_softmax(logits.double(), -1)[torch.arange(5), token]
    assert (objective.token_logprobs(logits, token) - expected).abs().max() < 1e-6


def test_metric_sums_add_up_over_micro_steps_and_versions() -> None:
    difference = [0.0, 0.5, -0.25, 0.1, 0.0]
    whole = make([0, 0, 0, 1, 1], [1.0, -1.0], difference, [1.0] * 5)
    first, second = (
        make([0, 0, 0], [1.0], difference[:3], [1.0] * 3),
        make([0, 0], [-1.0], difference[3:], [1.0] * 2),
    )
    second.version[:] = [1, 0]
    config = CONFIGS[1]
    parts = [objective.loss(torch.full((len(t.path),), -2.0), t, config)[1] for t in (first, second)]
    together = objective.loss(torch.full((5,), -2.0), whole, config)[1]
    assert metrics.merge(parts) == pytest.approx(together)
    summary = metrics.summarise(together)
    ratios = np.exp(np.minimum(difference, math.log(1.5)))
    assert summary["effective_sample_size"] == pytest.approx(ratios.sum() ** 2 / (5 * (ratios**2).sum()))
    assert summary["mismatch"] == pytest.approx(-np.mean(difference))
    assert summary["mismatch/v1"] == pytest.approx(-np.mean([0.5, 0.1]))
    assert summary["surprise"] == pytest.approx(2.0)
    assert summary["clip_share"] == pytest.approx(together["clipped"] / 5)


def test_a_metric_without_tokens_is_absent() -> None:
    assert "clip_share" not in metrics.summarise({"loss": 0.0, "supervised": 2.0, "supervised_loss": 1.0})
