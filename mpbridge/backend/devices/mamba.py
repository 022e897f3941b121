"""`mamba_ssm` and `causal_conv1d` on a CPU, in plain torch: modules with the names that megatron-core's Mamba layers import."""

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from mpbridge.common.errors import Refused

SSM, CONVOLUTION = "2.3.1", "1.6.1"
"""The releases of mamba_ssm and causal_conv1d whose rounding this follows."""


def scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    *,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    initial: torch.Tensor | None = None,
    limit: tuple[float, float] = (0.0, float("inf")),
    state_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(result times silu(z), result, last state [batch, heads, channels, states] in FP32) of h' = exp(dt A) h + dt x B^T, y = h C + D x.

    x, z: [batch, tokens, heads, channels]; dt: [batch, tokens, heads]; A, D, dt_bias: [heads], D also [heads, channels]; B, C: [batch, tokens, groups, states].
    state_dtype: of the states between chunks; None: C's.
    """
    tokens, heads = x.shape[1:3]
    kind, size = x.dtype, min(chunk_size, tokens)
    steps = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    steps = (F.softplus(steps) if dt_softplus else steps).clamp(*limit)
    each = heads // B.shape[2]

    def chunks(tensor: torch.Tensor) -> torch.Tensor:
        """[batch, heads, chunks, tokens of a chunk, ...]; tokens that are missing in the last chunk are zero: they move no state."""
        padded = F.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, -tokens % size))
        return torch.unflatten(padded, 1, (-1, size)).movedim(3, 1)

    xs, bs, cs = chunks(x), chunks(B).repeat_interleave(each, 1), chunks(C).repeat_interleave(each, 1)
    dts = chunks(steps)
    sums = torch.cumsum(dts * A.float().view(-1, 1, 1), dim=-1)
    last = sums[..., -1:]
    # what each chunk adds to the state at its end: B, weighted, meets x in x's dtype
    weighted = (bs.float() * (torch.exp(last - sums) * dts).unsqueeze(-1)).to(kind)
    added = xs.float().transpose(-1, -2) @ weighted.float()
    states, state = _passed(added, last, initial)
    stored = states.to(state_dtype or C.dtype).to(C.dtype)
    # inside a chunk: token m acts on token l >= m
    future = torch.ones(size, size, dtype=torch.bool, device=x.device).triu(1)
    decays = torch.exp((sums.unsqueeze(-1) - sums.unsqueeze(-2)).masked_fill(future, float("-inf")))
    scores = cs.float() @ bs.float().transpose(-1, -2) * decays * dts.unsqueeze(-2)
    out = scores.to(kind).float() @ xs.float()
    out = out + (cs.float() @ stored.float().transpose(-1, -2)) * torch.exp(sums).unsqueeze(-1)
    out = out.movedim(1, 3).flatten(1, 2)[:, :tokens]
    if D is not None:
        out = out + x.float() * (D.float() if D.dim() == 2 else D.float().unsqueeze(-1))
    gated = out if z is None else out * F.silu(z.float())
    return gated.to(kind), out.to(kind), state


def _passed(added: torch.Tensor, last: torch.Tensor, initial: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(the state before each chunk, the state after the last one), in FP32."""
    state = torch.zeros_like(added[:, :, 0]) if initial is None else initial.float()
    before = []
    for index in range(added.shape[2]):
        before.append(state)
        state = state * torch.exp(last[:, :, index]).unsqueeze(-1) + added[:, :, index]
    return torch.stack(before, 2), state


def causal_conv1d_fn(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, activation: str | None = None, **more: Any
) -> torch.Tensor:  # fmt: skip
    """[batch, channels, tokens]: each channel convolved with its `weight` [channels, width] over earlier tokens, in FP32, rounded once. Raises Refused for packed sequences and states."""
    _only(**more)
    width = weight.shape[-1]
    wide = None if bias is None else bias.float()
    out = F.conv1d(x.float(), weight.float().unsqueeze(1), wide, padding=width - 1, groups=weight.shape[0])
    out = out[..., : x.shape[-1]]
    return (F.silu(out) if activation in ("silu", "swish") else out).to(x.dtype)


def mamba_chunk_scan_combined(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    *,
    initial_states: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    state_dtype: torch.dtype | None = None,
    **more: Any,
) -> Any:
    """`scan`'s first result, with its last if the final states are asked for. Raises Refused for packed sequences."""
    _only(**more)
    out, _, state = scan(
        x, dt, A, B, C, chunk_size, D=D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus, initial=initial_states, limit=dt_limit, state_dtype=state_dtype
    )  # fmt: skip
    return (out, state) if return_final_states else out


def mamba_split_conv1d_scan_combined(
    zxbcdt: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor | None,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    chunk_size: int,
    *,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    activation: str = "silu",
    rmsnorm_eps: float = 1e-6,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    state_dtype: torch.dtype | None = None,
    **more: Any,
) -> torch.Tensor:
    """[batch, tokens, heads x channels] from a projection [batch, tokens, z x B C dt]: convolution, scan and gate. Raises Refused for what megatron-core does not use in training."""
    _only(**more)
    channels = headdim if D.dim() == 1 else D.shape[1]
    rest = (chunk_size, activation, channels, ngroups, dt_limit, state_dtype)
    out: torch.Tensor = _Recomputed.apply(_split, rest, zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D)  # type: ignore[no-untyped-call]
    return out


