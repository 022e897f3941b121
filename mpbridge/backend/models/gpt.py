"""The GPTModel of a run: Transformer Engine's modules on CUDA, megatron-core's local ones on a CPU or under emulation."""

import fnmatch
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
    get_gpt_mtp_block_spec_for_backend,
    get_mlp_module_spec_for_backend,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from mpbridge.backend.megatron.inside_model import latent_attention_takes, multiply_in, router_biases_in_fp32
from mpbridge.backend.megatron.quant_recipe import enter_chunk
from mpbridge.backend.models.adapters import add_adapters, freeze
from mpbridge.backend.models.hybrid import hybrid_model, is_mamba, keep_wide
from mpbridge.backend.models.local_spec import CpuSpecProvider
from mpbridge.common.errors import BadValue
from mpbridge.common.facts import ModelShape
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.settings.sections import LORA

Backend = Callable[[Any], Any]
"""Makes megatron-core's BackendSpecProvider from a TransformerConfig."""


def local_layer_spec(config: Any, backend: Any, *, experts: int | None) -> ModuleSpec:
    """One transformer layer of `backend`'s modules; megatron-core's own function for it does not accept a backend."""
    norm, column, row = backend.layer_norm(), backend.column_parallel_linear(), backend.row_parallel_linear()
    qk_norm = L2Norm if config.qk_l2_norm else norm if config.qk_layernorm else IdentityOp
    common = {"linear_proj": row, "core_attention": backend.core_attention(), "q_layernorm": qk_norm}
    keys: dict[str, str] = {}
    if config.multi_latent_attention:
        names = ("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj")
        parts = MLASelfAttentionSubmodules(**dict.fromkeys(names, column), **common, kv_layernorm=qk_norm)
    else:
        parts = SelfAttentionSubmodules(linear_qkv=column, **common, k_layernorm=qk_norm)
        # checkpoints name norms as Transformer Engine's fused modules do, so that CPU and GPU can read each other's
        keys = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
        keys |= {} if experts else {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
    kind = MLASelfAttention if config.multi_latent_attention else SelfAttention
    attention = ModuleSpec(module=kind, params={"attn_mask_type": AttnMaskType.causal}, submodules=parts)
    mlp = get_mlp_module_spec_for_backend(backend=backend, num_experts=experts, moe_grouped_gemm=False)
    submodules = TransformerLayerSubmodules(
        input_layernorm=norm,
        self_attention=attention,
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=norm,
        mlp=mlp,
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=keys,
    )
    return ModuleSpec(module=getattr(backend, "transformer_layer", TransformerLayer), submodules=submodules)


def multi_token_spec(config: Any, spec: Any, provider: Any, *, chunk: int | None) -> Any:
    """The multi-token prediction layers (mtp_num_layers), built like the decoder's last layer; None if there are none, or none on this stage."""
    if not config.mtp_num_layers:
        return None
    if not getattr(spec, "layer_specs", True):
        spec = _last_layer(config, provider)
        keep_wide(config, spec)
    if provider is None:
        return get_gpt_mtp_block_spec(config, spec, use_transformer_engine=True, vp_stage=chunk)
    return get_gpt_mtp_block_spec_for_backend(config, spec, provider, vp_stage=chunk)


def _last_layer(config: Any, provider: Any) -> Any:
    """The decoder's last layer, for a chunk without decoder layers (a layout that ends in '|mL')."""
    if provider is None:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs

        specs: Any = get_gpt_decoder_layer_specs(config, use_transformer_engine=True, qk_l2_norm=config.qk_l2_norm)
        return specs[-1]
    return local_layer_spec(config, provider, experts=config.num_moe_experts if _expert_layers(config)[-1] else None)


def _expert_layers(config: Any) -> list[bool]:
    """For each layer of the whole model, whether it is a mixture of experts (moe_layer_freq: every n-th, or a list of 0 and 1)."""
    if not config.num_moe_experts:
        return [False] * config.num_layers
    frequency = config.moe_layer_freq
    return [i % frequency == 0 if isinstance(frequency, int) else bool(frequency[i]) for i in range(config.num_layers)]


def block_spec(config: Any, backend: Any, chunk: int | None) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage (or of its interleaved `chunk`) from `backend`, including the final norm."""
    dense = local_layer_spec(config, backend, experts=None)
    expert = local_layer_spec(config, backend, experts=config.num_moe_experts) if config.num_moe_experts else dense
    offset = get_transformer_layer_offset(config, vp_stage=chunk)
    count = get_num_layers_to_build(config, vp_stage=chunk)
    layers = [expert if kind else dense for kind in _expert_layers(config)[offset : offset + count]]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=backend.layer_norm())


def transformer_engine_spec(config: Any, chunk: int | None) -> Any:
    """What megatron-core builds from Transformer Engine's modules on CUDA."""
    if config.num_moe_experts:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        return get_gpt_decoder_block_spec(
            config, use_transformer_engine=True, qk_l2_norm=config.qk_l2_norm, vp_stage=chunk
        )
    asked = {name: getattr(config, name) for name in ("qk_layernorm", "multi_latent_attention", "qk_l2_norm")}
    return get_gpt_layer_with_transformer_engine_spec(**asked)


def build_chunks(
    config: Any,
    arguments: Mapping[str, Any],
    policy: PrecisionPolicy,
    *,
    cuda: bool,
    backend: Backend | None = None,
    shape: ModelShape | None = None,
) -> list[torch.nn.Module]:
    """The model chunks of this rank, without wrappers except Float16Module: one, or as many as its pipeline stage interleaves.

    arguments: GPTModel's own (`megatron.targets.GPT_ARGUMENTS`). backend: makes the linears' provider; None: Transformer Engine on CUDA, `CpuSpecProvider` on a CPU.
    shape: which linears have adapters; None: none.
    """
    virtual = config.virtual_pipeline_model_parallel_size
    chunks = []
    for chunk in range(virtual) if virtual else (None,):
        model = gpt_model(config, arguments, policy, cuda=cuda, backend=backend, chunk=chunk)
        if shape is not None and shape.lora_rank:
            add_adapters(model, shape, arguments)
        chunks.append(in_precision(config, model, policy))
        if cuda:
            chunks[-1].cuda(torch.cuda.current_device())
    return chunks


def gpt_model(
    config: Any,
    arguments: Mapping[str, Any],
    policy: PrecisionPolicy,
    *,
    cuda: bool,
    backend: Backend | None = None,
    chunk: int | None = None,
) -> Any:
    """The GPTModel of this stage (or of its interleaved `chunk`), or a hybrid's MambaModel, with parameters as initialised by megatron-core; otherwise as `build_chunks`.

    FSDP2 shards it directly: Float16Module would round FP32 storage to BF16.
    """
    enter_chunk(config, chunk)
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=chunk is None, vp_stage=chunk)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=chunk is None, vp_stage=chunk)
    provider = None if backend is None and cuda else (backend or CpuSpecProvider)(config)
    if arguments.get("hybrid_override_pattern"):
        layer = partial(local_layer_spec, config, provider)
        model = hybrid_model(config, arguments, layer, provider, cuda=cuda, first=first, last=last)
        return _with_logits(model, policy, last)
    spec = transformer_engine_spec(config, chunk) if provider is None else block_spec(config, provider, chunk)
    keep_wide(config, spec)
    ahead = multi_token_spec(config, spec, provider, chunk=chunk)
    stage = {"pre_process": first, "post_process": last, "vp_stage": chunk, "mtp_block_spec": ahead}
    own = {name: value for name, value in arguments.items() if name not in LORA}
    with nullcontext() if provider is None else latent_attention_takes(provider.column_parallel_linear()):
        model = GPTModel(config=config, transformer_layer_spec=spec, **stage, **own)
    return _with_logits(model, policy, last)


