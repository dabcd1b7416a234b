"""`gyre train` as a Hydra application: `conf/` composed against the typed schema, checked before anything starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from gyre_hpc.composition import compose, conf_dir, named_errors, own_keys, register
from gyre_hpc.config import RunConfig, to_run_config
from gyre_hpc.config_keys import reference
from gyre_hpc.errors import ConfigError

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
        task(to_run_config(own_keys(config)))

    register()
    GlobalHydra.instance().clear()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # else Hydra prints our errors in its own words and exits
    sys.argv = ["gyre train", *with_plugins(arguments)]
    with named_errors(arguments):
        hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(main)()


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
    lines += [f"  {key} = {default}\n      {meaning}" for key, default, meaning in reference(RunConfig)]
    return "\n".join(lines) + "\n"
