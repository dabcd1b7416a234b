"""Typed schema of `conf/simulate/` and its composition. Hours where a person thinks in hours; seconds from `World` on.

A world file says what the machine and its executions are; a preset chooses worlds and a study. `compose` merges both with
the command's overrides, refuses unknown keys by the nearest name, and keeps the overrides, so that a study of several
worlds composes each of them with the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from gyre_hpc import composition
from gyre_hpc.errors import ConfigError
from gyre_hpc.simulate.trace_files import trace_workload
from gyre_hpc.simulate.workload import LogNormal, Workload
from gyre_hpc.simulate.world import AnyFault, wall_time

HOUR = 3600.0
VERB = "gyre simulate"
MOST_JOBS = 200
"""Time limits that a run may meet."""


@dataclass
class WorldConfig:
    """The machine, the executions of one query set, and what training them costs."""

    nodes: float = 32.0
    """Nodes of the machine."""
    slots: float = 456.0
    """Executions that all nodes together serve at once."""
    batch_groups: int = 16
    """B: groups of one step."""
    executions_per_group: int = 8
    """N: executions of a group."""
    training_h: float = 1.168
    """Hours that the whole machine needs to train one step whose executions last `mean_h` on average."""
    training_work: float = 1.0
    """Factor on the training work: 0.75 = a quarter saved because shared prefixes are computed once."""
    mean_h: float = 1.95
    """Mean duration of an execution: before the limit cuts (log-normal), or with `trace_scaled` under the limit."""
    query_sigma: float = 0.223
    """Log-normal spread between queries."""
    execution_sigma: float = 0.367
    """Log-normal spread between executions of a query."""
    limit_h: float = 4.289
    """Harness time limit; an execution that reaches it is scored and trained."""
    trace: str = ""
    """Trace file to draw durations from instead: a path, or the name of a file in conf/traces."""
    trace_scaled: bool = False
    """Scale each run of the trace to `mean_h`; else durations count as recorded."""
    to_training_s: float = 8.52
    """Seconds of a switch from rollout to training."""
    to_rollout_s: float = 3.46
    """Seconds of a switch back."""
    publish_s: float = 0.0
    """Seconds from the last step of a burst until its version is served."""
    launch_s: float = 0.0
    """Seconds from a launch to the execution's first model call."""
    evaluate_s: float = 0.0
    """Seconds from the end of an execution to its score."""
    saturation: float = 1.0
    """Share of a cell's capacity up to which each execution samples at full speed."""
    tool_share: float = 0.0
    """Share of an undisturbed execution's time that tools take."""
    prefill_s: float = 0.0
    """Seconds of progress that an execution repeats when its cell leaves rollout without handing its KV pages on."""
    micro_step_s: float = 0.0
    """Seconds an average cell needs for a micro-step; 0 = so small that cells finish together."""
    fill_s: float = 0.0
    """Seconds of pipeline fill and drain, once per batch."""
    step_s: float = 0.0
    """Seconds of contributions and optimizer update, once per batch."""
    faults: list[Any] = field(default_factory=list)
    """What breaks, e.g. [{fault:cell_loss,at_s:7200,cell:2,back_after_s:600}]; also preemption, evaluator_outage."""
    wall_time_h: float = 0.0
    """Time limit of a job, at which the run is requeued; 0 = none."""
    requeue_h: float = 0.5
    """Hours from a time limit until the job runs again."""

    @property
    def training_per_s(self) -> float:
        """Node-seconds of training per second of an execution."""
        step_s = self.batch_groups * self.executions_per_group * self.mean_h * HOUR
        return self.training_work * self.training_h * HOUR * self.nodes / step_s

    def all_faults(self) -> tuple[AnyFault, ...]:
        """Those given and the time limits. Raises ConfigError."""
        try:
            given = msgspec.convert(self.faults, tuple[AnyFault, ...], strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"world.faults: {error}",
                fix="give each as {fault:cell_loss,at_s:SECONDS,cell:I}, {fault:preemption,at_s:SECONDS,back_after_s:SECONDS}"
                " or {fault:evaluator_outage,at_s:SECONDS,seconds:SECONDS}",
            ) from error
        if not self.wall_time_h:
            return given
        return given + wall_time(self.wall_time_h * HOUR, self.requeue_h * HOUR, MOST_JOBS)

    def workload(self) -> Workload:
        """What the executions do. Raises ConfigError or MissingInput naming the trace."""
        limit_s, mean_s = self.limit_h * HOUR, self.mean_h * HOUR
        if self.trace:
            scale_to = mean_s if self.trace_scaled else None
            return trace_workload(trace_path(self.trace), limit_s, self.training_per_s, scale_to)
        return LogNormal(mean_s, self.query_sigma, self.execution_sigma, limit_s, self.training_per_s)


