"""`gyre stage` with the real huggingface_hub against a fake hub on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre_hpc import models
from gyre_hpc.composition import compose
from gyre_hpc.engines.weights import read_weights
from gyre_hpc.errors import ConfigError, MissingInput
from gyre_hpc.launch.job import staging
from gyre_hpc.models import hub as model_hub
from tests.models.fake_hub import REPO, FakeHub, running

PATH = f"hf:{REPO}"
SHIPPED = models.resolve("package:patchkit")
ROOT = Path(__file__).parents[2]


def repository() -> dict[str, bytes]:
    """The shipped policy's files, and what a real repository holds beside them."""
    files = {name: (SHIPPED / name).read_bytes() for name in ("config.json", "tokenizer.json")}
    files["model.safetensors"] = (SHIPPED / "model.safetensors").read_bytes()
    others = (
        "README.md",
        "pytorch_model.bin",
        "onnx/model.onnx",
        "original/params.json",
        "tokenizer_config.json",
    )
    return files | {name: name.encode() for name in others}


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with running(repository()) as hub:
        yield hub


def test_only_what_a_model_folder_needs_is_fetched_at_the_commit_and_only_once(
    hub: FakeHub, tmp_path: Path
) -> None:
    assert "fetched" in model_hub.stage(PATH, tmp_path, hub.url)
    folder = models.resolve(PATH, tmp_path)
    assert folder.name == hub.commit
    names = {file.name for file in folder.iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "SOURCE"}
    assert (folder / "model.safetensors").read_bytes() == hub.files["model.safetensors"]
    assert (folder / "SOURCE").read_text() == f"{PATH}@{hub.commit}\n"
    sent = len(hub.served())
    assert model_hub.stage(PATH, tmp_path, hub.url) == "" and len(hub.served()) == sent


def test_a_branch_that_moved_is_staged_anew_and_a_commit_stays(hub: FakeHub, tmp_path: Path) -> None:
    first = hub.commit
    model_hub.stage(PATH, tmp_path, hub.url)
    hub.files["tokenizer_config.json"] = b"{}"
    assert hub.commit != first
    model_hub.stage(PATH, tmp_path, hub.url)
    assert models.resolve(PATH, tmp_path).name == hub.commit
    pinned = f"{PATH}@{first}"
    asked = len(hub.asked)
    assert models.resolve(pinned, tmp_path).name == first
    assert model_hub.stage(pinned, tmp_path, hub.url) == "" and len(hub.asked) == asked


def test_a_tag_and_a_token_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(repository(), token="hf_secret") as hub:
        monkeypatch.delenv("HF_TOKEN", raising=False)
        with pytest.raises(MissingInput, match=r"needs another token[\s\S]*HF_TOKEN"):
            model_hub.stage(f"{PATH}@v1", tmp_path, hub.url)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        assert "fetched" in model_hub.stage(f"{PATH}@v1", tmp_path, hub.url)
    assert models.resolve(f"{PATH}@v1", tmp_path).is_dir()


@pytest.mark.parametrize(
    ("path", "told"), [("hf:org/other", "no such repository"), (f"{PATH}@v9", "no revision v9")]
)
def test_what_the_hub_does_not_have_is_named(hub: FakeHub, tmp_path: Path, path: str, told: str) -> None:
    with pytest.raises(MissingInput, match=told):
        model_hub.stage(path, tmp_path, hub.url)


@pytest.mark.parametrize("path", ["hf:gpt2", "hf:../up/x", "hf:a/b@", "hf:a/b/c", "hf:a/b@../x"])
def test_a_name_that_is_none_is_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hf:ORG/NAME"):
        models.resolve(path, tmp_path)


def test_a_repository_without_safetensors_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    files = {name: data for name, data in repository().items() if not name.endswith(".safetensors")}
    with running(files) as hub, pytest.raises(MissingInput, match=r"has no model\*\.safetensors"):
        model_hub.stage(PATH, tmp_path, hub.url)
    assert hub.served() == []


