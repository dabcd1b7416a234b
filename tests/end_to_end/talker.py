"""A policy that never ends its turn: the shipped one, which cannot sample a special token. A call has as many tokens as it asks for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

from gyre_hpc import models
from gyre_hpc.engines.weights import read_weights, write_weights

AXIS = 0
"""The hidden unit that no layer writes: it holds what the embedding says of the token."""
AVERSION = -1000.0


def write_talker(folder: Path) -> Path:
    """Its folder. Text tokens carry 1 on the axis, special ones AVERSION, which is also their share of a (tied) logit."""
    shutil.copytree(models.HERE / "patchkit", folder)
    special = [token["id"] for token in json.loads((folder / "tokenizer.json").read_text())["added_tokens"]]
    weights = {name: np.array(array) for name, array in read_weights(folder).items()}
    for name, array in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            array[AXIS] = 0.0
    embedding = weights["model.embed_tokens.weight"]
    embedding[:, AXIS] = 1.0
    embedding[special, AXIS] = AVERSION
    weights["model.norm.weight"][AXIS] = 1.0
    write_weights(weights, folder)
    return folder
