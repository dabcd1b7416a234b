"""Which query a group or an evaluation execution attempts. Pure functions of configuration and running index."""

from __future__ import annotations

import hashlib
import hmac

from gyre_hpc.config import TasksConfig
from gyre_hpc.config_checks import SEED_STRIDE
from gyre_hpc.records import ExecutionId, GroupId


def training_query(tasks: TasksConfig, seed: int, group: GroupId) -> str:
    """Query of a group: each group of a run meets a task of its own; runs with other seeds meet other tasks."""
    return f"{tasks.family}:{tasks.train_seed + seed * SEED_STRIDE + group}"


def heldout_query(tasks: TasksConfig, position: int) -> str:
    """Query of the `position`-th execution of an evaluation point: all held-out tasks, then all again."""
    return f"{tasks.family}:{tasks.heldout_seed + position % tasks.heldout}"


def evaluation_size(tasks: TasksConfig) -> int:
    """Executions of one evaluation point."""
    return tasks.heldout * tasks.evaluation_repeats


def execution_key(secret: bytes, execution: ExecutionId, attempt: int) -> str:
    """Unguessable path key of an attempt: identity and credential at the gateway. 32 hex digits."""
    return hmac.new(secret, f"execution/{execution}/{attempt}".encode(), hashlib.sha256).hexdigest()[:32]


def execution_seed(seed: int, execution: ExecutionId) -> int:
    """Seed handed to the harness."""
    return (seed * 1_000_003 + execution) % 2**31
