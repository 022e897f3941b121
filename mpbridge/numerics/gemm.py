"""The three GEMMs of a linear layer on quantized operands, as one autograd function."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from mpbridge.common.errors import BadValue
from mpbridge.numerics.operands import Operand, Side
from mpbridge.numerics.quantizer import Quantizer
from mpbridge.precision.regions import Gemm, Gemms
from mpbridge.precision.scalings import Scaling


class Observer(Protocol):
    """Observes operands as they are made (statistics)."""

    def see(
        self, slot: str, gemm: Gemm, side: Side, high: torch.Tensor, operand: Operand, quantizer: Quantizer
    ) -> None:
        """Called with one operand and the high-precision tensor that it was made from."""


@dataclass(slots=True, kw_only=True)
class Plug:
    """Connects one linear layer to its quantizer."""

    slot: str
    """Global name: 'decoder.layers.3.mlp.linear_fc1'."""
    gemms: Gemms
    """The rules that the linear follows."""
    fprop: Quantizer | None
    """Quantizes that GEMM's operands; None: they stay in the compute dtype."""
    dgrad: Quantizer | None
    wgrad: Quantizer | None
    emulation: Any
    """Its `Emulation`: contexts of delayed scaling, observer, pause switch."""
    quantizer: Quantizer = field(init=False)
    """The first of the three that is not None; there is always one."""
    dequantized: bool = field(init=False)
    """Whether the backward pass computes with dequantized copies of the forward pass's operands."""
    weight_row: Operand | None = None
    weight_column: Operand | None = None
    first_microbatch: bool = True
    waiting: deque[bool] = field(default_factory=deque)
    """One entry for each forward run that activation recomputation will repeat: whether it was the first of its context."""

    def __post_init__(self) -> None:
        self.quantizer = next(one for one in (self.fprop, self.dgrad, self.wgrad) if one is not None)
        backward = self.fprop.backward if self.fprop is not None and self.gemms.one else "quantized"
        self.dequantized = backward == "dequantized"
        if backward != "quantized":
            self.dgrad = self.wgrad = None


def misfits(scaling: Scaling, tokens: int, weight: torch.Size) -> list[str]:
    """Every dimension of a linear that Transformer Engine refuses under that scaling, as text."""
    need = scaling.sizes
    features = ("input features", weight[1], need.inner), ("output features", weight[0], need.outer)
    sizes = (("tokens", tokens, need.tokens), *features)
    return [f"{name} {size} (expected a multiple of {multiple})" for name, size, multiple in sizes if size % multiple]


def check_shapes(slot: str, scaling: Scaling, tokens: int, weight: torch.Size) -> None:
    """Raises BadValue with every dimension that Transformer Engine would refuse for this recipe."""
    faults = misfits(scaling, tokens, weight)
    if faults:
        raise BadValue(
            f"{slot}: {scaling.name} scaling cannot quantize {'; '.join(faults)}: Transformer Engine refuses it too "
            "(choose sizes that fit, keep the module in high precision with a region, or use another recipe)"
        )


def product(a: Operand, b: Operand, out: torch.dtype, bias: torch.Tensor | None = None) -> torch.Tensor:
    """a @ b in `out`, rounded once: fp32 accumulation, the operands' factors and the bias in the epilogue."""
    left, right, factor = a.values, b.values, joint_factor(a, b)
    on_cpu, single = left.device.type == "cpu", factor is None or not factor.dim()
    if on_cpu and single and out is left.dtype is right.dtype is torch.bfloat16:
        # mkldnn scales and adds in fp32 before it rounds; with beta=0 the addend's content is ignored
        addend = left.new_zeros(1, 1) if bias is None else bias.to(left.dtype).unsqueeze(0)
        alpha = 1.0 if factor is None else float(factor)
        return torch.addmm(addend, left, right, beta=0.0 if bias is None else 1.0, alpha=alpha)
    # elsewhere the same exact operands and the epilogue in torch. A CPU has no mixed-precision output and no per-line factor (MKL scales an operand
    # before the product); on a GPU no value may be copied to the host, and an fp32 result makes the factor accurate enough for a single rounding
    result = left.float() @ right.float() if on_cpu else torch.mm(left, right, out_dtype=torch.float32)
    result = result if factor is None else result * factor
    return (result if bias is None else result + bias.float()).to(out)


def joint_factor(a: Operand, b: Operand) -> torch.Tensor | None:
    """The fp32 factor of a product, from both operands' factors; None: 1.

    NVFP4 with one amax for each operand: amax * amax * (1 / both constants), in that order, as compute_nvfp4_per_tensor_scale_kernel does
    (common/recipe/nvfp4.cu, v2.11 to v2.20); a product of two quotients differs in its last digit.
    """
    if a.factor is None or b.factor is None:
        return b.alpha if a.factor is None else a.alpha
    if a.divisor != 1.0 and b.divisor != 1.0 and a.factor.numel() == b.factor.numel() == 1:
        return a.factor * b.factor * (1.0 / (a.divisor * b.divisor))
    return a.alpha * b.alpha  # type: ignore[operator]  # neither is None


