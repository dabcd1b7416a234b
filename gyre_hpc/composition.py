"""A configuration from `conf/` and overrides, against a typed schema; what is wrong is said by key or file.

Hydra composes; `hydra_app` is the application around it.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
import yaml  # type: ignore[import-untyped,unused-ignore]
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gyre_hpc.config import RunConfig, to_run_config
from gyre_hpc.config_keys import key_error
from gyre_hpc.errors import ConfigError, MissingInput


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
        return to_run_config(own_keys(plain))


@contextlib.contextmanager
def composed(schema: type[Any], folder: Path, overrides: list[str], verb: str) -> Iterator[DictConfig]:
    """`folder`/config.yaml with these overrides; errors, also those of the body, name the key of `schema` at fault."""
    GlobalHydra.instance().clear()
    with (
        named_errors(overrides, schema, verb),
        hydra.initialize_config_dir(config_dir=str(folder), version_base="1.3"),
    ):
        yield hydra.compose(config_name="config", overrides=overrides)


def own_keys(config: DictConfig) -> DictConfig:
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    return OmegaConf.create(
        {key: value for key, value in plain.items() if key not in ("hydra", "experiment")}
    )


@contextlib.contextmanager
def named_errors(
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
