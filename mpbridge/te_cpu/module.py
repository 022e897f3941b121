"""Our `transformer_engine_torch`: the table of kernels, the release's enumerations, and refusals for the rest; and Apex's `fused_weight_gradient_mlp_cuda`."""

import functools
import importlib
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
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


# --- Apex: the GEMM of a weight gradient that adds into the main gradient -----------------------------------------------------------------
APEX = "fused_weight_gradient_mlp_cuda"


def _accumulate_weight_gradient(inputs: torch.Tensor, gradients: torch.Tensor, main_grad: torch.Tensor) -> None:
    """main_grad [out, in] += gradients^T inputs, over all leading axes. The sum is FP32 and rounded to main_grad's dtype once, as a GEMM with beta = 1 does.

    Source: csrc/megatron/fused_weight_gradient_dense*.cu of NVIDIA's Apex.
    """
    wide = gradients.reshape(-1, gradients.shape[-1]).float().t() @ inputs.reshape(-1, inputs.shape[-1]).float()
    main_grad.copy_(wide.add_(main_grad.float()))


def make_apex() -> types.ModuleType:
    """The module: `wgrad_gemm_accum_fp32` adds into FP32, `wgrad_gemm_accum_fp16` into 16 bits."""
    made = types.ModuleType(APEX, "Apex's weight gradients on a CPU, by mpbridge.")
    made.__spec__ = ModuleSpec(APEX, None)
    # opaque, as the compiled extension is to an audit
    made.wgrad_gemm_accum_fp32 = made.wgrad_gemm_accum_fp16 = opaque(_accumulate_weight_gradient)  # type: ignore[attr-defined]
    return made
