"""Apex's `fused_weight_gradient_mlp_cuda` on a CPU: the GEMM of a weight gradient that adds into the main gradient."""

from __future__ import annotations

import types
from importlib.machinery import ModuleSpec

import torch

from mpbridge.te_cpu.module import opaque

NAME = "fused_weight_gradient_mlp_cuda"


def _accumulate(inputs: torch.Tensor, gradients: torch.Tensor, main_grad: torch.Tensor) -> None:
    """main_grad [out, in] += gradients^T inputs, over all leading axes. The sum is FP32 and rounded to main_grad's dtype once, as a GEMM with beta = 1 does.

    Source: csrc/megatron/fused_weight_gradient_dense*.cu of NVIDIA's Apex.
    """
    wide = gradients.reshape(-1, gradients.shape[-1]).float().t() @ inputs.reshape(-1, inputs.shape[-1]).float()
    main_grad.copy_(wide.add_(main_grad.float()))


def make() -> types.ModuleType:
    """The module: `wgrad_gemm_accum_fp32` adds into FP32, `wgrad_gemm_accum_fp16` into 16 bits."""
    made = types.ModuleType(NAME, __doc__)
    made.__spec__ = ModuleSpec(NAME, None)
    # opaque, as the compiled extension is to an audit
    made.wgrad_gemm_accum_fp32 = made.wgrad_gemm_accum_fp16 = opaque(_accumulate)  # type: ignore[attr-defined]
    return made
