"""Block-wise, dense and flex attention over a prefix forest all equal softmax attention path by path."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_hpc.training import tree_attention
from gyre_hpc.training.tree_attention import (
    TreeContext,
    attention_chains,
    dense_mask,
    flex,
    flex_block_mask,
    prefer_dense,
)
from gyre_hpc.trajectories.micro_steps import MicroStep
from tests.training.training_cases import random_tree

HEADS, GROUPS, WIDTH = 4, 2, 8
CPU = torch.device("cpu")


class _Attention(tree_attention.TreeAttention):
    """Without Megatron's configuration."""

    def __init__(self, context: TreeContext) -> None:
        torch.nn.Module.__init__(self)
        self.context, self.scale = context, None


def projections(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((tokens, 1, HEADS, WIDTH), (tokens, 1, GROUPS, WIDTH), (tokens, 1, GROUPS, WIDTH))
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    return query, key, value


def oracle(step: MicroStep, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Float64 softmax, one token at a time over exactly the tokens it may see."""
    out = torch.zeros(step.tokens, 1, HEADS * WIDTH, dtype=torch.float64)
    for row in range(step.tokens):
        seen = [
            other
            for other in range(step.tokens)
            if step.tin[other] <= step.tin[row] < step.tout[other] and step.pos[other] <= step.pos[row]
        ]
        for head in range(HEADS):
            keys = key[seen, 0, head * GROUPS // HEADS].double()
            values = value[seen, 0, head * GROUPS // HEADS].double()
            scores = keys @ query[row, 0, head].double() / WIDTH**0.5
            out[row, 0, head * WIDTH : (head + 1) * WIDTH] = torch.softmax(scores, 0) @ values
    return out


def context_of(step: MicroStep) -> TreeContext:
    context = TreeContext()
    context.set(step.tin, step.tout, step.pos, step.row, CPU)
    return context


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    nodes=st.integers(1, 9),
    dense=st.booleans(),
    rows=st.sampled_from([2, 3, 128]),
)
def test_every_host_kernel_equals_the_oracle(seed: int, nodes: int, dense: bool, rows: int) -> None:
    step = random_tree(seed, nodes).as_forest()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_attention, "_BLOCK_ROWS", rows)
        patch.setattr(tree_attention, "prefer_dense", lambda *_: dense)
        context = context_of(step)
    assert (context.dense_mask is not None) == dense
    parts = projections(step.tokens, seed)
    assert (_Attention(context)(*parts) - oracle(step, *parts)).abs().max() < 1e-5


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_the_flex_mask_equals_the_oracle_and_padding_stays_apart() -> None:
    step = random_tree(3).as_forest()
    parts = projections(step.tokens)
    with torch.no_grad():
        found = flex(*parts, flex_block_mask(step.tin, step.tout, step.pos, CPU), None)
    assert found.shape == (step.tokens, 1, HEADS, WIDTH)
    assert (found.reshape(step.tokens, 1, -1) - oracle(step, *parts)).abs().max() < 1e-5


@pytest.mark.gpu
def test_the_compiled_flex_kernel_has_the_gradient_of_the_dense_mask() -> None:
    device = torch.device("cuda")
    step = random_tree(5, nodes=20, longest=40).as_forest()
    mask = dense_mask(step.tin, step.tout, step.pos).to(device)
    gradients = []
    for kernel in ("flex", "dense"):
        parts = [part.to(device).requires_grad_() for part in projections(step.tokens)]
        if kernel == "flex":
            out = flex(*parts, flex_block_mask(step.tin, step.tout, step.pos, device), None)
        else:
            out = tree_attention._attend(*parts, mask, None)
        out.square().sum().backward()
        gradients.append([part.grad for part in parts])
    for found, expected in zip(*gradients, strict=True):
        assert (found - expected).abs().max() / expected.abs().max() < 1e-3


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000), nodes=st.integers(1, 12))
def test_chains_partition_the_tokens_and_see_exactly_what_the_mask_allows(seed: int, nodes: int) -> None:
    step = random_tree(seed, nodes).as_forest()
    seen = np.zeros((step.tokens, step.tokens), bool)
    position = 0
    for start, stop, spans in attention_chains(step.tin, step.tout):
        assert start == position < stop
        position = stop
        for first, last in spans:
            seen[start:stop, first:last] = True
        seen[start:stop, start:stop] = np.tri(stop - start, dtype=bool)
    assert position == step.tokens
    assert np.array_equal(seen, dense_mask(step.tin, step.tout, step.pos).numpy())


def test_a_first_child_continues_its_parents_chain() -> None:
    tin, tout = np.repeat([0, 1, 2], 4).astype(np.int32), np.repeat([3, 2, 3], 4).astype(np.int32)
    assert attention_chains(tin, tout) == [(0, 8, ()), (8, 12, ((0, 4),))]


def test_many_tiny_branches_take_the_dense_mask_and_long_ones_do_not() -> None:
    star = [(0, 20, ())] + [(20 + 2 * n, 22 + 2 * n, ((0, 20),)) for n in range(200)]
    comb = [(0, 1152, ())] + [(1152 + 128 * n, 1280 + 128 * n, ((0, 1024),)) for n in range(7)]
    assert prefer_dense(star, 420)
    assert not prefer_dense(comb, 2048)