class QuantizedLinear(torch.autograd.Function):
    """Y = X Wt + b with quantized operands in fprop, dgrad and wgrad. Communication is left to the caller."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        plug: Plug,
        first: bool,
        replay: bool,
        high: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x: [..., in]; first: this linear opens its context; replay: activation recomputation. high: x before it was rounded to its dtype, if
        that is what is quantized (`linear.unrounded`)."""
        with torch._C.DisableTorchFunction():  # the CPU device layer's redirections cost time and have no effect here
            # kernels are compiled for tensors without gradients
            flat = (x if high is None else high).detach().reshape(-1, x.shape[-1])
            row = _seen(plug, "fprop", "x", flat, replay=replay)
            weights = _weights(plug, weight, x.dtype, column=ctx.needs_input_grad[0])
            y = product(row, weights[0].turned(), x.dtype, bias)
            column = _for_wgrad(plug, row, flat, replay=replay) if ctx.needs_input_grad[1] else None
            _save(ctx, column, weights[1])
            ctx.plug, ctx.first, ctx.shape, ctx.dtypes = plug, first, x.shape, (x.dtype, weight.dtype)
            ctx.has_bias = bias is not None
            return y.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """Gradients of x, weight and bias; ends the context if this linear opened it."""
        plug: Plug = ctx.plug
        with torch._C.DisableTorchFunction():
            x_column, w_column = _saved(ctx)
            flat = grad.reshape(-1, grad.shape[-1]).contiguous()
            dx = dw = row = None
            if w_column is not None:
                row = _seen(plug, "dgrad", "dy", flat)
                dx = product(row, w_column, ctx.dtypes[0]).view(ctx.shape)
            if x_column is not None:
                shared = row is not None and _shared(plug.dgrad, plug.wgrad, "dy")
                column = row if shared and row is not None else _seen(plug, "wgrad", "dy", flat)
                dw = product(column.turned(), x_column, ctx.dtypes[1])
            db = flat.float().sum(0).to(grad.dtype) if ctx.has_bias else None
        if ctx.first:
            plug.emulation.end_backward()
        return dx, dw, db, None, None, None, None


def _for_wgrad(plug: Plug, row: Operand, x: torch.Tensor, *, replay: bool) -> Operand:
    """x for wgrad: fprop's operand if it can be reused, the dequantized one, or a separate copy."""
    if plug.dequantized:
        return _dequantized(row, x.dtype)
    return row if _shared(plug.fprop, plug.wgrad, "x") else _seen(plug, "wgrad", "x", x, replay=replay)


def _dequantized(operand: Operand, compute: torch.dtype) -> Operand:
    """The operand as an ordinary tensor of the compute dtype (NVTE_BACKWARD_OVERRIDE=dequantized: pytorch/module/linear.py)."""
    return Operand(operand.dequantized().to(compute))


def _shared(first: Quantizer | None, second: Quantizer | None, side: Side) -> bool:
    """Whether two GEMMs can share an operand: they follow the same rule, and both copies are equal under it."""
    return first is second and (first is None or first.shares_copies(side))


def _seen(
    plug: Plug, gemm: Gemm, side: Side, x: torch.Tensor, *, replay: bool = False, wide: bool | None = None
) -> Operand:
    quantizer: Quantizer | None = getattr(plug, gemm)
    if quantizer is None:
        return Operand(x)
    operand = quantizer.operand(
        x, slot=plug.slot, gemm=gemm, side=side, first_microbatch=plug.first_microbatch, replay=replay, wide=wide
    )
    observer: Observer | None = plug.emulation.observer
    if observer is not None and not replay:
        observer.see(plug.slot, gemm, side, x, operand, quantizer)
    return operand


def _weights(plug: Plug, weight: torch.Tensor, compute: torch.dtype, *, column: bool) -> tuple[Operand, Operand | None]:
    """The weight's row copy and, if a dgrad follows, its column copy; made on the first micro-batch of a step."""
    if plug.first_microbatch or plug.weight_row is None:
        plug.weight_row = _weight(plug, "fprop", weight, compute)
        plug.weight_column = None
    if column and plug.weight_column is None:
        if plug.dequantized:
            plug.weight_column = _dequantized(plug.weight_row, compute)
        elif _shared(plug.fprop, plug.dgrad, "w"):
            plug.weight_column = plug.weight_row
        else:
            plug.weight_column = _weight(plug, "dgrad", weight, compute)
    plug.first_microbatch = False
    return plug.weight_row, plug.weight_column if column else None


def _weight(plug: Plug, gemm: Gemm, weight: torch.Tensor, compute: torch.dtype) -> Operand:
    # a GEMM that is not quantized takes the weight in the compute dtype
    high = weight.detach() if getattr(plug, gemm) is not None else weight.detach().to(compute)
    return _seen(plug, gemm, "w", high, wide=compute is torch.float32)


def _save(ctx: Any, *operands: Operand | None) -> None:
    ctx.save_for_backward(*(getattr(one, part, None) for one in operands for part in ("values", "factor")))
    ctx.divisors = [1.0 if operand is None else operand.divisor for operand in operands]


def _saved(ctx: Any) -> tuple[Operand | None, Operand | None]:
    tensors = ctx.saved_tensors
    saved = zip(tensors[::2], tensors[1::2], ctx.divisors, strict=True)
    x, weight = (None if one[0] is None else Operand(*one) for one in saved)
    return x, weight
