"""Policies shipped with the package, and where a configured model lies.

`model.path` is a folder, `package:NAME` (shipped), or `hf:ORG/NAME[@REVISION]`: a repository of the Hugging Face hub, of
which nothing but the copy that `gyre stage` made (`models.hub`) is ever read. STAGED/ORG--NAME holds one folder per commit,
there only when whole, and `refs/REVISION` with the commit that a branch or tag was at when it was staged.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from gyre_hpc.errors import ConfigError, MissingInput

if TYPE_CHECKING:
    from gyre_hpc.config import RunConfig

HERE = Path(__file__).resolve().parent
NEEDED: Final = ("config.json", "model*.safetensors", "tokenizer.json")
"""What a model folder holds; large models have several weight files."""
HUB: Final = "hf:"
_HUB_NAME: Final = re.compile(r"hf:(\w[\w.-]*/\w[\w.-]*)(?:@(\w[\w./-]*))?")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubModel:
    """A repository of the hub at a branch, tag or commit."""

    repo: str
    revision: str

    @property
    def pinned(self) -> bool:
        """Whether the revision is a commit, which never moves."""
        return bool(_COMMIT.fullmatch(self.revision))

    def home(self, staged: Path) -> Path:
        """Folder of everything staged of this repository."""
        return staged / self.repo.replace("/", "--")

    def ref(self, staged: Path) -> Path:
        """File that holds the commit of this revision."""
        return self.home(staged) / "refs" / quote(self.revision, safe="")

    def found(self, staged: Path) -> Path | None:
        """The staged folder, None if it is not there."""
        ref = self.ref(staged)
        commit = self.revision if self.pinned else ref.read_text().strip() if ref.is_file() else ""
        folder = self.home(staged) / commit
        return folder if commit and folder.is_dir() else None


def hub_model(path: str) -> HubModel:
    """What `hf:ORG/NAME[@REVISION]` names; without a revision the branch main. Raises ConfigError."""
    match = _HUB_NAME.fullmatch(path)
    if match is None:
        raise ConfigError(
            f"model.path={path} names no model of the hub", fix="write hf:ORG/NAME or hf:ORG/NAME@REVISION"
        )
    return HubModel(match[1], match[2] or "main")


def staged_folder(config: RunConfig) -> Path:
    """`model.staged`, or ROOT/.staged."""
    given = config.model.staged
    return (Path(given).expanduser() if given else Path(config.root) / ".staged").absolute()


def configured(config: RunConfig) -> Path:
    """Folder of the configured model. Raises MissingInput naming what is absent."""
    return resolve(config.model.path, staged_folder(config))


def resolve(path: str, staged: Path = Path()) -> Path:
    """Folder of a `model.path`; `staged` holds models of the hub. Raises MissingInput, ConfigError."""
    folder = _folder(path, staged)
    missing = [name for name in NEEDED if not any(folder.glob(name))]
    if not missing:
        return folder.absolute()
    wrong = f"{folder} lacks {', '.join(missing)}" if folder.is_dir() else f"{folder}: no such folder"
    shipped = ", ".join(sorted(f"package:{item.parent.name}" for item in HERE.glob("*/config.json")))
    raise MissingInput(
        f"model.path={path}: {wrong}",
        fix=f"name a folder in Hugging Face layout, hf:ORG/NAME, or {shipped}; gyre warmstart OUT makes one",
    )


def _folder(path: str, staged: Path) -> Path:
    if path.startswith("package:"):
        return HERE / path.removeprefix("package:")
    if not path.startswith(HUB):
        return Path(path).expanduser()
    folder = hub_model(path).found(staged)
    if folder is None:
        raise MissingInput(
            f"model.path={path} is not staged in {staged}",
            fix=f"where there is a network: gyre stage model.path={path} and the other keys of this run",
        )
    return folder
