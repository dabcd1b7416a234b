"""What types cannot check in a run's configuration: closed sets, ranges, and keys that depend on each other.

`validate` raises ConfigError for the first key at fault, with a value that would do. Called on every configuration,
composed or loaded, before anything starts.
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

from gyre_hpc.errors import ConfigError
from gyre_hpc.records import KvPolicy, LeafRole

if TYPE_CHECKING:
    from gyre_hpc.config import RunConfig

CHOICES = {
    "schedule.policy": ("gyre", "colocate", "async"),
    "schedule.launch_order": ("fifo", "longest_first"),
    "engine.kind": ("torch", "sglang"),
    "engine.sglang.device": ("cuda", "cpu"),
    "engine.sglang.dtype": ("auto", "bfloat16", "float16", "float32"),
    "engine.kv_policy": tuple(KvPolicy),
    "cluster.kind": ("local", "slurm"),
    "cluster.layout": ("flat", "het"),
    "cluster.broadcast": ("none", "package", "environment"),
    "cluster.runners": ("job", "external"),
    "cluster.job.requeue_by": ("auto", "exit", "scontrol", "successor"),
    "cluster.job.walltime_policy": ("clip", "hold"),
    "cluster.job.service_lost": ("resubmit", "end"),
    "objective.kind": ("sequence_clip", "grpo"),
    "harness.deliver": ("answer", "blocks"),
    "harness.dialect": ("openai-chat", "openai-responses", "anthropic-messages"),
    "tasks.sandbox": ("auto", "userns", "none"),
    "trainer.packing": ("tree", "rows"),
    "transport.kind": ("sockets", "mpi", "nixl", "auto"),
}
"""Keys with a closed set of values."""

AT_LEAST = {
    "model.max_context": 2,
    "engine.capacity": 1,
    "engine.page_tokens": 1,
    "engine.kv_store_mib": 0,
    "engine.sglang.tensor_parallel": 1,
    "trainer.tensor_parallel": 1,
    "trainer.min_micro_steps_per_group": 1,
    "trainer.keep_checkpoints": 1,
    "trainer.checkpoint_every": 1,
    "objective.j_max": 1,
    "schedule.batch_groups": 1,
    "schedule.executions_per_group": 2,
    "schedule.steps_per_burst": 1,
    "schedule.extra_dispatch": 0,
    "schedule.oversample": 0,
    "schedule.max_void_bursts": 1,
    "schedule.training_cells": 0,
    "schedule.steps": 1,
    "cluster.cells": 1,
    "cluster.cell.ranks": 1,
    "cluster.cell.nodes": 1,
    "cluster.cell.cpus_per_rank": 1,
    "cluster.job.cells_per_node": 1,
    "cluster.job.service_cpus": 0,
    "cluster.service.controller.cpus": 1,
    "cluster.service.gateway.cpus": 1,
    "cluster.service.runner.cpus": 1,
    "cluster.service.processor.cpus": 1,
    "cluster.job.service_nodes": 1,
    "cluster.job.margin_s": 0,
    "cluster.job.fruitless_jobs": 1,
    "cluster.restarts": 0,
    "cluster.restart_window_s": 1,
    "cluster.bad_node_deaths": 1,
    "cluster.bad_node_window_s": 1,
    "gateway.kv_move_s": 0,
    "gateway.max_output_tokens": 1,
    "gateway.max_body_mib": 1,
    "gateway.client_timeout_s": 1,
    "tasks.heldout": 0,
    "tasks.evaluation_repeats": 1,
    "tasks.evaluate_every": 0,
    "tasks.evaluators": 1,
    "seed": 0,
}
"""Least values. A group-relative advantage needs 2 executions; a negative seed would reach the held-out tasks."""

SEED_STRIDE = 100_000
"""Training tasks reserved for one seed: runs of different seeds meet different tasks."""


def validate(run: RunConfig) -> None:
    """Raise ConfigError naming the first key at fault."""
    for key, allowed in CHOICES.items():
        _one_of(key, str(_value(run, key)), allowed)
    for key, least in AT_LEAST.items():
        value = _value(run, key)
        if not value >= least:
            raise ConfigError(f"{key}={value} must be at least {least}", fix=f"set {key}={least} or more")
    for check in (_schedule, _sizes, _roles, _time_limits, _tasks, _job, _interface, _transport, _sglang):
        check(run)


def _value(run: RunConfig, key: str) -> float:
    value: object = run
    for name in key.split("."):
        value = getattr(value, name)
    return value  # type: ignore[return-value]


def _one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        close = difflib.get_close_matches(value, allowed, n=1, cutoff=0.0)
        raise ConfigError(
            f"{key}={value} is not one of {', '.join(allowed)}", fix=f"did you mean {key}={close[0]}?"
        )


def _schedule(run: RunConfig) -> None:
    schedule, cells = run.schedule, run.cluster.cells
    ahead = schedule.extra_dispatch * schedule.batch_groups
    if abs(ahead - round(ahead)) > 1e-9:
        raise ConfigError(
            f"schedule.extra_dispatch={schedule.extra_dispatch}: phi*B = {ahead} is not an integer",
            fix=f"use a multiple of 1/{schedule.batch_groups}",
        )
    pool = run.cluster.standalone
    if not 0 <= pool < cells:
        raise ConfigError(
            f"cluster.standalone={pool} of cluster.cells={cells}: at least one cell must be able to train",
            fix=f"set cluster.standalone={cells - 1} or less",
        )
    if schedule.policy == "async" and cells < 2:
        raise ConfigError("schedule.policy=async needs cluster.cells >= 2", fix="set cluster.cells=2")
    most = cells - max(1, pool)
    if schedule.policy == "async" and schedule.training_cells > most:
        raise ConfigError(
            f"schedule.training_cells={schedule.training_cells} leaves none of cluster.cells={cells} for rollout,"
            f" or some of cluster.standalone={pool}",
            fix=f"set schedule.training_cells={most} or less",
        )


def _sizes(run: RunConfig) -> None:
    longest = run.model.max_context
    if run.trainer.tokens_per_micro_step < longest:
        raise ConfigError(
            f"trainer.tokens_per_micro_step={run.trainer.tokens_per_micro_step} is below"
            f" model.max_context={longest}: a longest path would not fit",
            fix=f"set trainer.tokens_per_micro_step={longest} or more",
        )
    if run.engine.pool_tokens < longest:
        raise ConfigError(
            f"engine.pool_tokens={run.engine.pool_tokens} is below model.max_context={longest}:"
            " a longest call would not fit",
            fix=f"set engine.pool_tokens={longest * run.engine.capacity} (engine.capacity such calls)",
        )
    if run.objective.replay_weight > 0 and run.objective.replay_tokens < 1:
        raise ConfigError(
            f"objective.replay_weight={run.objective.replay_weight} with objective.replay_tokens=0 replays nothing",
            fix="set objective.replay_tokens=2048, or objective.replay_weight=0",
        )


def _sglang(run: RunConfig) -> None:
    engine = run.engine
    if engine.kind != "sglang":
        return
    if engine.tokens_per_s > 0:
        raise ConfigError(
            f"engine.tokens_per_s={engine.tokens_per_s:g}: only the embedded engine can be paced",
            fix="set engine.tokens_per_s=0, or engine=torch",
        )
    if engine.sglang.device == "cpu" and engine.sglang.tensor_parallel > 1:
        raise ConfigError(
            f"engine.sglang.tensor_parallel={engine.sglang.tensor_parallel} needs GPUs",
            fix="set engine.sglang.tensor_parallel=1",
        )


def _roles(run: RunConfig) -> None:
    for rule in run.harness.roles:
        _one_of("harness.roles.role", rule.role, tuple(role.value for role in LeafRole))
        if rule.same or rule.after:
            _one_of("harness.roles.after", rule.after, tuple(role.value for role in LeafRole))
        if rule.header_has and not rule.header:
            raise ConfigError(
                f"harness.roles: header_has={rule.header_has} without a header never holds",
                fix="name the header in the same rule",
            )


def _time_limits(run: RunConfig) -> None:
    limit, overall = run.harness.timeout_s, run.harness.overall_timeout_s
    if overall <= limit:
        raise ConfigError(
            f"harness.overall_timeout_s={overall} must exceed harness.timeout_s={limit}:"
            " no execution could reach its harness limit and be scored",
            fix=f"set harness.overall_timeout_s={2 * limit:g}",
        )


def _tasks(run: RunConfig) -> None:
    tasks = run.tasks
    first = tasks.train_seed + run.seed * SEED_STRIDE
    if tasks.heldout_seed < first + SEED_STRIDE and first < tasks.heldout_seed + tasks.heldout:
        raise ConfigError(
            f"tasks.heldout_seed={tasks.heldout_seed}: held-out tasks up to {tasks.heldout_seed + tasks.heldout}"
            f" overlap the training tasks {first} to {first + SEED_STRIDE}",
            fix=f"set tasks.heldout_seed={first + SEED_STRIDE}",
        )


def _job(run: RunConfig) -> None:
    job = run.cluster.job
    for key, limit in (("time", job.time), ("service_time", job.service_time)):
        if not re.fullmatch(r"\d+:\d\d:\d\d|\d+-\d+(:\d\d){0,2}", limit):
            raise ConfigError(
                f"cluster.job.{key}={limit} is not hours:minutes:seconds or days-hours",
                fix='write it like "12:00:00", with the quotes in a YAML file (without them YAML reads a number)',
            )
    if run.cluster.runners == "external":
        _external(run)
    if job.margin_s >= _seconds(job.time):
        raise ConfigError(
            f"cluster.job.margin_s={job.margin_s} is not below cluster.job.time={job.time}: the run would be told to"
            " end at its start",
            fix="raise cluster.job.time, or set cluster.job.margin_s=0 to be told nothing",
        )


def _interface(run: RunConfig) -> None:
    cluster = run.cluster
    if cluster.interface and cluster.host != "auto":
        raise ConfigError(
            f"cluster.interface={cluster.interface} would count for nothing: cluster.host={cluster.host}",
            fix="set cluster.host=auto",
        )


def _external(run: RunConfig) -> None:
    """Gateway and runner in a job of their own."""
    job = run.cluster.job
    if _seconds(job.service_time) <= _seconds(job.time):
        raise ConfigError(
            f"cluster.job.service_time={job.service_time} is not longer than cluster.job.time={job.time}: no call"
            " could be held until the run's job is back",
            fix='set cluster.job.service_time to several times cluster.job.time, for example "3-00:00:00"',
        )


def _seconds(time: str) -> int:
    """A time limit in seconds."""
    days, dash, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    return int(days if dash else 0) * 86400 + hours * 3600 + minutes * 60 + seconds


def _transport(run: RunConfig) -> None:
    transport = run.transport
    if transport.silent_s <= transport.join_s:
        raise ConfigError(
            f"transport.silent_s={transport.silent_s:g} must be more than transport.join_s={transport.join_s:g}:"
            " an endpoint is silent while it lets another one join",
            fix="raise transport.silent_s or lower transport.join_s",
        )
