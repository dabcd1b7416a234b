"""The policy as a Megatron-core GPTModel, built behind one function from a Hugging Face model folder.

`build_policy` is the only place that knows megatron-core's constructors. The model takes one packed row of tokens
(a prefix forest set in its TreeContext) and returns logits of the wanted rows only. `join_cell` must have run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gyre_hpc.models.shape import ModelShape
from gyre_hpc.training import host_backend
from gyre_hpc.training.hf_weights import Tensors
from gyre_hpc.training.tree_attention import TreeAttention, TreeContext, TreeRotary

with host_backend.quiet():
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class Policy:
    """A built policy. `parallel` wraps `model` and owns the flat parameter and fp32 gradient buffers."""

    shape: ModelShape
    model: Any
    parallel: Any
    context: TreeContext

    def logits(self, ids: Tensor) -> Tensor:
        """[S] token ids -> [M, vocab] logits of the context's rows, in float32."""
        out: Tensor = self.parallel(ids[None], self.context.positions[None], None)
        return out[0].float()

    def state(self) -> Tensors:
        """Megatron-named parameters (views of the flat buffer)."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    @torch.no_grad()
    def load_state(self, state: Tensors) -> None:
        """Copy a Megatron-named state into the parameters."""
        for name, parameter in self.model.named_parameters():
            parameter.copy_(state[name])


def build_policy(shape: ModelShape) -> Policy:
    """Construct the policy with zero-copy flat buffers; weights are undefined until `load_state`."""
    context = TreeContext()
    with host_backend.literals(), host_backend.quiet():
        model = GPTModel(
            config=_transformer_config(shape),
            transformer_layer_spec=_layer_spec(context),
            vocab_size=shape.vocab_size,
            max_sequence_length=1 << 20,
            position_embedding_type="rope",
            rotary_base=int(shape.rope_theta),
            share_embeddings_and_output_weights=shape.tie_word_embeddings,
        )
        model.rotary_pos_emb = TreeRotary(context, shape.head_dim, shape.rope_theta)
        model.output_layer.register_forward_pre_hook(_select_rows(context))
        if torch.cuda.is_available():
            model.cuda()
        # The distributed-optimizer layout is what maps all parameters into one flat buffer beside the flat gradient.
        flat = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        parallel = DistributedDataParallel(config=model.config, ddp_config=flat, module=model)
    return Policy(shape, model, parallel, context)


def _select_rows(context: TreeContext) -> Any:
    """Project only the wanted hidden rows [S, 1, hidden] -> [M, 1, hidden]: logits of the others are never made."""

    def hook(module: torch.nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0].index_select(0, context.rows), *args[1:])

    return hook


def _layer_spec(context: TreeContext) -> Any:
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    attention = ModuleSpec(module=TreeAttention, params={"context": context})
    spec.submodules.self_attention.submodules.core_attention = attention
    return spec


def _transformer_config(shape: ModelShape) -> Any:
    return TransformerConfig(
        num_layers=shape.num_hidden_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.intermediate_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_key_value_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.rms_norm_eps,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        perform_initialization=False,
        calculate_per_token_loss=True,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
    )
