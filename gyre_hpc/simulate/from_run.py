"""`gyre simulate --from RUN [key=value ...] [--json]`: a recorded run simulated, as it was or with other settings.

Overrides are keys of the run's own configuration, as far as the schedule or the machine depends on them. Without any, the
simulated wall time should be the recorded one. JSON: `{"from": {"recorded": {...}, "simulated": {...}}}` with wall_s,
seconds_per_step (from the first cell that serves to the last publication), staleness, steps and, simulated, gap_wc (that time
over work conservation - 1), idle shares and the reason of an early stop.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import msgspec
from msgspec.structs import replace
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.table import Table

from gyre_hpc.config import RunConfig, to_run_config
from gyre_hpc.config_keys import omegaconf_error
from gyre_hpc.errors import ConfigError, MissingInput
from gyre_hpc.schedule.settings import PolicyName, Settings
from gyre_hpc.simulate.bounds import work_conservation_s
from gyre_hpc.simulate.outcome import Outcome
from gyre_hpc.simulate.recorded import Recording, read_recording
from gyre_hpc.simulate.simulator import simulate
from gyre_hpc.simulate.world import Place, World

FREE = (
    "schedule",
    "cluster.cells",
    "cluster.standalone",
    "engine.capacity",
    "tasks.heldout",
    "tasks.evaluation_repeats",
    "tasks.evaluate_every",
    "trainer.checkpoint_every",
)
"""Keys, or sections of keys, that a simulation of a recording depends on."""


def overridden(config: RunConfig, words: Sequence[str]) -> RunConfig:
    """The run's configuration with these overrides. Raises ConfigError naming the key."""
    for word in words:
        key = word.partition("=")[0]
        if "=" not in word or not any(key == free or key.startswith(f"{free}.") for free in FREE):
            raise ConfigError(
                f"{word}: a simulation of a recording does not depend on it",
                fix=f"override with KEY=VALUE where KEY is one of {', '.join(FREE)} (schedule: any key of it)",
            )
    try:
        given = OmegaConf.merge(OmegaConf.structured(config), OmegaConf.from_dotlist(list(words)))
    except OmegaConfBaseException as error:
        raise omegaconf_error(RunConfig, error) from error
    assert isinstance(given, DictConfig)
    return to_run_config(given)


def settings_of(config: RunConfig) -> Settings:
    """The schedule's settings of this configuration."""
    from gyre_hpc.controller.train import schedule_settings

    return schedule_settings(config)


def machine(recording: Recording, config: RunConfig) -> World:
    """The recorded machine with the cells of this configuration. Raises MissingInput for a cost that was never met."""
    world = recording.world
    lacking = [
        role
        for role, phases in (("training", world.switch.to_training), ("rollout", world.switch.to_rollout))
        if not phases
    ]
    if lacking and config.schedule.policy != PolicyName.ASYNC:
        raise MissingInput(
            f"{recording.run}/metrics.jsonl: no switch to {lacking[0]}, so that its cost is not known",
            fix="use a run of at least two bursts of gyre or colocate",
        )
    late = max(place.start_s for place in world.cells)
    starts = [place.start_s for place in world.cells] + [late] * config.cluster.cells
    nodes, capacity = world.cells[0].nodes, config.engine.capacity
    return replace(
        world,
        cells=tuple(Place(nodes, capacity, start_s) for start_s in starts[: config.cluster.cells]),
        checkpoint_every=config.trainer.checkpoint_every,
        heldout=config.tasks.heldout * config.tasks.evaluation_repeats,
        evaluate_every=config.tasks.evaluate_every if config.tasks.heldout else 0,
    )


def simulated(recording: Recording, config: RunConfig) -> Outcome:
    """The recorded groups in their order, with this configuration."""
    return simulate(settings_of(config), machine(recording, config), recording.workload)


def main(arguments: list[str], console: Console) -> None:
    """The verb with --from. Raises ConfigError and MissingInput."""
    parser = argparse.ArgumentParser(
        prog="gyre simulate",
        description="simulate a recorded run, as it was or with other settings",
        epilog="example: gyre simulate --from runs/quickstart-1 schedule.policy=colocate",
    )
    parser.add_argument("--from", dest="run", type=Path, required=True, metavar="RUN", help="run folder")
    parser.add_argument("--json", action="store_true", help="one JSON line")
    parser.add_argument("overrides", nargs="*", help="for example schedule.policy=colocate")
    given = parser.parse_intermixed_args(arguments)
    recording = read_recording(given.run)
    config = overridden(recording.config, given.overrides)
    outcome = simulated(recording, config)
    if given.json:
        found = {"recorded": _recorded(recording), "simulated": _simulated(recording, config, outcome)}
        sys.stdout.write(msgspec.json.encode({"from": found}).decode() + "\n")
    else:
        _show(recording, config, outcome, console)


def _recorded(recording: Recording) -> dict[str, object]:
    return {
        "wall_s": recording.wall_s,
        "seconds_per_step": (recording.publications[-1] - _serves_s(recording.world)) / recording.steps,
        "staleness": recording.staleness,
        "steps": recording.steps,
    }


def _simulated(recording: Recording, config: RunConfig, outcome: Outcome) -> dict[str, object]:
    count = len(outcome.steps)
    found: dict[str, object] = {"wall_s": outcome.seconds, "steps": count, "staleness": outcome.staleness}
    if count:
        source = recording.workload.groups(0, settings_of(config).executions_dispatched)
        groups = islice(source, count * config.schedule.batch_groups)
        world = machine(recording, config)
        seconds = max(outcome.published.values()) - _serves_s(world)
        found["seconds_per_step"] = seconds / count
        found["gap_wc"] = seconds / work_conservation_s(groups, world) - 1
    return found | {"idle": outcome.idle_shares(), "reason": outcome.reason}


def _serves_s(world: World) -> float:
    """When the first cell serves."""
    return min(place.start_s for place in world.cells)


def _show(recording: Recording, config: RunConfig, outcome: Outcome, console: Console) -> None:
    table = Table("", "policy", "mu, phi", "cells", "wall time", "s/step", "steps", r"E\[d]")
    rows = {"recorded": (recording.config, _recorded(recording))}
    rows["simulated"] = (config, _simulated(recording, config, outcome))
    for name, (own, values) in rows.items():
        schedule = own.schedule
        table.add_row(
            name,
            schedule.policy,
            f"{schedule.steps_per_burst}, {schedule.extra_dispatch:g}",
            str(own.cluster.cells),
            *(f"{values[key]:.1f} s" if key in values else "-" for key in ("wall_s", "seconds_per_step")),
            str(values["steps"]),
            f"{values['staleness']:.2f}",
        )
    console.print(table)
    if outcome.reason:
        console.print(f"the simulated run stopped: {outcome.reason}")
    if recording.losses:
        console.print(f"{recording.losses} losses of cells in the recorded run are not simulated")
