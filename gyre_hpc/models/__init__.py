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
    if not missing:
        return folder.absolute()
    wrong = f"{folder} lacks {', '.join(missing)}" if folder.is_dir() else f"{folder}: no such folder"
    shipped = ", ".join(sorted(f"package:{item.parent.name}" for item in HERE.glob("*/config.json")))
    raise MissingInput(
        f"model.path={path}: {wrong}",
        fix=f"name a folder in Hugging Face layout, or {shipped}; gyre warmstart OUT makes one",
    )
