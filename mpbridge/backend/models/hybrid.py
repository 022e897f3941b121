"""Layers that megatron-core does not put together as a run asks: the FP32 residual stream, and a hybrid from a pattern of layers (`model.hybrid_override_pattern`): M a Mamba layer, * attention, - an MLP, E a mixture of experts."""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from mpbridge.backend.devices.mamba import mamba_on_cpu
from mpbridge.common.errors import Refused
from mpbridge.common.probe import installed
from mpbridge.common.upstream import replaced
from mpbridge.common.versions import at_least

# --- the FP32 residual stream: megatron-core rounds it to 16 bits in its first addition (fused_bias_dropout.py of 0.16.1) --------------------
Add = Callable[[tuple[torch.Tensor, torch.Tensor | None], torch.Tensor, float], torch.Tensor]


def wide_add(training: bool, fused: bool) -> Add:
    """Replaces megatron-core's get_bias_dropout_add; the sum has the residual's dtype. fused: accepted because megatron-core passes it, and ignored."""

    def add(
        found: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, probability: float
    ) -> torch.Tensor:
        x, bias = found
        branch = F.dropout(x if bias is None else x + bias, p=probability, training=training)
        return residual + branch.to(residual.dtype)

    return add


def keep_wide(config: Any, spec: Any) -> None:
    """Makes every layer of a layer or block spec add in the residual's dtype, if the config has an FP32 residual stream."""
    if not config.fp32_residual_connection:
        return
    for layer in _layers(spec):
        for name in ("self_attn_bda", "cross_attn_bda", "mlp_bda", "mamba_bda"):
            if callable(getattr(layer, name, None)) and "bias_dropout_add" in getattr(layer, name).__name__:
                setattr(layer, name, wide_add)


def _layers(spec: Any) -> Iterator[Any]:
    """The submodules of every transformer layer in a spec."""
    if hasattr(spec, "layer_specs"):
        for one in spec.layer_specs:
            yield from _layers(one)
    elif hasattr(getattr(spec, "submodules", None), "mamba_layer"):
        for one in vars(spec.submodules).values():
            yield from _layers(one)
    elif getattr(spec, "submodules", None) is not None:
        yield spec.submodules


# --- hybrids --------------------------------------------------------------------------------------------------------------------------------
def hybrid_model(
    config: Any, arguments: Mapping[str, Any], layers: Any, provider: Any, *, cuda: bool, first: bool, last: bool
) -> Any:
    """The MambaModel (since 0.18 HybridModel) of this pipeline stage, with parameters as initialised by megatron-core.

    arguments: `megatron.targets.GPT_ARGUMENTS`. layers: (experts) -> a whole layer of `provider`'s modules, of which each kind of layer is a part.
    provider: None: Transformer Engine's modules. On a CPU `mamba_ssm` is `devices.mamba`; on CUDA the installed one.
    Raises Refused if the mixer was imported before without mamba_ssm.
    """
    with nullcontext() if cuda else mamba_on_cpu():
        import megatron.core.ssm.mamba_mixer as mixer

        if not mixer.HAVE_MAMBA_SSM:
            raise Refused(
                "megatron.core.ssm.mamba_mixer was imported without mamba_ssm: install mamba-ssm and causal-conv1d (on a CPU nothing is needed, but import "
                "megatron's Mamba modules after mpbridge's device layer or inside mpbridge.transformer_engine_on_cpu())"
            )
        stack, kind = _stack()
        there = vars(stack.LayerSymbols).values()
        lacking = sorted({one for one in arguments["hybrid_override_pattern"] if one not in there})
        if lacking:
            none = f"the hybrid of the installed megatron-core has no layers {', '.join(lacking)}"
            raise Refused(f"{none}: install a newer one")
        if provider is None:
            specs = import_module(f"megatron.core.models.{kind}.{kind}_layer_specs")
            spec = copy.deepcopy(getattr(specs, f"{kind}_stack_spec"))
        else:
            spec = _locals(config, layers, provider, stack, kind.title())
        model = getattr(import_module(f"megatron.core.models.{kind}.{kind}_model"), f"{kind.title()}Model")
    keep_wide(config, spec)
    taken = inspect.signature(model).parameters
    own: dict[str, Any] = {name: value for name, value in arguments.items() if name in taken}
    if "hybrid_layer_pattern" in taken:  # the older name is deprecated there
        own["hybrid_layer_pattern"] = own.pop("hybrid_override_pattern")
    own[f"{kind}_stack_spec"] = spec
    # megatron-core's stack takes its last norm from Transformer Engine, whatever its spec says
    with nullcontext() if provider is None else replaced((stack, "TENorm", provider.layer_norm())):
        return model(config=config, pre_process=first, post_process=last, **own)


def _stack() -> tuple[Any, str]:
    """(megatron-core's module of the stack of layers, the first word of its classes)."""
    if at_least(installed().megatron_core, "0.18"):
        return import_module("megatron.core.models.hybrid.hybrid_block"), "hybrid"
    return import_module("megatron.core.ssm.mamba_block"), "mamba"


def _locals(config: Any, layers: Any, provider: Any, stack: Any, kind: str) -> ModuleSpec:
    """The same kinds of layers from `provider`'s modules; megatron-core has no such spec. Checkpoints name norms as Transformer Engine's fused modules do."""
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer

    norm = provider.layer_norm()
    column, row = provider.column_parallel_linear(), provider.row_parallel_linear()
    projections = MambaMixerSubmodules(in_proj=column, out_proj=row)
    mamba = MambaLayerSubmodules(
        norm=norm,
        mixer=ModuleSpec(module=MambaMixer, submodules=projections),
        mamba_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
    )
    dense = layers(experts=None).submodules
    attention = TransformerLayerSubmodules(
        input_layernorm=norm,
        self_attention=dense.self_attention,
        self_attn_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={"input_layernorm.": "self_attention.linear_qkv.layer_norm_"},
    )
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=norm,
        mlp=dense.mlp,
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"},
    )
    kinds = {  # what a newer stack has, an older one does not take
        "mamba_layer": ModuleSpec(module=MambaLayer, submodules=mamba),
        "attention_layer": ModuleSpec(module=TransformerLayer, submodules=attention),
        "mlp_layer": ModuleSpec(module=MLPLayer, submodules=mlp),
    }
    if config.num_moe_experts:
        experts = layers(experts=config.num_moe_experts).submodules.mlp
        routed = TransformerLayerSubmodules(pre_mlp_layernorm=norm, mlp=experts, mlp_bda=get_bias_dropout_add)
        kinds["moe_layer"] = ModuleSpec(module=TransformerLayer, submodules=routed)
    module, submodules = getattr(stack, f"{kind}Stack"), getattr(stack, f"{kind}StackSubmodules")
    taken = {name: kind for name, kind in kinds.items() if name in submodules.__dataclass_fields__}
    return ModuleSpec(module=module, submodules=submodules(**taken))
