"""The gateway bench: its histories have the lengths it names, and the machine is measured beside the gateway."""

from __future__ import annotations

from pathlib import Path

import pytest
import uvloop

from gyre_hpc.bench import gateway
from gyre_hpc.gateway.rendering import Rendering


def measured(folder: Path, history: gateway.History) -> gateway.Measured:
    words = gateway.word_tokenizer(folder)
    rendering = Rendering(folder, "qwen3", thinking=False)
    return uvloop.run(gateway._measure(rendering, words, folder, history))


def test_the_small_history_is_of_two_thousand_tokens(tmp_path: Path) -> None:
    found = measured(tmp_path, gateway.SMALL)
    assert abs(found.tokens - 2_000) < 20
    assert 0 < found.empty_ms < found.gateway_ms and found.render_ms > 0
    assert f"median of {found.tokens} tokens" in gateway._figure(found, 1.0).against
    assert gateway._ratio(found).value == found.gateway_ms / found.empty_ms


@pytest.mark.full
def test_the_large_history_is_of_a_hundred_thousand_tokens(tmp_path: Path) -> None:
    found = measured(tmp_path, gateway.LARGE)
    assert abs(found.tokens - 100_000) < 1_000
    assert found.empty_ms < found.gateway_ms < found.render_ms


@pytest.mark.full
def test_the_huge_history_is_of_a_million_tokens_and_only_its_new_turn_is_rendered(tmp_path: Path) -> None:
    found = measured(tmp_path, gateway.HUGE)
    assert abs(found.tokens - 1_000_000) < 10_000
    assert found.empty_ms < found.gateway_ms < found.render_ms / 20


def test_each_batch_is_held_against_the_empty_handler_of_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Growing the request grows both: the yardstick reads the very body that the gateway reads."""
    monkeypatch.setattr(gateway, "BATCHES", 3)
    small = measured(tmp_path, gateway.History(1, 1, 10))
    large = measured(tmp_path, gateway.History(1, 2, 100_000))
    assert 100 * small.tokens < large.tokens
    assert large.empty_ms > small.empty_ms
