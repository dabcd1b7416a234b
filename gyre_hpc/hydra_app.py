"""`gyre train` as a Hydra application: `conf/` composed against the typed schema, checked before anything starts."""

from __future__ import annotations

import ast
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gyre_hpc.config import RunConfig, nearest_key, section_type, to_run_config
from gyre_hpc.errors import ConfigError, MissingInput

GROUPS = (
    "model",
    "engine",
    "trainer",
    "objective",
    "schedule",
    "cluster",
    "transport",
    "gateway",
    "harness",
    "tasks",
    "experiment",
)


def conf_dir() -> Path:
    """The folder of configuration groups: $GYRE_CONF, else `conf/` beside the package."""
    given = os.environ.get("GYRE_CONF", "")
    folder = Path(given) if given else Path(__file__).resolve().parent.parent / "conf"
    if not (folder / "config.yaml").is_file():
        raise MissingInput(f"{folder}: no config.yaml", fix="set GYRE_CONF to the conf/ folder of a clone")
    return folder.absolute()


def register() -> None:
    """Make the typed schema known to Hydra."""
    ConfigStore.instance().store(name="schema", node=RunConfig)


def compose(overrides: list[str]) -> RunConfig:
    """The typed configuration of these overrides. Raises ConfigError naming the key and the nearest valid one."""
    register()
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3"):
            composed = hydra.compose(config_name="config", overrides=overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise _named(error, overrides) from error
    return to_run_config(_own_keys(composed))


def _own_keys(composed: DictConfig) -> DictConfig:
    plain = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(plain, dict)
    return OmegaConf.create(
        {key: value for key, value in plain.items() if key not in ("hydra", "experiment")}
    )


def _named(error: Exception, overrides: list[str]) -> ConfigError:
    """The error in words that name the override at fault."""
    lines = [line.strip() for line in f"{error}\n{error.__cause__ or ''}".splitlines() if line.strip()]
    text = "; ".join(
        dict.fromkeys(line for line in lines if not line.startswith(("full_key", "object_type", "To append")))
    )
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        if key in GROUPS and "Could not find" in str(error) and f"{key}/{value}" in str(error):
            options = sorted(path.stem for path in (conf_dir() / key).glob("*.yaml"))
            return ConfigError(f"{key}={value}: no such choice", fix=f"choose one of: {', '.join(options)}")
        if key in text or f"'{key.rsplit('.', 1)[-1]}'" in str(error):
            hint = nearest_key(key)
            fix = f"did you mean '{hint}'?" if hint and hint != key else "see gyre train --help"
            return ConfigError(f"config key '{key}': {text}", fix=fix)
    return ConfigError(text, fix="see gyre train --help")


def run(arguments: list[str], task: Callable[[RunConfig], None]) -> None:
    """Run `task` with the composed configuration; `--multirun` sweeps as in any Hydra application."""
    if any(argument in ("--help", "-h") for argument in arguments):
        sys.stdout.write(help_text())
        return
    overrides = [argument for argument in arguments if not argument.startswith("-")]
    if not any(argument in ("--multirun", "-m") for argument in arguments):
        compose(overrides)
    register()

    def main(composed: DictConfig) -> None:
        task(to_run_config(_own_keys(composed)))

    GlobalHydra.instance().clear()
    sys.argv = ["gyre train", *arguments]
    hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(main)()


def field_docs(section: type[Any]) -> dict[str, str]:
    """The string under each field of a configuration dataclass."""
    body = ast.parse(inspect.getsource(section)).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for item, following in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(item, ast.AnnAssign)
            and isinstance(item.target, ast.Name)
            and isinstance(following, ast.Expr)
        ):
            value = following.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                docs[item.target.id] = " ".join(value.value.split())
    return docs


def reference(section: type[Any] = RunConfig, prefix: str = "") -> list[tuple[str, str, str]]:
    """(key, default, meaning) of every key, sections expanded."""
    docs, rows = field_docs(section), []
    for item in fields(section):
        inner = section_type(item)
        if inner is not None:
            rows += reference(inner, f"{prefix}{item.name}.")
            continue
        default = item.default_factory() if callable(item.default_factory) else item.default
        shown = "required" if default == MISSING else repr(default)
        rows.append((prefix + item.name, shown, docs.get(item.name, "")))
    return rows


def help_text() -> str:
    """What `gyre train --help` prints."""
    lines = [
        "gyre train: online RL with elastic cells.",
        "",
        "  gyre train experiment=quickstart                     the main job on this machine",
        "  gyre train experiment=quickstart schedule.steps=10 seed=3",
        "  gyre train resume=runs/quickstart-20260101-120000    go on after an interruption",
        "  gyre train --multirun schedule=gyre,colocate,async experiment=quickstart",
        "",
        "Choices of each group:",
    ]
    for group in GROUPS:
        options = sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))
        lines.append(f"  {group}: {', '.join(options)}")
    lines += ["", "Keys (default; an experiment may set another):"]
    lines += [f"  {key} = {default}\n      {meaning}" for key, default, meaning in reference()]
    return "\n".join(lines) + "\n"
