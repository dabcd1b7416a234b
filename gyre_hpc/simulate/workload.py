"""What executions do: how long each would run undisturbed, and what training it costs. A workload is an endless
sequence of groups; the same seed gives the same groups, whatever schedule meets them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from gyre_hpc.errors import ConfigError

Float64 = npt.NDArray[np.float64]
HELDOUT = 2**31
"""Added to a seed: held-out executions share no draw with training ones."""


class GroupWork(NamedTuple):
    """One query. `seconds`: undisturbed duration of each execution; `training`: node-seconds each costs the trainer (all
    0: equal rewards, no micro-step); `forecast`: seconds expected of an execution from the query's history; `valid`:
    whether each can be assessed, empty if all; `micro_steps`: how many there are, 0 if the world's training model says it;
    `scored_s`: from the end of the last execution to the group's readiness, None if the world says it."""

    seconds: tuple[float, ...]
    training: tuple[float, ...]
    forecast: float
    valid: tuple[bool, ...] = ()
    micro_steps: int = 0
    scored_s: float | None = None

    def is_valid(self, index: int) -> bool:
        """Whether execution `index` of the group can be assessed."""
        return not self.valid or self.valid[index]


class Workload(Protocol):
    """A source of groups."""

    def groups(self, seed: int, executions: int) -> Iterator[GroupWork]:
        """Endless groups of this many executions, in dispatch order."""


@runtime_checkable
class KnowsHeldout(Protocol):
    """A workload whose held-out executions are not like its training executions."""

    def heldout(self, seed: int) -> Iterator[float]:
        """Endless undisturbed durations."""


def heldout_seconds(workload: Workload, seed: int) -> Iterator[float]:
    """Undisturbed durations of held-out executions; drawn like single training executions if nothing else is known."""
    if isinstance(workload, KnowsHeldout):
        yield from workload.heldout(seed)
    for group in workload.groups(seed + HELDOUT, 1):
        yield from group.seconds


@dataclass(frozen=True)
class LogNormal:
    """duration = mean_s * query factor * execution factor, both log-normal with mean 1, cut at `limit_s`."""

    mean_s: float
    query_sigma: float
    execution_sigma: float
    limit_s: float
    training_per_s: float
    """Node-seconds of training per second of an execution."""
    history: int = 4
    """Earlier executions of the query that a forecast is the mean of."""

    def groups(self, seed: int, executions: int) -> Iterator[GroupWork]:
        draws = np.random.default_rng([seed, 0])
        past = np.random.default_rng([seed, 1])
        while True:
            query = self.mean_s * _factor(draws, self.query_sigma, 256)
            seconds = query[:, None] * _factor(draws, self.execution_sigma, (256, executions))
            earlier = query[:, None] * _factor(past, self.execution_sigma, (256, self.history))
            forecasts = np.minimum(earlier, self.limit_s).mean(axis=1)
            yield from group_works(np.minimum(seconds, self.limit_s), self.training_per_s, forecasts)


def _factor(draws: np.random.Generator, sigma: float, size: int | tuple[int, ...]) -> Float64:
    """Log-normal factors with mean 1."""
    return np.exp(draws.normal(-sigma * sigma / 2, sigma, size))


@dataclass(frozen=True)
class Trace:
    """Groups of recorded durations, drawn in epochs over the queries; members are drawn without replacement while they last."""

    queries: tuple[tuple[float, ...], ...]
    """Seconds of the recorded executions of each query."""
    forecasts: tuple[float, ...]
    limit_s: float
    training_per_s: float
    training: tuple[tuple[float, ...], ...] = ()
    """Node-seconds of training of each recorded execution; empty: `training_per_s` times its seconds."""

    def __post_init__(self) -> None:
        if not self.queries or min(map(len, self.queries)) < 1:
            raise ConfigError("trace: a query has no execution", fix="drop queries without a duration")

    def groups(self, seed: int, executions: int) -> Iterator[GroupWork]:
        draws = np.random.default_rng([seed, 2])
        while True:
            for index in draws.permutation(len(self.queries)):
                order = draws.permutation(len(self.queries[index]))
                more = draws.choice(order, max(0, executions - len(order)))
                chosen = np.concatenate([order[:executions], more]).tolist()
                seconds = tuple(min(self.queries[index][member], self.limit_s) for member in chosen)
                if self.training:
                    training = tuple(self.training[index][member] for member in chosen)
                else:
                    training = tuple(value * self.training_per_s for value in seconds)
                yield GroupWork(seconds, training, self.forecasts[index])


def group_works(seconds: Float64, training_per_s: float, forecasts: Float64) -> Iterator[GroupWork]:
    """Groups from durations [G, N] whose training cost is proportional to them, and forecasts [G]."""
    for row, forecast in zip(seconds.tolist(), forecasts.tolist(), strict=True):
        yield GroupWork(tuple(row), tuple(value * training_per_s for value in row), forecast)
