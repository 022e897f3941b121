"""Faults to plant in a hybrid: in the scan, in what its mixer holds, and in what trains it. The model's layers are Mamba, attention, an MLP."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from mpbridge.common.probe import installed
from mpbridge.common.versions import at_least
from tests.observe.audit.faults import given, gpt, inner, instead

CONVOLUTION = "conv1d_weight" if at_least(installed().megatron_core, "0.19") else "conv1d.weight"


def mixer(engine: Any) -> Any:
    return gpt(engine).decoder.layers[0].mixer


def _scan_by(engine: Any, scan: Any) -> None:
    """megatron-core's mixer calls `scan` (real, arguments) in place of its kernel."""
    from megatron.core.ssm import mamba_mixer

    real = mamba_mixer.mamba_split_conv1d_scan_combined
    engine.undo.append(SimpleNamespace(owner=mamba_mixer, name="mamba_split_conv1d_scan_combined", value=real))
    mamba_mixer.mamba_split_conv1d_scan_combined = lambda *given, **named: scan(real, *given, **named)


def scan_in_bf16(engine: Any) -> None:
    """The recurrence itself, token by token, with step sizes, decays and the state in BF16."""

    def scan(real: Any, projection: Any, weight: Any, bias: Any, dt_bias: Any, A: Any, D: Any, **named: Any) -> Any:
        from mpbridge.backend.devices.mamba import causal_conv1d_fn

        heads, width, groups = D.shape[0], named["headdim"], named["ngroups"]
        states = (weight.shape[0] - heads * width) // groups // 2
        z, mixed, dt = projection.split([heads * width, weight.shape[0], heads], -1)
        mixed = causal_conv1d_fn(mixed.transpose(1, 2), weight, bias, activation="silu").transpose(1, 2)
        x, B, C = mixed.split([heads * width, groups * states, groups * states], -1)
        x = x.unflatten(-1, (heads, width))
        B, C = (part.unflatten(-1, (groups, states)).repeat_interleave(heads // groups, 2) for part in (B, C))
        steps = torch.nn.functional.softplus(dt + dt_bias.to(dt.dtype))
        decays, state, out = torch.exp(steps * A.to(dt.dtype)), 0.0, []
        for t in range(x.shape[1]):
            added = (steps[:, t, :, None] * x[:, t]).unsqueeze(-1) * B[:, t].unsqueeze(2)
            state = state * decays[:, t, :, None, None] + added
            out.append((state * C[:, t].unsqueeze(2)).sum(-1) + D[:, None].to(x.dtype) * x[:, t])
        return torch.stack(out, 1).flatten(2) * torch.nn.functional.silu(z)

    _scan_by(engine, scan)


def decays_in_bf16(engine: Any) -> None:
    """A = -exp(A_log) in BF16."""
    from megatron.core.ssm import mamba_mixer

    def scan(
        real: Any, projection: Any, weight: Any, bias: Any, dt_bias: Any, A: Any, *given: Any, **named: Any
    ) -> Any:
        narrow = -torch.exp(mixer(engine).A_log.bfloat16())
        return real(projection, weight, bias, dt_bias, narrow.float(), *given, **named)

    assert mamba_mixer.HAVE_MAMBA_SSM
    _scan_by(engine, scan)


def steps_in_bf16(engine: Any) -> None:
    """Step sizes pass through a softplus in BF16 before they reach the kernel, which then adds nothing."""

    def scan(real: Any, projection: Any, weight: Any, bias: Any, dt_bias: Any, A: Any, D: Any, **named: Any) -> Any:
        heads = D.shape[0]
        step = torch.nn.functional.softplus(projection[..., -heads:] + dt_bias.to(projection.dtype))
        before = torch.log(torch.expm1(step.float())).to(projection.dtype)
        return real(torch.cat([projection[..., :-heads], before], -1), weight, bias, torch.zeros_like(dt_bias), A, D, **named)  # fmt: skip

    _scan_by(engine, scan)


def norm_in_bf16(engine: Any) -> None:
    norm = mixer(engine).norm

    def forward(x: torch.Tensor, z: Any = None) -> torch.Tensor:
        groups = x.unflatten(-1, (-1, norm.group_size))
        return (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + norm.eps)).flatten(-2) * norm.weight

    norm.forward = forward


@given
def cast(engine: Any, name: str, dtype: torch.dtype) -> None:
    parameter = mixer(engine).get_parameter(name)
    parameter.data = parameter.data.to(dtype)


@given
def no_longer_trained(engine: Any, name: str) -> None:
    """Its parameter (or its main weight) is taken out of the optimizer's groups."""
    parameter = mixer(engine).get_parameter(name)
    mine = {id(parameter), id(getattr(parameter, "main_param", None))}
    for group in inner(engine).param_groups:
        group["params"] = [one for one in group["params"] if id(one) not in mine]


def projection_unquantized(engine: Any) -> None:
    """The mixer's first projection multiplies its operands as they are."""
    linear = mixer(engine).in_proj
    linear.product = lambda plain, *given, **named: plain(*given, **named)


def projection_in_fp16(engine: Any) -> None:
    """The mixer's first projection multiplies in FP16 and returns BF16."""

    def forward(real: Any, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return real(input.half(), weight.half(), *args, **kwargs).to(input.dtype)

    instead(mixer(engine).in_proj, "_forward_impl", forward)
