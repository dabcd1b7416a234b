"""The `cluster.service` section: how large the processes beside the cells are (slurm). Submission and placement read it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class StepConfig:
    """Size of one process."""

    cpus: int = 1
    """CPUs of its own, where the node has them beside the cells; else it shares."""
    mem: str = "1G"
    """Memory; where Slurm confines memory, a process that outgrows it is killed alone and restarted."""


@dataclass
class ServiceConfig:
    """Sizes of the processes beside the cells; each but the controller is a step of its own (slurm)."""

    controller: StepConfig = field(default_factory=StepConfig)
    """Room kept for the batch process on the first node; its limit is the whole job's."""
    gateway: StepConfig = field(default_factory=StepConfig)
    """Grows with the calls that run at a time and with their length."""
    runner: StepConfig = field(default_factory=StepConfig)
    """Harness programs, sandboxes and evaluators are part of it: executions at a time, times the memory of one."""
    processor: StepConfig = field(default_factory=StepConfig)
    """Grows with the executions of the groups under way."""
