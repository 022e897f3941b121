"""What is trained in a model: low-rank adapters (LoRA) beside its linears, and which of its parameters are frozen."""

from collections.abc import Mapping
from typing import Any

import torch

from mpbridge.common.facts import ModelShape
from mpbridge.numerics.observation.modules import is_linear
from mpbridge.planning.memory.keeps import is_frozen
from mpbridge.precision.globs import matches, place
from mpbridge.precision.policy import PrecisionPolicy


class AdapterLinear(torch.nn.Linear):
    """One of an adapter's two linears, in high precision under every recipe."""


class Adapter(torch.nn.Module):
    """scale * B A x (Hu et al. 2021, arXiv 2106.09685), computed in the dtype of its weights; returned in that of x. A is drawn as torch.nn.Linear's, B is zero."""

    def __init__(self, inner: int, out: int, rank: int, scale: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear_in = AdapterLinear(inner, rank, bias=False, dtype=dtype)
        self.linear_out = AdapterLinear(rank, out, bias=False, dtype=dtype)
        self.scale = scale
        torch.nn.init.zeros_(self.linear_out.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., inner]; the result: [..., out]."""
        found: torch.Tensor = self.linear_out(self.linear_in(x.to(self.linear_in.weight.dtype)))
        return (found * self.scale).to(x.dtype)


def add_adapters(model: Any, shape: ModelShape, arguments: Mapping[str, Any]) -> None:
    """Hangs an Adapter below each linear that `shape.lora_targets` names, and adds its result to the linear's. arguments: model.lora_alpha.

    The base keeps its names, so its checkpoints are those of a model without adapters. Where Transformer Engine fuses a norm into the linear, the adapter
    reads the norm's result, as it would read the linear's input without the fusion.
    """
    alpha, rank = arguments.get("lora_alpha"), shape.lora_rank
    for path, module in list(model.named_modules()):
        where = place(path)
        if where is None or not is_linear(module) or not any(matches(glob, where[0]) for glob in shape.lora_targets):
            continue
        out, inner = module.weight.shape
        scale = 1.0 if alpha is None else alpha / rank
        # the FP32 that a recipe may keep is decided after the model was cast
        module.adapter = Adapter(inner, out, rank, scale, torch.float32).to(module.weight.device)
        if hasattr(module, "return_layernorm_output"):
            module.return_layernorm_output = True
        if hasattr(module, "activation_dtype"):
            module.register_forward_pre_hook(_checked)
        module.register_forward_hook(_added)


def _checked(module: Any, args: tuple[Any, ...]) -> None:
    """Transformer Engine's modules compare the input's dtype with every parameter below them, FP32 adapters included (module/base.py set_activation_dtype);
    with the base's weight it is compared here."""
    if module.weight.dtype == args[0].dtype:
        module.activation_dtype = args[0].dtype


def _added(module: Any, args: tuple[Any, ...], result: tuple[Any, Any]) -> tuple[Any, Any]:
    """A linear's (output, bias) plus its adapter's; a fused norm's result comes with the output."""
    out, bias = result
    x = args[0]
    if isinstance(out, tuple):
        out, x = out
    return out + module.adapter(x), bias


def freeze(model: Any, names: Mapping[str, str], policy: PrecisionPolicy, *, recomputed: bool) -> None:
    """Takes the gradients from the parameters that the policy freezes. names: local -> global. recomputed: layers run again in backward.

    megatron-core's recomputation passes no gradient on if none of its inputs needs one, and neither do pipeline stages; then the embedding's result does.
    """
    for name, parameter in model.named_parameters():
        if is_frozen(policy, names[name]):
            parameter.requires_grad_(False)
    embedding = getattr(model, "embedding", None)
    if recomputed and embedding is not None and not any(p.requires_grad for p in embedding.parameters()):
        embedding.register_forward_hook(lambda module, args, found: found.requires_grad_())
