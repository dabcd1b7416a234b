"""Megatron's Adam over a policy's flat buffers, with state that leaves and enters as flat arrays.

An optimizer restored from `export`ed arrays continues exactly: the next step gives the same bits as without the stop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gyre_hpc.config import TrainerConfig
from gyre_hpc.training import buffers, host_backend
from gyre_hpc.training.buffers import Array

with host_backend.quiet():
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer


class Optimizer:
    """Clip and update of float32 parameters; one instance per policy."""

    def __init__(self, megatron: Any, weight_decay: float) -> None:
        self._megatron = megatron
        self._inner = [part.optimizer for part in megatron.chained_optimizers]
        for group in self._groups():
            group["weight_decay"] = weight_decay * group["wd_mult"]

    def step(self, learning_rate: float) -> None:
        """Clip by the global norm and update the parameters from the gradient buffers, which the caller then clears."""
        for group in self._groups():
            group["lr"] = learning_rate
        with host_backend.literals():
            self._megatron.step()
        # The step leaves parameter.grad aliased to the flat gradient; the next backward would then count itself twice.
        self._megatron.zero_grad(set_to_none=True)

    def export(self, buffer: Any) -> dict[str, Array]:
        """Flat float32 arrays param, exp_avg, exp_avg_sq in the layout of the gradient buffer."""
        return {
            "param": buffers.pack(buffer, lambda parameter: parameter),
            "exp_avg": buffers.pack(buffer, lambda parameter: self._moment(parameter, "exp_avg")),
            "exp_avg_sq": buffers.pack(buffer, lambda parameter: self._moment(parameter, "exp_avg_sq")),
        }

    @torch.no_grad()
    def restore(self, buffer: Any, arrays: Mapping[str, Array], step: int) -> None:
        """Inverse of `export`; `step` is the number of Adam steps behind the arrays."""
        for parameter, value in buffers.unpack(buffer, arrays["param"]):
            parameter.copy_(value)
        for parameter, _ in buffers.unpack(buffer, arrays["param"]):
            self._state(parameter)["step"] = torch.tensor(float(step))
        for moment in ("exp_avg", "exp_avg_sq"):
            for parameter, value in buffers.unpack(buffer, arrays[moment]):
                self._state(parameter)[moment] = value.clone().to(parameter.device)

    def offload(self) -> None:
        """Move the moments to host memory."""
        self._move(torch.device("cpu"))

    def reload(self) -> None:
        """Move the moments back beside their parameters."""
        self._move(None)

    @property
    def device_bytes(self) -> int:
        """Bytes of moments that lie on a device."""
        states = [state for inner in self._inner for state in inner.state.values()]
        moments = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq") if name in state]
        return sum(moment.nbytes for moment in moments if moment.is_cuda)

    def _move(self, device: torch.device | None) -> None:
        for inner in self._inner:
            for parameter, state in inner.state.items():
                for moment in ("exp_avg", "exp_avg_sq"):
                    state[moment] = state[moment].to(device or parameter.device)

    def _moment(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        moment: torch.Tensor = self._state(parameter).get(name, torch.zeros_like(parameter))
        return moment

    def _state(self, parameter: torch.Tensor) -> dict[str, Any]:
        for inner in self._inner:
            if any(parameter is own for group in inner.param_groups for own in group["params"]):
                state: dict[str, Any] = inner.state[parameter]
                return state
        raise KeyError("a parameter without optimizer")

    def _groups(self) -> list[dict[str, Any]]:
        return [group for inner in self._inner for group in inner.param_groups]


def build_optimizer(parallel: Any, config: TrainerConfig) -> Optimizer:
    """Adam as configured over the parameters of a Megatron DDP wrapper."""
    settings = OptimizerConfig(
        optimizer="adam",
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        clip_grad=config.clip_grad,
        params_dtype=torch.float32,
    )
    with host_backend.literals():
        return Optimizer(get_megatron_optimizer(settings, [parallel]), config.weight_decay)
