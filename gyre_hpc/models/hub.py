"""`gyre stage` fetches `model.path=hf:ORG/NAME[@REVISION]` from the Hugging Face hub: the only place that asks a hub.

A revision is resolved to its commit first; what is fetched is that commit, and only what a model folder needs. Files go to
COMMIT.partial, whose whole files a later call keeps, and the folder gets its name when every file has its size. The library's own
variables hold: HF_TOKEN, HF_ENDPOINT (a private hub or mirror), HF_HUB_OFFLINE, HTTPS_PROXY.
"""

from __future__ import annotations

import errno
import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from huggingface_hub import HfApi, errors, snapshot_download

from gyre_hpc.errors import GyreError, MissingInput, StorageFull
from gyre_hpc.models import NEEDED, HubModel, hub_model

WANTED: Final = ("*.json", "model*.safetensors", "tokenizer*", "*.jinja", "vocab.*", "merges.txt")
"""Files at the top of a repository that a model folder may need; weights in other formats are left out."""
SOURCE: Final = "SOURCE"
"""File of a staged folder that says where it comes from: hf:ORG/NAME@COMMIT."""
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_HTTP_ERROR: Final = next(base for base in errors.HfHubHTTPError.__bases__ if issubclass(base, Exception))
_UNREACHABLE: Final[tuple[type[Exception], ...]] = (_HTTP_ERROR, OSError, RuntimeError)
"""What the library raises when a hub cannot be reached or fails: errors of its HTTP library, of files, of its Rust part."""


class HubFailed(GyreError):
    """A model could not be fetched from the hub (names the model, with the library's words)."""


def stage(path: str, staged: Path, endpoint: str | None = None) -> str:
    """Make `staged` hold the model; a line about it, "" if it was there at this commit.

    Raises MissingInput (no such repository, revision or file), StorageFull, HubFailed; a folder staged before then stays.
    """
    model = hub_model(path)
    if model.pinned and model.found(staged):
        return ""
    try:
        return _stage(model, staged, HfApi(endpoint=endpoint))
    except errors.RevisionNotFoundError as error:
        raise MissingInput(
            f"{path}: the repository has no revision {model.revision}", fix="name a branch, tag or commit"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise MissingInput(
            f"{path}: no such repository, or one that needs another token",
            fix="correct the name; for a private or gated one: export HF_TOKEN=... and accept its terms",
        ) from error
    except _UNREACHABLE as error:
        raise _failure(path, staged, error) from error


def _failure(path: str, staged: Path, error: BaseException) -> GyreError:
    if getattr(error, "errno", None) in _FULL or "No space left" in str(error):
        return StorageFull(
            f"{path}: {staged} is full: {error}",
            fix="free space there, or set model.staged to a folder that has some, then repeat gyre stage: whole files are kept",
        )
    return HubFailed(
        f"{path}: not fetched: {type(error).__name__}: {error}",
        fix="see that this machine reaches the hub (HF_ENDPOINT, HTTPS_PROXY, HF_HUB_OFFLINE unset), then repeat"
        " gyre stage: whole files are kept",
    )


def _stage(model: HubModel, staged: Path, api: HfApi) -> str:
    info = api.model_info(model.repo, revision=model.revision, files_metadata=True)
    name = f"hf:{model.repo}@{info.sha}"
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or [] if _is_wanted(file.rfilename)}
    absent = [pattern for pattern in NEEDED if not any(fnmatch(file, pattern) for file in sizes)]
    if absent:
        raise MissingInput(
            f"{name} has no {', '.join(absent)}",
            fix="name a repository in Hugging Face layout with safetensors",
        )
    folder = model.home(staged) / str(info.sha)
    model.ref(staged).parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_suffix(".lock")):
        fetched = not folder.is_dir()
        if fetched:
            _fetch(model.repo, folder, sizes, api)
    if not model.pinned:
        model.ref(staged).write_text(folder.name + "\n")
    return f"fetched {name} ({sum(sizes.values()) / 2**20:.1f} MiB) into {folder}" if fetched else ""


def _is_wanted(name: str) -> bool:
    return "/" not in name and any(fnmatch(name, pattern) for pattern in WANTED)


def _fetch(repo: str, folder: Path, sizes: dict[str, int], api: HfApi) -> None:
    """Fill `folder`. The library takes a folder that is partly there for good when the hub is gone: sizes decide here."""
    partial = folder.with_suffix(".partial")
    names = list(sizes)
    snapshot_download(
        repo, revision=folder.name, local_dir=partial, allow_patterns=names, endpoint=api.endpoint
    )
    short = [name for name, size in sizes.items() if _size(partial / name) != size]
    if short:
        raise HubFailed(
            f"hf:{repo}@{folder.name}: {partial / short[0]} is not whole",
            fix=f"repeat gyre stage; if it stays so, remove {partial}",
        )
    shutil.rmtree(partial / ".cache", ignore_errors=True)
    (partial / SOURCE).write_text(f"hf:{repo}@{folder.name}\n")
    partial.rename(folder)


def _size(file: Path) -> int:
    return file.stat().st_size if file.is_file() else -1


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
