from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from gyre_hpc.engines.torch.calls import Call
from gyre_hpc.engines.torch.forward import forward_logits
from gyre_hpc.engines.torch.model import Qwen3
from gyre_hpc.engines.torch.sampling import sample
from gyre_hpc.engines.weights import read_weights, weights_digest
from gyre_hpc.errors import ConfigError, MissingInput
from gyre_hpc.models.shape import read_shape

from .models import VOCABULARY, batcher, run, transformers_logprobs, write_model


@pytest.mark.parametrize("kind", ["model", "untied_model"])
def test_sampled_logprobs_are_those_of_transformers(kind: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(kind)
    engine = batcher(folder)
    calls = [Call(f"c{i}", [(7 * i + k) % VOCABULARY for k in range(3 + 11 * i)], 20, "w0") for i in range(5)]
    run(engine, *calls)
    for call in calls:
        expected = transformers_logprobs(folder, call.ids, call.prompt_tokens)
        np.testing.assert_allclose(call.logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["model", "untied_model"])
def test_the_shape_tells_the_bytes_of_all_weights(kind: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(kind)
    assert read_shape(folder).float32_bytes == sum(4 * array.size for array in read_weights(folder).values())


@pytest.mark.parametrize("kind", ["model", "untied_model"])
def test_the_differentiable_forward_agrees_with_transformers(
    kind: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(kind)
    weights = {name: torch.from_numpy(array.copy()) for name, array in read_weights(folder).items()}
    weights["model.norm.weight"].requires_grad_()
    ids = [(5 * k) % VOCABULARY for k in range(40)]
    padded = torch.tensor([ids + [0] * 9, ids[::-1] + [1] * 9])
    logits = forward_logits(weights, read_shape(folder), padded)
    table = logits[0, :39].log_softmax(-1)
    got = table[torch.arange(39), torch.tensor(ids[1:])]
    np.testing.assert_allclose(got.detach().numpy(), transformers_logprobs(folder, ids, 1), atol=1e-5)
    got.sum().backward()
    gradient = weights["model.norm.weight"].grad
    assert gradient is not None and gradient.abs().sum() > 0


def test_the_digest_is_over_the_bytes_being_served(model: Path, next_model: Path) -> None:
    served = Qwen3(read_shape(model), 64)
    served.load(read_weights(model), "first")
    assert weights_digest(served.arrays()) == weights_digest(read_weights(model))
    served.load(read_weights(next_model), "second")
    assert weights_digest(served.arrays()) == weights_digest(read_weights(next_model))


def test_weights_that_do_not_fit_are_refused_whole(model: Path, next_model: Path) -> None:
    served = Qwen3(read_shape(model), 64)
    served.load(read_weights(model), "first")
    arrays = read_weights(next_model)
    arrays["model.norm.weight"] = arrays["model.norm.weight"][:-1]
    with pytest.raises(ConfigError, match=r"second: tensor model\.norm\.weight has shape \(23,\)"):
        served.load(arrays, "second")
    del arrays["model.norm.weight"]
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is missing"):
        served.load(arrays, "second")
    assert weights_digest(served.arrays()) == weights_digest(read_weights(model))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "llama"),
        ("attention_bias", True),
        ("rope_parameters", {"rope_type": "yarn"}),
        ("hidden_size", None),
    ],
)
def test_an_architecture_that_is_not_served_is_refused_by_key(
    tmp_path: Path, key: str, value: object
) -> None:
    file = write_model(tmp_path, seed=0) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(ConfigError, match=str(file)) as caught:
        read_shape(tmp_path)
    assert value is None or key in str(caught.value)


def test_a_missing_model_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingInput, match="nowhere"):
        read_shape(tmp_path / "nowhere")


def test_sampling_follows_the_distribution_and_reports_its_logprob() -> None:
    logits = torch.tensor([[2.0, 0.0, -1.0, 1.0, -30.0]])
    rows = 20_000
    ids, logprobs = sample(
        logits.expand(rows, -1), np.zeros(rows, np.bool_), torch.Generator().manual_seed(4)
    )
    law = logits.softmax(-1)[0].numpy()
    share = np.bincount(ids, minlength=5) / rows
    np.testing.assert_allclose(share, law, atol=4 * np.sqrt(law.max() / rows))
    np.testing.assert_allclose(np.exp(logprobs), law[ids], rtol=1e-5)


def test_greedy_rows_take_the_mode_beside_sampled_ones() -> None:
    logits = torch.tensor([[0.0, 0.1]]).expand(400, -1)
    greedy = np.arange(400) % 2 == 0
    ids, _ = sample(logits, greedy, torch.Generator().manual_seed(4))
    assert set(np.array(ids)[greedy]) == {1}
    assert set(np.array(ids)[~greedy]) == {0, 1}
