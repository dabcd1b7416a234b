"""Policies shipped with the package, and where a configured model lies."""

from __future__ import annotations

from pathlib import Path

from gyre_hpc.errors import MissingInput

HERE = Path(__file__).resolve().parent
NEEDED = ("config.json", "model.safetensors", "tokenizer.json")


def resolve(path: str) -> Path:
    """Folder of `model.path`: `package:NAME` or a path. Raises MissingInput naming what is absent."""
    folder = HERE / path.removeprefix("package:") if path.startswith("package:") else Path(path).expanduser()
    missing = [name for name in NEEDED if not (folder / name).is_file()]
    if missing:
        raise MissingInput(
            f"model.path={path}: {folder} lacks {', '.join(missing)}",
            fix="name a folder in Hugging Face layout, or make one with: gyre warmstart OUT",
        )
    return folder.absolute()
