"""The configuration of a run as it is submitted: a site profile, then the caller's overrides; and that of a run that goes on.

A site profile is a YAML file with keys of the section `cluster` that hold for every run at one site. A run that goes on keeps
its own configuration; only what says how its next job is asked for (`cluster.job.*`) may change.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from gyre_hpc import composition
from gyre_hpc.config import RunConfig, to_run_config
from gyre_hpc.errors import ConfigError, MissingInput
from gyre_hpc.layout import RunLayout

OF_THE_JOB = "cluster.job."
"""Keys that may change from one submission of a run to the next: they say nothing about the run."""


def planned(config: RunConfig) -> RunLayout:
    """The folder a run that starts now would get."""
    return RunLayout(Path(config.root).absolute() / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}")


def composed(overrides: list[str], site: Path | None) -> RunConfig:
    """The configuration of these overrides. Raises ConfigError naming the key, and the site profile at fault."""
    of_site = site_overrides(site)
    try:
        return composition.compose([*of_site, *overrides])
    except ConfigError:
        try:
            composition.compose(of_site)
        except ConfigError as error:
            raise ConfigError(f"{site}: {error.message}", fix=error.fix) from error
        raise


def resubmitted(config: RunConfig, overrides: list[str]) -> RunConfig:
    """A frozen configuration with another job request. Raises ConfigError for keys that would change the run."""
    frozen = [word for word in overrides if not word.lstrip("+").startswith(OF_THE_JOB)]
    if frozen:
        raise ConfigError(
            f"{', '.join(frozen)} would count for nothing: a run goes on with its own config.yaml",
            fix=f"beside resume=RUN only {OF_THE_JOB}KEY=VALUE",
        )
    changed = OmegaConf.structured(config)
    for override in OverridesParser.create().parse_overrides(overrides):
        OmegaConf.update(changed, override.key_or_group, override.value(), force_add=True)
    return to_run_config(changed)


def site_overrides(site: Path | None) -> list[str]:
    """A site profile as overrides of `cluster`, to stand before the caller's own."""
    if site is None:
        return []
    if not site.is_file():
        raise MissingInput(f"--site {site}: no such file", fix="copy slurm/sites/example.yaml and edit it")
    try:
        content = yaml.safe_load(site.read_text())
    except yaml.YAMLError as error:
        raise ConfigError(f"{site}: {error}", fix="mend that file") from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{site}: not a mapping", fix="write keys of the section cluster, as in slurm/sites/"
        )
    return [f"{key}={_literal(value)}" for key, value in _leaves("cluster", content)]


def _leaves(prefix: str, content: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Dotted keys with their values; an environment variable is no key of the schema and is added (++)."""
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _leaves(f"{prefix}.{key}", value)
        else:
            yield ("++" if prefix == f"{OF_THE_JOB}env" else "") + f"{prefix}.{key}", value


def _literal(value: object) -> str:
    """A value in Hydra's override grammar, where a backslash is special only before a quote."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ",".join(map(_literal, value)) + "]"
    if isinstance(value, str):
        return "'" + re.sub(r"(\\*)('|$)", lambda met: met[1] * 2 + ("\\'" if met[2] else ""), value) + "'"
    return "null" if value is None else str(value)
