"""`gyre train` as a Hydra application: `conf/` composed against the typed schema, checked before anything starts."""

from __future__ import annotations

import ast
import contextlib
import difflib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import hydra
import yaml  # type: ignore[import-untyped,unused-ignore]
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gyre_hpc.config import RunConfig, to_run_config
from gyre_hpc.config_keys import key_error, section_type
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

BESIDE_RESUME = ("resume", "resume_force", "cluster.kind")
"""What may be given with `resume`; `cluster.kind` only because slurm/train.sbatch always gives it."""


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
    with composed(RunConfig, conf_dir(), overrides, "gyre train") as plain:
        return to_run_config(_own_keys(plain))


@contextlib.contextmanager
def composed(schema: type[Any], folder: Path, overrides: list[str], verb: str) -> Iterator[DictConfig]:
    """`folder`/config.yaml with these overrides; errors, also those of the body, name the key of `schema` at fault."""
    GlobalHydra.instance().clear()
    with (
        _named_errors(overrides, schema, verb),
        hydra.initialize_config_dir(config_dir=str(folder), version_base="1.3"),
    ):
        yield hydra.compose(config_name="config", overrides=overrides)


def _own_keys(config: DictConfig) -> DictConfig:
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    return OmegaConf.create(
        {key: value for key, value in plain.items() if key not in ("hydra", "experiment")}
    )


@contextlib.contextmanager
def _named_errors(
    overrides: list[str], schema: type[Any] = RunConfig, verb: str = "gyre train"
) -> Iterator[None]:
    """What Hydra, OmegaConf and the YAML parser say, in words that name the key or file at fault."""
    try:
        yield
    except MissingConfigException as error:
        raise _no_such_choice(error) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise _named(error, overrides, schema, verb) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"conf/: {error}", fix="mend that file") from error
    except ValueError as error:
        if not str(error).startswith("Config group override"):
            raise
        raise ConfigError(
            f"{' '.join(overrides)}: {error}", fix=f"{verb} --help lists the choices"
        ) from error


def _no_such_choice(error: MissingConfigException) -> ConfigError:
    group, _, choice = str(error.missing_cfg_file).rpartition("/")
    options = [str(option) for option in error.options or ()]
    near = difflib.get_close_matches(choice, options, n=1)
    meant = f"did you mean {group}={near[0]}? " if near else ""
    return ConfigError(
        f"{group}={choice}: no such choice", fix=f"{meant}choices of {group}: {', '.join(options)}"
    )


def _named(error: Exception, overrides: list[str], schema: type[Any], verb: str) -> ConfigError:
    """Our words where a key of ours is at fault, else Hydra's."""
    text = "\n".join(str(part) for part in (error, error.__cause__) if part)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    at = next((line.removeprefix("full_key: ") for line in lines if line.startswith("full_key: ")), "hydra")
    if at.partition(".")[0] != "hydra":
        given = dict(override.lstrip("+~").partition("=")[::2] for override in overrides)
        key = next((key for key in given if key == at or key.startswith(f"{at}.")), at)
        reason = lines[lines.index(f"full_key: {at}") - 1]
        found = key_error(schema, key, reason, given.get(key), verb)
        file = re.match(r"In '(.+?)'", text)
        return ConfigError(f"conf/{file[1]}.yaml: {found.message}", fix=found.fix) if file else found
    parsed = not isinstance(error, OverrideParseException)
    fix = f"{verb} --help shows keys and examples" if parsed else "write KEY=VALUE, as in schedule.steps=10"
    return ConfigError("; ".join(lines), fix=fix)


def run(arguments: list[str], task: Callable[[RunConfig], None]) -> None:
    """Run `task` with the composed configuration; Hydra's own flags (`--multirun`, `--cfg job`) work as in any app."""
    if any(argument in ("--help", "-h") for argument in arguments):
        sys.stdout.write(help_text())
        return
    _refuse_beside_resume(arguments)
    _refuse_launcher_of_one_run(arguments)
    if any(argument.startswith("-") for argument in arguments):
        _run_by_hydra(arguments, task)
    else:
        task(compose(arguments))


def _refuse_beside_resume(arguments: list[str]) -> None:
    """A run goes on with its frozen configuration: another override would count for nothing."""
    overrides = [
        word for word in arguments if not word.startswith("-") and ("=" in word or word.startswith("~"))
    ]
    given = {word: word.lstrip("+~").partition("=")[::2] for word in overrides}
    run = next((value for key, value in given.values() if key == "resume" and value), "")
    ignored = [word for word, (key, _) in given.items() if key not in BESIDE_RESUME]
    if run and ignored:
        raise ConfigError(
            f"resume={run}: {', '.join(ignored)} would count for nothing: a run goes on with its own"
            f" {run}/config.yaml",
            fix=f"gyre train resume={run}",
        )


def _refuse_launcher_of_one_run(arguments: list[str]) -> None:
    """Hydra asks a launcher for sweeps only; one run would start here, not where the launcher says."""
    given = next((word for word in arguments if word.startswith("hydra/launcher=")), None)
    if given and not {"--multirun", "-m"} & set(arguments):
        raise ConfigError(
            f"{given} would count for nothing: this is one run",
            fix="add --multirun, or submit one run with gyre submit",
        )


def _run_by_hydra(arguments: list[str], task: Callable[[RunConfig], None]) -> None:
    from gyre_hpc.sweep.plugins import with_plugins

    def main(config: DictConfig) -> None:
        task(to_run_config(_own_keys(config)))

    register()
    GlobalHydra.instance().clear()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # else Hydra prints our errors in its own words and exits
    sys.argv = ["gyre train", *with_plugins(arguments)]
    with _named_errors(arguments):
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
        "  gyre train --multirun schedule=gyre,async experiment=quickstart hydra/launcher=gyre_slurm    as Slurm jobs",
        "",
        "Choices of each group:",
    ]
    for group in GROUPS:
        options = sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))
        lines.append(f"  {group}: {', '.join(options)}")
    lines += ["", "Keys (default; an experiment may set another):"]
    lines += [f"  {key} = {default}\n      {meaning}" for key, default, meaning in reference()]
    return "\n".join(lines) + "\n"