def _with_logits(model: Any, policy: PrecisionPolicy, last: bool) -> Any:
    """The model, whose output layer computes in the policy's dtype of logits."""
    if policy.logits is not None and last:
        multiply_in(model.output_layer, policy.logits.torch())
    return model


def in_precision(config: Any, model: torch.nn.Module, policy: PrecisionPolicy) -> torch.nn.Module:
    """The model wrapped in Float16Module if the config is 16-bit, with the parameters that `policy.keep_fp32` names left in FP32, and without gradients
    of those that it freezes."""
    if policy.frozen:
        again = config.recompute_granularity == "full" or config.pipeline_model_parallel_size > 1
        freeze(model, global_names(model), policy, recomputed=again)
    if not (config.bf16 or config.fp16):
        return model
    kept = fp32_modules(model, policy.keep_fp32)
    # as initialised: Mamba's A_log and D are made in FP32
    wide = {getattr(module, name): getattr(module, name).data.float() for module, own in kept.items() for name in own}
    wrapped: torch.nn.Module = Float16Module(config, model)
    router_biases_in_fp32(model)
    for parameter, values in wide.items():
        parameter.data = values
    for module in kept:
        # the scan converts its own parameters, and an adapter its input; a Mamba layer's projection stays in the compute dtype
        if type(module).__name__ not in ("MambaMixer", "AdapterLinear"):
            _computes_in_fp32(module, policy.compute.torch())
    return wrapped


