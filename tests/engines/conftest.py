from __future__ import annotations

from pathlib import Path

import pytest

from .models import write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied embeddings, three query heads on one KV head."""
    return write_model(tmp_path_factory.mktemp("model"), seed=1)


@pytest.fixture(scope="session")
def next_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights."""
    return write_model(tmp_path_factory.mktemp("next"), seed=2)


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untied embeddings, four query heads on two KV heads."""
    return write_model(tmp_path_factory.mktemp("untied"), seed=3, tied=False, heads=4, kv_heads=2)
