"""One cell's trainer: micro-steps in, a gradient out; on the core also the update, the weights and the checkpoints.

State: `clear` -> accumulate/add -> *open gradient* -> step or clear. While a gradient is open the weights cannot be
replaced, off-loaded or checkpointed: its micro-steps would be lost or applied to other weights (IllegalTransition).
Losses are summed, never averaged: each target carries its weight, and `step` scales once by 1/executions, so the
gradient is the same whichever cells computed it. Equal micro-steps in equal order and grouping give equal bits.
Called by the cell process, the warm start and benchmarks; not thread-safe.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from gyre_hpc.config import ObjectiveConfig, TrainerConfig
from gyre_hpc.errors import ConfigError, CorruptRecord, GyreError, IllegalTransition
from gyre_hpc.models.shape import read_shape
from gyre_hpc.records import Version
from gyre_hpc.training import buffers, checkpoints, objective
from gyre_hpc.training.buffers import Array
from gyre_hpc.training.distributed import CellWorld, join_cell
from gyre_hpc.training.hf_weights import hf_to_megatron, megatron_to_hf, read_hf_folder
from gyre_hpc.training.replay import FILE_NAME, Demonstrations, supervised_micro_steps
from gyre_hpc.trajectories.micro_steps import MicroStep

_log = logging.getLogger(__name__)


class Trainer:
    """The policy of `model_dir` with its gradient buffers and Megatron's Adam.

    `replay` names a demonstrations file; by default the one beside the model, needed only if
    objective.replay_weight > 0.
    """

    def __init__(
        self,
        model_dir: Path,
        trainer: TrainerConfig,
        objective: ObjectiveConfig,
        *,
        replay: Path | None = None,
        seed: int = 0,
    ) -> None:
        if trainer.tensor_parallel != 1:
            raise ConfigError(
                f"trainer.tensor_parallel={trainer.tensor_parallel}: a trainer is one rank",
                fix="set trainer.tensor_parallel=1",
            )
        join_cell(CellWorld())
        from gyre_hpc.training.model import build_policy
        from gyre_hpc.training.update import build_optimizer

        if not torch.cuda.is_available():
            torch.set_num_threads(trainer.threads)
        self.model_dir, self.config, self.objective, self.seed = model_dir, trainer, objective, seed
        self.shape = read_shape(model_dir)
        self.steps = 0
        """Adam steps behind the current weights."""
        self._demonstrations = self._read_demonstrations(replay)
        self._policy = build_policy(self.shape)
        self._policy.load_state(hf_to_megatron(read_hf_folder(model_dir), self.shape))
        self._buffers = buffers.flat_buffers(self._policy.parallel)
        self._optimizer = build_optimizer(self._policy.parallel, trainer)
        self._learning_rate = trainer.learning_rate
        self._parts = 0
        self._offloaded = False

    # ---- gradient ---------------------------------------------------------------------------------------------------

    @property
    def has_gradient(self) -> bool:
        """Whether anything was accumulated or added since the last step or clear."""
        return self._parts > 0

    def accumulate(self, micro_step: MicroStep) -> dict[str, float]:
        """Forward and backward: adds the micro-step's weighted loss gradient. Returns the sums of `training.metrics`."""
        self._require_loaded("accumulate")
        self._parts += 1
        return self._backward(micro_step)

    def gradient(self) -> dict[str, Array]:
        """The flat float32 gradient by buffer name: on the host views, valid until the next call that changes it."""
        return {name: buffers.host_view(buffer.grad_data) for name, buffer in self._buffers.items()}

    def add(self, arrays: Mapping[str, Array]) -> None:
        """Add another trainer's gradient (same `layout_digest`). Call in cell order for equal bits."""
        self._require_loaded("add a contribution")
        self._require_layout(arrays)
        for name, buffer in self._buffers.items():
            buffer.grad_data.add_(torch.from_numpy(arrays[name]).to(buffer.grad_data.device))
        self._parts += 1

    def clear(self) -> None:
        """Drop the gradient."""
        self._parts = 0
        for buffer in self._buffers.values():
            buffer.reset()

    def layout_digest(self) -> str:
        """Equal for trainers whose gradients may be added byte for byte."""
        return buffers.layout_digest(self._policy.parallel)

    # ---- update -----------------------------------------------------------------------------------------------------

    def set_learning_rate(self, learning_rate: float) -> None:
        """Learning rate of the following steps, before warm-up."""
        self._learning_rate = learning_rate

    def step(self, executions: int, version: Version | None = None) -> dict[str, float]:
        """Scale by 1/executions, add the replay gradient, clip, update, clear.

        `version` is the version being made (default: steps + 1) and seeds the choice of replayed rows. Returns
        grad_norm (before clipping), learning_rate, step and, with replay, replay_loss and replay_tokens.
        """
        if not self.has_gradient:
            raise IllegalTransition("no gradient is open: a step without micro-steps is not an update")
        for buffer in self._buffers.values():
            buffer.scale_gradients(1.0 / executions)
        replayed = self._replay(version if version is not None else Version(self.steps + 1))
        norm = math.sqrt(
            sum(float(buffer.grad_data.double().square().sum()) for buffer in self._buffers.values())
        )
        if not math.isfinite(norm):
            raise GyreError(
                f"gradient norm is {norm} at optimizer step {self.steps + 1}: the weights were left as they are",
                fix="lower trainer.learning_rate, or resume from the last checkpoint",
            )
        learning_rate = self._learning_rate * min(1.0, (self.steps + 1) / max(1, self.config.warmup_steps))
        self._optimizer.step(learning_rate)
        self.steps += 1
        self.clear()
        return {"grad_norm": norm, "learning_rate": learning_rate, "step": float(self.steps), **replayed}

    # ---- weights and checkpoints ------------------------------------------------------------------------------------

    def weights(self) -> dict[str, Array]:
        """Whole float32 weights under Hugging Face names; copies."""
        self._require_loaded("read the weights")
        tensors = megatron_to_hf(self._policy.state(), self.shape)
        return {
            name: buffers.host_view(tensor.float().clone().contiguous()) for name, tensor in tensors.items()
        }

    def load_weights(self, arrays: Mapping[str, Array]) -> None:
        """Take weights under Hugging Face names, as a satellite does; optimizer state is left alone."""
        self._require_loaded("load weights")
        self._require_closed("load weights")
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        self._policy.load_state(hf_to_megatron(tensors, self.shape))

    def save_checkpoint(self, folder: Path, version: Version) -> None:
        """Write a checkpoint folder (see `training.checkpoints`), whole or not at all."""
        self._require_loaded("save a checkpoint")
        self._require_closed("save a checkpoint")
        header = checkpoints.Header(version, self.steps, self.layout_digest())
        arrays: dict[str, Array] = {}
        for name, buffer in self._buffers.items():
            arrays |= {f"{name}/{part}": array for part, array in self._optimizer.export(buffer).items()}
        checkpoints.write(folder, self.model_dir, header, self.weights(), arrays)

    def load_checkpoint(self, folder: Path) -> Version:
        """Continue exactly where the checkpoint stopped; returns its version."""
        self._require_loaded("load a checkpoint")
        self._require_closed("load a checkpoint")
        header = checkpoints.read_header(folder)
        if header.layout != self.layout_digest():
            raise CorruptRecord(
                f"{folder}: buffer layout {header.layout} is not this trainer's {self.layout_digest()}",
                fix="resume with the model and trainer shape of the run that wrote it",
            )
        sizes = {name: int(buffer.numel) for name, buffer in self._buffers.items()}
        arrays = checkpoints.read_optimizer(folder, sizes)
        for name, buffer in self._buffers.items():
            own = {part: arrays[f"{name}/{part}"] for part in ("param", "exp_avg", "exp_avg_sq")}
            self._optimizer.restore(buffer, own, header.step)
        self.steps = header.step
        return header.version

    # ---- memory -----------------------------------------------------------------------------------------------------

    def offload(self) -> None:
        """Give up device memory (parameters, gradient buffers, optimizer state). On the host only the state changes.

        The engine is another process: what torch's allocator keeps for later would be lacking there.
        """
        self._require_closed("off-load")
        if not self._offloaded and torch.cuda.is_available():
            for buffer in self._buffers.values():
                buffer.offload_to_cpu()
            self._optimizer.offload()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        self._offloaded = True

    @property
    def offload_bytes(self) -> int:
        """Host memory that `offload` takes beyond what earlier ones have taken: for the moments, where they lie on a device."""
        return self._optimizer.device_bytes

    def restore(self) -> None:
        """Take device memory back."""
        if self._offloaded and torch.cuda.is_available():
            for buffer in self._buffers.values():
                buffer.reload_from_cpu()
            self._optimizer.reload()
        self._offloaded = False

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _backward(self, micro_step: MicroStep) -> dict[str, float]:
        policy = self._policy
        device = next(policy.model.parameters()).device
        policy.context.set(micro_step.tin, micro_step.tout, micro_step.pos, micro_step.row, device)
        targets = objective.Targets.of(micro_step, device)
        logits = policy.logits(torch.from_numpy(micro_step.ids).to(device, torch.long))
        total, sums = objective.loss(objective.token_logprobs(logits, targets.token), targets, self.objective)
        total.backward()  # type: ignore[no-untyped-call]
        return {"tokens": float(micro_step.tokens), **sums}

    def _replay(self, version: Version) -> dict[str, float]:
        if self._demonstrations is None:
            return {}
        rows = self._demonstrations.draw(self.objective.replay_tokens, (self.seed, version))
        weight = self.objective.replay_weight
        loss = sum(self._backward(part)["loss"] for part in self._replay_parts(rows, weight))
        return {"replay_loss": loss / weight, "replay_tokens": float(sum(len(row.ids) for row in rows))}

    def _replay_parts(self, rows: Any, weight: float) -> Iterator[MicroStep]:
        return supervised_micro_steps(rows, weight, self.config.tokens_per_micro_step)

    def _read_demonstrations(self, replay: Path | None) -> Demonstrations | None:
        if self.objective.replay_weight <= 0 or self.objective.replay_tokens <= 0:
            return None
        return Demonstrations.read(replay or self.model_dir / FILE_NAME)

    def _require_layout(self, arrays: Mapping[str, Array]) -> None:
        for name, buffer in self._buffers.items():
            if name not in arrays or arrays[name].shape != (buffer.numel,):
                raise CorruptRecord(
                    f"contribution lacks {name}[{buffer.numel}]", fix="all training cells need the same shape"
                )

    def _require_closed(self, action: str) -> None:
        if self.has_gradient:
            raise IllegalTransition(f"cannot {action} with an open gradient: step, flush or clear it first")

    def _require_loaded(self, action: str) -> None:
        if self._offloaded:
            raise IllegalTransition(f"cannot {action} while off-loaded: restore first")
