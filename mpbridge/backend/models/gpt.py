"""The GPTModel of a run: Transformer Engine's modules on CUDA, megatron-core's local ones on a CPU or under emulation."""

import fnmatch
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec

from mpbridge.backend.megatron.inside_model import latent_attention_takes, made_of, multiply_in, router_biases_in_fp32
from mpbridge.backend.megatron.quant_recipe import enter_chunk
from mpbridge.backend.models.adapters import add_adapters, freeze
from mpbridge.backend.models.hybrid import hybrid_model, keep_wide
from mpbridge.backend.models.local_spec import CpuSpecProvider
from mpbridge.common.errors import BadValue
from mpbridge.common.facts import ModelShape
from mpbridge.numerics.observation.modules import is_layer
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.settings.sections import LORA

Backend = Callable[[Any], Any]
"""Makes megatron-core's BackendSpecProvider from a TransformerConfig."""


def local_layer_spec(config: Any, provider: Any, *, experts: int | None) -> ModuleSpec:
    """megatron-core's local specification of a layer, of `provider`'s modules."""
    asked = {name: getattr(config, name) for name in ("qk_layernorm", "multi_latent_attention", "qk_l2_norm")}
    with made_of(provider):
        return gpt_layer_specs.get_gpt_layer_local_spec(num_experts=experts, **asked)


def layer_specs(config: Any, provider: Any, chunk: int | None) -> tuple[Any, Any]:
    """megatron-core's specifications of what this pipeline stage (or its interleaved `chunk`) holds: (the decoder's layers and the final norm, the layers of
    multi-token prediction or None). provider: None: of Transformer Engine's modules."""
    kind, qk = {"use_transformer_engine": provider is None}, {"qk_l2_norm": config.qk_l2_norm}
    with made_of(provider):
        spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, **kind, **qk, vp_stage=chunk)
        if provider is not None:
            spec.layer_norm = provider.layer_norm()
        keep_wide(config, spec)
        if not config.mtp_num_layers:
            return spec, None
        like: Any = spec
        if not spec.layer_specs:  # a layout that ends in '|mL': the decoder's last layer is on another stage
            like = gpt_layer_specs.get_gpt_decoder_layer_specs(config, **kind, **qk)[-1]
            keep_wide(config, like)
        return spec, gpt_layer_specs.get_gpt_mtp_block_spec(config, like, **kind, vp_stage=chunk)


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
    spec, ahead = layer_specs(config, provider, chunk)
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
        if is_layer(module) and index.isdecimal():
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
