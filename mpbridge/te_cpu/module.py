"""Our `transformer_engine_torch`: the table of kernels, the release's enumerations, and refusals for the rest; and what megatron-core asks of Apex."""

import functools
import importlib
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from mpbridge.te_cpu import autocast
from mpbridge.te_cpu.enums import enumerations
from mpbridge.te_cpu.played import KERNELS
from mpbridge.te_cpu.refusals import refused

NAME = "transformer_engine_torch"
_SUBJECTS = (
    "activations", "attention", "gemm", "grouped_gemm", "grouped_tensors", "moe", "multi_tensor", "norms", "quantize", "router", "slices",
    "swizzle",
)  # fmt: skip


class KernelModule(types.ModuleType):
    """The module; a missing name is a function that raises Refused when it is called."""

    mpbridge = True
    """Marks it as ours."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return refused(name)


def make_module(release: tuple[int, ...]) -> KernelModule:
    """The module in the form that this Transformer Engine release expects."""
    for subject in _SUBJECTS:
        importlib.import_module(f"mpbridge.te_cpu.{subject}")
    made = KernelModule(NAME, "Transformer Engine's kernels on a CPU, by mpbridge.")
    for name, function in KERNELS.items():
        place, _, last = name.rpartition(".")  # the extension has submodules since 2.20
        inside = vars(made).setdefault(place, KernelModule(f"{NAME}.{place}", made.__doc__)) if place else made
        setattr(inside, last, opaque(function))
    for name, value in enumerations(release).items():
        setattr(made, name, value)
    return made


def opaque(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `kernel` look to torch like one call into compiled code: a dispatch mode (the audit's, a profiler's) sees none of its operations, autocast
    changes none of their dtypes, and autograd sees none of its inputs.
    """

    @functools.wraps(kernel)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), autocast.off():
            if torch._C._len_torch_dispatch_stack() == 0:
                return kernel(*args, **kwargs)
            with _disable_current_modes():
                return kernel(*args, **kwargs)

    return call


# --- Apex: the GEMM of a weight gradient that adds into the main gradient, and LayerNorm ----------------------------------------------------
def _accumulate_weight_gradient(inputs: torch.Tensor, gradients: torch.Tensor, main_grad: torch.Tensor) -> None:
    """main_grad [out, in] += gradients^T inputs, over all leading axes. The sum is FP32 and rounded to main_grad's dtype once, as a GEMM with beta = 1 does.

    Source: csrc/megatron/fused_weight_gradient_dense*.cu of NVIDIA's Apex.
    """
    wide = gradients.reshape(-1, gradients.shape[-1]).float().t() @ inputs.reshape(-1, inputs.shape[-1]).float()
    main_grad.copy_(wide.add_(main_grad.float()))


class FusedLayerNormAffineFunction(torch.autograd.Function):
    """LayerNorm over the trailing axes `normalized_shape` of FP32, FP16 or BF16: statistics and gradients in FP32; normalized, scaled and shifted
    values are each rounded to 16 bits; Apex's own FP32, built with --use_fast_math, may differ in the last bits. Raises RuntimeError for another dtype, or for a weight or bias of another dtype or shape than the input's.

    memory_efficient: keeps the output in place of the input; a weight of zero then gets no gradient.
    Source: csrc/layer_norm_cuda_kernel.cu of NVIDIA's Apex, 6424da3b.
    """

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, normalized_shape: Sequence[int], eps: float, memory_efficient: bool = False
    ) -> Any:  # fmt: skip
        """The output, of the input's shape and dtype."""
        found = [(one.dtype, *one.shape) for one in (weight, bias)]
        if (
            input.dtype not in (torch.float32, torch.float16, torch.bfloat16)
            or found != [(input.dtype, *normalized_shape)] * 2
        ):
            raise RuntimeError(
                f"Apex's LayerNorm takes FP32, FP16 or BF16, and a weight and a bias of the input's dtype and of shape {[*normalized_shape]}; found {input.dtype}, {found}: cast them"
            )
        output, mean, inverse = opaque(_layer_norm)(input, weight, bias, normalized_shape, eps)
        kept = (output, None) if memory_efficient else (input, mean)
        ctx.save_for_backward(*kept, inverse, weight, bias)
        ctx.eps = eps
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Those of input, weight and bias."""
        return *opaque(_layer_norm_backward)(*grads, *ctx.saved_tensors, ctx.eps), None, None, None


def _layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, shape: Sequence[int], eps: float
) -> tuple[torch.Tensor, ...]:
    hat, mean, inverse = torch.native_layer_norm(x.float().contiguous(), [*shape], None, None, eps)
    return weight * hat.to(x.dtype) + bias, mean, inverse


def _layer_norm_backward(
    grad: torch.Tensor, kept: torch.Tensor, mean: torch.Tensor | None, inverse: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> list[torch.Tensor]:  # fmt: skip
    # the kernel keeps the weight that it divides by, and the first term's, at least eps away from zero
    away = torch.where(weight >= 0, weight.clamp(min=eps), weight.clamp(max=-eps)).float()
    wide, axes, count = grad.float(), tuple(range(-weight.dim(), 0)), weight.numel()
    if mean is None:
        scaled = kept.float() - bias.float()
        hat = scaled / away
    else:
        hat = (kept.float() - mean) * inverse
        scaled = weight.float() * hat
    sums = [one.sum(axes, keepdim=True) for one in (wide * weight.float(), wide * scaled)]
    dx = (count * wide * away - sums[0] - hat * sums[1]) * (inverse / count)
    of_weight, of_bias = (one.reshape(-1, *weight.shape).sum(0).to(weight.dtype) for one in (wide * hat, wide))
    return [dx.to(kept.dtype), of_weight, of_bias]


def make_apex() -> list[types.ModuleType]:
    """The modules, parents first. `wgrad_gemm_accum_fp32` adds into FP32, `wgrad_gemm_accum_fp16` into 16 bits; any other part of Apex is not installed."""
    names = "fused_weight_gradient_mlp_cuda", "apex", "apex.normalization", "apex.normalization.fused_layer_norm"
    made: list[Any] = [types.ModuleType(name, "Apex on a CPU, by mpbridge.") for name in names]
    # opaque, as the compiled extension is to an audit
    made[0].wgrad_gemm_accum_fp32 = made[0].wgrad_gemm_accum_fp16 = opaque(_accumulate_weight_gradient)
    made[-1].FusedLayerNormAffineFunction = FusedLayerNormAffineFunction
    return made