def test_without_a_hub_a_model_staged_before_is_kept_and_any_other_is_an_error(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose(["experiment=quickstart", f"root={tmp_path}", f"model.path={PATH}"])
    staged, nowhere = models.staged_folder(config), "http://127.0.0.1:9"
    with pytest.raises(model_hub.HubFailed, match=r"not fetched: Connect[\s\S]*HF_ENDPOINT"):
        model_hub.stage(PATH, staged, nowhere)
    model_hub.stage(PATH, staged, hub.url)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", nowhere)
    (line,) = staging.fetch(config)
    assert line.startswith("kept ") and hub.commit in line


def test_a_download_that_broke_off_is_no_model_and_its_whole_files_are_kept(
    hub: FakeHub, tmp_path: Path
) -> None:
    hub.cut["model.safetensors"] = 100_000
    command = [sys.executable, "-c", STAGE, PATH, str(tmp_path), hub.url]
    broken = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL)
    partial = tmp_path / "org--tiny" / f"{hub.commit}.partial"
    record = (
        partial / ".cache/huggingface/download/tokenizer.json.metadata"
    )  # three lines: commit, etag, time
    while not (
        record.exists() and record.read_text().count("\n") == 3 and "model.safetensors" in hub.served()
    ):
        assert broken.poll() is None
    broken.kill()
    broken.wait()
    with pytest.raises(MissingInput, match="is not staged"):
        models.resolve(PATH, tmp_path)
    hub.cut.clear()
    hub.asked.clear()
    model_hub.stage(PATH, tmp_path, hub.url)
    folder = models.resolve(PATH, tmp_path)
    assert (folder / "model.safetensors").read_bytes() == hub.files["model.safetensors"]
    assert not partial.exists()
    assert "model.safetensors" in hub.served() and "tokenizer.json" not in hub.served()


def test_a_folder_that_the_library_takes_for_good_half_filled_is_no_model(
    hub: FakeHub, tmp_path: Path
) -> None:
    """It hands back a folder that is not empty when it cannot list the repository's files."""
    hub.no_tree = True
    partial = tmp_path / "org--tiny" / f"{hub.commit}.partial"
    partial.mkdir(parents=True)
    (partial / "model.safetensors").write_bytes(hub.files["model.safetensors"][:1000])
    with pytest.raises(model_hub.HubFailed, match="is not whole"):
        model_hub.stage(PATH, tmp_path, hub.url)
    hub.no_tree = False
    assert "fetched" in model_hub.stage(PATH, tmp_path, hub.url)
    assert (models.resolve(PATH, tmp_path) / "model.safetensors").read_bytes() == hub.files[
        "model.safetensors"
    ]


STAGE = "import sys, pathlib; from gyre_hpc.models import hub; hub.stage(sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3])"
FULL_DISK = """
mount -t tmpfs -o size=256k none "$1" && exec "$2" -m gyre_hpc.cli stage experiment=quickstart model.path="$3" model.staged="$1"
"""


@pytest.mark.userns
def test_a_full_disk_is_named_with_the_key_of_the_folder(hub: FakeHub, tmp_path: Path) -> None:
    """On a file system of 256 KiB of its own."""
    command = ["unshare", "-Urm", "/bin/sh", "-c", FULL_DISK, "sh", str(tmp_path), sys.executable, PATH]
    env = os.environ | {"PYTHONPATH": str(ROOT), "HF_ENDPOINT": hub.url}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 5, done.stderr
    assert "is full" in done.stderr and "model.staged" in done.stderr


def test_the_command_stages_and_a_run_takes_what_is_staged_without_a_network(
    hub: FakeHub, tmp_path: Path
) -> None:
    words = ["experiment=quickstart", "cluster=devcluster", f"root={tmp_path}", f"model.path={PATH}"]
    words.append("objective.replay_weight=0")
    config = compose(words)
    with pytest.raises(MissingInput, match=f"gyre stage model.path={PATH}"):
        staging.check_staged(config)
    command = [sys.executable, "-m", "gyre_hpc.cli", "stage", *words]
    env = os.environ | {"PYTHONPATH": str(ROOT), "HF_ENDPOINT": hub.url}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"fetched {PATH}@{hub.commit}" in done.stdout
    staging.check_staged(config)
    assert (tmp_path / ".staged" / "org--tiny" / hub.commit).is_dir()


def test_weights_in_several_files_are_read_as_one_model(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    whole = load_file(SHIPPED / "model.safetensors")
    names = sorted(whole)
    for index, part in enumerate((names[::2], names[1::2]), 1):
        save_file({name: whole[name] for name in part}, tmp_path / f"model-{index:05d}-of-00002.safetensors")
    assert sorted(read_weights(tmp_path)) == names