def fp32_modules(model: torch.nn.Module, patterns: tuple[str, ...]) -> dict[torch.nn.Module, list[str]]:
    """Modules -> those of their own parameters whose global names match a glob. Raises BadValue for a glob that matches nothing, if this rank
    has the whole model."""
    names = global_names(model)
    missing = [p for p in patterns if not any(fnmatch.fnmatchcase(name, p) for name in names.values())]
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    if missing and stages == parallel_state.get_expert_model_parallel_world_size() == 1:
        some = ", ".join(sorted(names.values())[:4])
        raise BadValue(f"keep_fp32 {missing} matches no parameter (expected globs over names such as {some}, ...)")
    found: dict[torch.nn.Module, list[str]] = {}
    for module_name, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            full = names[f"{module_name}.{name}" if module_name else name]
            if any(fnmatch.fnmatchcase(full, pattern) for pattern in patterns):
                found.setdefault(module, []).append(name)
    return found


def _computes_in_fp32(module: torch.nn.Module, outside: torch.dtype) -> None:
    """Casts the inputs of `module` to FP32 and its outputs back to `outside`."""

    def cast(value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, tuple):
            return tuple(cast(item, dtype) for item in value)
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    module.register_forward_pre_hook(lambda module, args: cast(args, torch.float32))
    module.register_forward_hook(lambda module, args, output: cast(output, outside))


def global_names(model: torch.nn.Module) -> dict[str, str]:
    """Local parameter and buffer names -> global ones, with layers counted over all pipeline stages and experts over all expert-parallel ranks."""
    prefixes: dict[str, str] = {}
    for name, module in model.named_modules():
        head, _, index = name.rpartition(".")
        # (the layer inside a multi-token prediction block has no number: '...transformer_layer')
        if (isinstance(module, TransformerLayer) or is_mamba(module)) and index.isdecimal():
            prefixes[name + "."] = f"{head}.{module.layer_number - 1}."
        elif name.endswith(".local_experts"):
            offset = parallel_state.get_expert_model_parallel_rank() * len(list(module.children()))
            for number in range(len(list(module.children()))):
                prefixes[f"{name}.{number}."] = f"{name}.{number + offset}."
    found = {}
    for name in [n for n, _ in model.named_parameters()] + [n for n, _ in model.named_buffers()]:
        full = name
        # experts first: their prefix contains the layer's local number
        for local in sorted((p for p in prefixes if name.startswith(p)), key=len, reverse=True):
            full = prefixes[local] + full.removeprefix(local) if full.startswith(local) else full
        found[name] = full
    return found
