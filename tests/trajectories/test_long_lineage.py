"""A lineage of a million tokens: memory in proportion to its tokens, in processor and gateway, at the tree's usual speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gyre_hpc.bench import tree

ROOT = Path(__file__).parents[2]
PROGRAMS = ["tests/trajectories/long_lineage.py", "tests/gateway/long_lineage.py"]
MB_PER_MILLION = 200.0


def grown_mb(program: str, calls: int, tokens: int) -> float:
    """By how much the process that takes the calls grows at most."""
    done = subprocess.run(
        [sys.executable, str(ROOT / program), str(calls), str(tokens)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["calls"] == calls and 0.9 * tokens < found["tokens"] < 1.15 * tokens
    return float(found["grown_mb"])


@pytest.mark.parametrize("program", PROGRAMS)
def test_memory_follows_unique_tokens_not_prompts(program: str) -> None:
    """The prompts of these calls are 15 million tokens, 60 MB as ids."""
    assert grown_mb(program, calls=150, tokens=100_000) < MB_PER_MILLION / 10


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("program", PROGRAMS)
def test_1500_calls_on_a_million_tokens(program: str) -> None:
    assert grown_mb(program, calls=1500, tokens=1_000_000) < MB_PER_MILLION


@pytest.mark.full
def test_a_long_lineage_is_laid_down_as_fast_as_a_short_one() -> None:
    """As a share of comparing the same bytes once."""
    figures = tree.run()
    short, long = figures["call_tokens_per_cpu_second"], figures["call_tokens_per_cpu_second_1m"]
    assert short.bound and long.bound
    assert long.value / long.bound > 0.8 * short.value / short.bound