@dataclass
class SimulateConfig:
    """One call of `gyre simulate`."""

    world: WorldConfig = field(default_factory=WorldConfig)
    study: str = "design"
    """`design` (one schedule of your own), `ladder`, `fixed_pools`, `beyond`, or `baselines`; presets set it."""
    worlds: list[str] = field(default_factory=list)
    """Worlds of a study that runs in several."""
    trace: str = ""
    """Trace file of your own: short for world.trace=FILE world.trace_scaled=false."""
    seeds: int = 8
    """Random worlds: each design meets the same ones, ratios are taken world by world."""
    steps: int = 60
    """Optimizer steps measured."""
    warm_up: int = 12
    """Optimizer steps before them; 0 = the start of the run counts."""
    staleness: float = 1.5
    """Target mean staleness E[d] = extra_dispatch + (steps_per_burst - 1)/2, the same for all designs."""
    schedule: str = "gyre"
    """Policy of your design: gyre, colocate or async."""
    cells: int = 8
    """Cells of your design (gyre), and of every design of the study `baselines`."""
    pool_nodes: float = 0.0
    """Nodes that serve rollout all the time, outside the cells (gyre, colocate)."""
    training_nodes: float = 0.0
    """Nodes fixed to training (async); 0 = the best split is looked for."""
    steps_per_burst: int = 0
    """mu; 0 = the best point at `staleness` is looked for, else extra_dispatch follows from `staleness`."""
    streaming: bool = True
    """Whether training starts before the whole burst is ready (colocate, async)."""
    launch_order: str = "fifo"
    """`fifo`, or `longest_first`: by the query's history."""
    overlap_joins: bool = False
    """Whether cells may switch to training at the same time."""
    pictures: str = ""
    """Folder for pictures (PNG and one HTML page): roles under the waterlevel, idle time, ladder, time against nodes."""


def trace_path(name: str) -> Path:
    """A path as given, else that file of conf/traces."""
    path = Path(name)
    shipped = composition.conf_dir() / "traces" / name
    return shipped if not path.exists() and path.name == name and shipped.is_file() else path


def compose(overrides: list[str]) -> SimulateConfig:
    """The typed configuration. Raises ConfigError naming the key and the nearest valid one."""
    ConfigStore.instance().store(name="simulate_schema", node=SimulateConfig)
    folder = composition.conf_dir() / "simulate"
    with composition.composed(SimulateConfig, folder, overrides, VERB) as plain:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(SimulateConfig), plain))
    assert isinstance(config, SimulateConfig)
    if config.trace:
        config.world.trace, config.world.trace_scaled = config.trace, False
    _check(config)
    return config


def compose_world(overrides: list[str], name: str) -> WorldConfig:
    """The same call in another world."""
    others = [word for word in overrides if not word.startswith("world=")]
    return compose([*others, f"world={name}"]).world


def world_names() -> list[str]:
    """Worlds that `world=` may name."""
    return _choices("world")


def preset_names() -> list[str]:
    """Presets that `preset=` may name."""
    return _choices("preset")


def _choices(group: str) -> list[str]:
    return sorted(path.stem for path in (composition.conf_dir() / "simulate" / group).glob("*.yaml"))


def _check(config: SimulateConfig) -> None:
    world = config.world
    positive = {
        "seeds": config.seeds - 1,
        "steps": config.steps,
        "cells": config.cells,
        "world.nodes": world.nodes,
        "world.slots": world.slots,
        "world.batch_groups": world.batch_groups,
        "world.executions_per_group": world.executions_per_group - 1,
        "world.training_h": world.training_h,
        "world.training_work": world.training_work,
        "world.mean_h": world.mean_h,
        "world.limit_h": world.limit_h,
    }
    for key, value in positive.items():
        if value <= 0:
            least = "2 or more" if key in ("seeds", "world.executions_per_group") else "a positive number"
            raise ConfigError(f"{key} is too small", fix=f"set {key} to {least}")
    _check_choice("study", config.study, ("design", "ladder", "fixed_pools", "beyond", "baselines"))
    _check_choice("schedule", config.schedule, ("gyre", "colocate", "async"))
    _check_choice("launch_order", config.launch_order, ("fifo", "longest_first"))


def _check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{key}={value}: no such choice", fix=f"{key} is one of {', '.join(choices)}")