def _split(
    zxbcdt: torch.Tensor, weight: torch.Tensor, bias: Any, dt_bias: torch.Tensor, A: torch.Tensor, D: torch.Tensor, rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(gated result, result before the gate)."""
    chunk, activation, channels, groups, limit, state_dtype = rest
    heads = D.shape[0]
    inner = heads * channels
    states = (weight.shape[0] - inner) // groups // 2
    z, mixed, dt = torch.split(zxbcdt, [inner, inner + 2 * groups * states, heads], dim=-1)
    mixed = causal_conv1d_fn(mixed.transpose(1, 2), weight, bias, activation=activation).transpose(1, 2)
    x, B, C = torch.split(mixed, [inner, groups * states, groups * states], dim=-1)
    out, ungated, _ = scan(
        torch.unflatten(x, 2, (heads, channels)), dt, A, torch.unflatten(B, 2, (groups, states)), torch.unflatten(C, 2, (groups, states)), chunk,
        D=D, z=torch.unflatten(z, 2, (heads, channels)), dt_bias=dt_bias, dt_softplus=True, limit=limit, state_dtype=state_dtype,
    )  # fmt: skip
    return out.flatten(2), ungated


class _Recomputed(torch.autograd.Function):
    """The first result of function(*inputs, rest). Keeps for the backward pass what the kernel keeps, and computes the rest again."""

    @staticmethod
    def forward(ctx: Any, function: Any, rest: Any, *inputs: Any) -> Any:
        out, kept = function(*inputs, rest)
        ctx.save_for_backward(*inputs, kept)
        ctx.function, ctx.rest = function, rest
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        *inputs, _ = ctx.saved_tensors
        with torch.enable_grad():
            own = [None if one is None else one.detach().requires_grad_() for one in inputs]
            out = ctx.function(*own, ctx.rest)[0]
        found = iter(torch.autograd.grad(out, [one for one in own if one is not None], gradient))
        return (None, None, *(None if one is None else next(found) for one in own))


def _gated(x: torch.Tensor, weight: torch.Tensor, z: Any, rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(x normalised by groups, gated before or after; the reciprocal root of each group's mean square)."""
    eps, width, before = rest
    wide = x.float()
    if z is not None and not before:
        wide = wide * F.silu(z.float())
    groups = torch.unflatten(wide, -1, (-1, width or wide.shape[-1]))
    root = torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
    wide = (groups * root).flatten(-2) * weight.float()
    if z is not None and before:
        wide = wide * F.silu(z.float())
    return wide.to(x.dtype), root


class RMSNorm(torch.nn.Module):
    """mamba_ssm's gated RMSNorm by groups of `group_size` channels: FP32 inside, rounded once to the input's dtype."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        **made: Any,
    ) -> None:
        super().__init__()
        self.eps, self.group_size, self.norm_before_gate = eps, group_size, norm_before_gate
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, **made))
        self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        """x normalised, multiplied by silu(z) before (norm_before_gate=False) or after."""
        rest = (self.eps, self.group_size, self.norm_before_gate)
        out: torch.Tensor = _Recomputed.apply(_gated, rest, x, self.weight, z)  # type: ignore[no-untyped-call]
        return out


def _only(**given: Any) -> None:
    """Raises Refused for arguments that the functions here do not follow."""
    there = {name: value for name, value in given.items() if value is not None and value is not False}
    asked = [f"{name}={type(value).__name__}" for name, value in there.items()]
    if asked:
        raise Refused(
            f"{', '.join(asked)}: on a CPU Mamba's kernels are followed for training on whole sequences alone: leave packed sequences, initial states and "
            "fused projections off, or use a GPU"
        )  # fmt: skip


_IN_CORE = "megatron.core.inference.contexts.attention_context.triton.tensor_ops"
"""Kernels for inference, imported by megatron-core's mixer whether or not Triton is installed."""


def _absent(name: str) -> Any:
    def refuse(*given: Any, **named: Any) -> None:
        whole = "on a CPU Mamba layers are trained and evaluated on whole sequences"
        raise Refused(f"{name} is a kernel for inference: {whole}")

    refuse.__name__ = name
    return refuse


def _named(*names: str) -> dict[str, Any]:
    return {name: globals().get(name) or _absent(name) for name in names}


_MEMBERS: dict[str, dict[str, Any]] = {
    "mamba_ssm": {"__version__": SSM},
    "mamba_ssm.ops": {},
    "mamba_ssm.ops.triton": {},
    "mamba_ssm.ops.triton.layernorm_gated": _named("RMSNorm"),
    "mamba_ssm.ops.triton.ssd_combined": _named("mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined"),
    "causal_conv1d": {"__version__": CONVOLUTION, **_named("causal_conv1d_fn", "causal_conv1d_update")},
    "causal_conv1d.causal_conv1d_varlen": _named("causal_conv1d_varlen_states"),
}


@contextmanager
def mamba_on_cpu() -> Iterator[None]:
    """In the block `mamba_ssm` and `causal_conv1d` are importable and compute on the CPU; installed ones, which need CUDA, are hidden. Nests."""
    if getattr(sys.modules.get("mamba_ssm"), "mpbridge", False):
        yield
        return
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in _OWNED}
    made = {name: _module(name, members) for name, members in _MEMBERS.items()}
    if importlib.util.find_spec("triton") is None and _IN_CORE not in sys.modules:
        made[_IN_CORE] = _module(_IN_CORE, _named("tensor_get_slice_after", "tensor_masked_update", "tensor_merge"))
    sys.modules.update(made)
    try:
        yield
    finally:
        for name in made:
            sys.modules.pop(name, None)
        sys.modules.update(hidden)


_OWNED = ("mamba_ssm", "causal_conv1d")


def _module(name: str, members: dict[str, Any]) -> types.ModuleType:
    made: Any = types.ModuleType(name)
    made.__dict__.update(members)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    made.__path__, made.mpbridge = [], True
    return made  # type: ignore[no-any-return]
