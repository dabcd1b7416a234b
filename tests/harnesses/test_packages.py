"""Packages are pinned, a prefix is whole or made anew, and installers see no credentials."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gyre_hpc.composition import compose
from gyre_hpc.config import HarnessConfig
from gyre_hpc.errors import ConfigError, MissingInput
from gyre_hpc.executions.harness import find_harness
from gyre_hpc.harnesses.locks import lock_of
from gyre_hpc.harnesses.packages import (
    INSTALLED,
    InstallFailed,
    install,
    installer_environment,
    is_installed,
    prefix_of,
)


@pytest.mark.parametrize(
    "package",
    [
        "npm:@qwen-code/qwen-code",
        "pypi:mini-swe-agent>=2",
        "claude",
        "npm:a@^1",
        "npm:a@1 --x",
        "pypi:a==1;x",
    ],
)
def test_a_package_without_a_pinned_version_is_refused(package: str) -> None:
    with pytest.raises(ConfigError, match="not pinned"):
        prefix_of([package], "")


def test_each_version_has_a_prefix_of_its_own(tmp_path: Path) -> None:
    one, two = (prefix_of([f"npm:@scope/name@{version}"], str(tmp_path)) for version in ("1.2.0", "1.3.0"))
    assert one.name == "scope-name-1.2.0" and one.parent == two.parent == tmp_path and one != two


def test_a_prefix_counts_only_when_it_holds_exactly_what_is_asked(tmp_path: Path) -> None:
    packages = ["npm:a@1", "npm:b@2"]
    assert not is_installed(packages, tmp_path)
    (tmp_path / INSTALLED).write_text("npm:a@1\nnpm:b@2\n")
    assert is_installed(packages, tmp_path) and not is_installed(packages[:1], tmp_path)
    assert not install(packages, tmp_path)


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An npm of ours: writes its arguments down; fails when there is a file `broken` beside it."""
    program = tmp_path / "bin" / "npm"
    program.parent.mkdir()
    program.write_text(
        '#!/bin/sh\necho "$@" >>"$0.log"\n[ ! -e "${0%npm}broken" ] || { echo no space; exit 7; }\n'
        'mkdir -p "$3/node_modules/.bin"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return program


def test_a_prefix_is_made_once_and_again_when_other_packages_are_asked(tmp_path: Path, npm: Path) -> None:
    prefix = tmp_path / "prefix"
    assert [install(["npm:a@1"], prefix), install(["npm:a@1"], prefix)] == [True, False]
    (prefix / "left").touch()
    assert install(["npm:a@1", "npm:b@2"], prefix) and not (prefix / "left").exists()
    lines = npm.with_name("npm.log").read_text().splitlines()
    assert [line.split()[-1] for line in lines] == ["a@1", "b@2"]


def test_a_failed_install_says_why_and_leaves_no_prefix_that_counts(tmp_path: Path, npm: Path) -> None:
    prefix = tmp_path / "prefix"
    npm.with_name("broken").touch()
    with pytest.raises(InstallFailed, match="ended with 7:\nno space"):
        install(["npm:a@1"], prefix)
    assert not is_installed(["npm:a@1"], prefix)
    npm.with_name("broken").unlink()
    assert install(["npm:a@1"], prefix)


def test_installers_see_proxies_and_certificates_but_no_credentials() -> None:
    kept = {
        "PATH": "/bin",
        "HOME": "/h",
        "https_proxy": "p",
        "NODE_EXTRA_CA_CERTS": "c",
        "PIP_INDEX_URL": "u",
    }
    secret = {"ANTHROPIC_API_KEY": "s", "OPENAI_API_KEY": "s", "AWS_SECRET_ACCESS_KEY": "s", "PIP_TOKEN": "s"}
    assert installer_environment({**kept, **secret, "GITHUB_TOKEN": "s", "npm_config__auth": "s"}) == kept


def test_a_harness_that_is_not_installed_is_named_with_its_cure(tmp_path: Path) -> None:
    config = HarnessConfig(command=["claude"], packages=["npm:a@1"], prefix=str(tmp_path))
    with pytest.raises(MissingInput, match="gyre stage"):
        find_harness(config)


def test_a_program_is_found_in_its_prefix_and_the_prefix_is_shown(tmp_path: Path) -> None:
    prefix = tmp_path / "a-1"
    program = prefix / "node_modules/.bin/agent"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    (prefix / INSTALLED).write_text("npm:a@1\n")
    harness = find_harness(HarnessConfig(command=["agent"], packages=["npm:a@1"], prefix=str(tmp_path)))
    assert harness.command == (str(program),) and prefix in harness.readonly
    assert harness.env["PATH"].split(":")[0] == str(program.parent)


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x"])
def test_files_stay_inside_home(name: str) -> None:
    with pytest.raises(ConfigError, match="inside HOME"):
        find_harness(HarnessConfig(command=["/bin/sh"], files={name: ""}))


def test_files_are_written_with_their_placeholders_filled(tmp_path: Path) -> None:
    config = HarnessConfig(command=["/bin/sh"], files={".agent/config.toml": 'url = "{base_url}/v1" {x}'})
    call = find_harness(config).fill(base_url="http://h/x/k", workspace=Path("/w"), instruction="", seed=0)
    call.write_files(tmp_path)
    assert (tmp_path / ".agent/config.toml").read_text() == 'url = "http://h/x/k/v1" {x}'


def test_a_lock_pins_what_every_pypi_harness_depends_on() -> None:
    for name in ("claude_code", "codex", "mini_swe_agent", "opencode", "qwen_code"):
        harness = compose([f"harness={name}"]).harness
        lock = lock_of(harness)
        assert (lock is not None) is any(package.startswith("pypi:") for package in harness.packages)
        lines = lock.read_text().splitlines() if lock else []
        assert all(re.fullmatch(r"[\w.-]+==[\w.+!]+", line) for line in lines)


def test_a_lock_that_is_not_there_is_named() -> None:
    with pytest.raises(MissingInput, match=r"harness\.lock: .*none\.txt"):
        lock_of(HarnessConfig(lock="none.txt"))
