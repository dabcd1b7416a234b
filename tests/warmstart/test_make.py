"""`gyre warmstart` makes a folder that the engine, the trainer and transformers load; so is the shipped one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gyre_hpc.engines.weights import read_weights
from gyre_hpc.executions.patchkit import PatchkitFamily
from gyre_hpc.executions.reference_harness.agent import BASH, MAIN_SYSTEM, TASK, ChatCompletions
from gyre_hpc.gateway.rendering import Rendering
from gyre_hpc.models.shape import read_shape
from gyre_hpc.training.replay import FILE_NAME, Demonstrations
from gyre_hpc.warmstart.make import RENDERER, THINKING, make

MODEL = Path(__file__).parents[2] / "gyre_hpc" / "models" / "patchkit"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    torch.set_num_threads(1)
    folder, losses = tmp_path_factory.mktemp("warmstart"), []
    make(folder, 1, executions=40, iterations=12, progress=lambda _, __, loss: losses.append(loss))
    return folder, losses


def test_training_lowers_the_loss(made: tuple[Path, list[float]]) -> None:
    _, losses = made
    assert len(losses) == 12
    assert losses[-1] < 0.95 * losses[0]


@pytest.mark.parametrize("shipped", [False, True], ids=["made", "shipped"])
def test_the_folder_is_whole(made: tuple[Path, list[float]], shipped: bool) -> None:
    folder = MODEL if shipped else made[0]
    shape, weights = read_shape(folder), read_weights(folder)
    rendering = Rendering(folder, RENDERER, THINKING)
    assert {name: array.shape for name, array in weights.items()} == shape.tensor_shapes()
    assert shape.vocab_size == rendering.tokenizer.backend.get_vocab_size()
    assert shape.eos_token_ids == rendering.stop_ids
    demonstrations = Demonstrations.read(folder / FILE_NAME)
    assert len(demonstrations) > 100
    assert all(demonstrations.row(index).supervised for index in range(len(demonstrations)))
    assert (folder / FILE_NAME).stat().st_size < 300_000


def test_the_shipped_policy_opens_with_the_check_and_loads_in_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    rendering = Rendering(MODEL, RENDERER, THINKING)
    instruction = {"role": "user", "content": PatchkitFamily().task(700_000).instruction}
    body = ChatCompletions().body(MAIN_SYSTEM, [instruction], [BASH, TASK])
    prompt = rendering.render(body["messages"], body["tools"])
    assert tokenizer.encode(tokenizer.decode(prompt), add_special_tokens=False) == prompt
    output = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[0][len(prompt) :]
    answer = rendering.parse(output.tolist())
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [
        ("bash", '{"command": "sh check"}')
    ]
