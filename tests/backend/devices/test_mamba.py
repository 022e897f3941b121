"""Mamba-2's scan, convolution and gated norm against the recurrence of the paper (arXiv 2405.21060, eq. 1 and section 6), token by token in float64."""

import math

import pytest
import torch

from mpbridge.backend.devices import mamba
from mpbridge.common.errors import Refused


def recurrence(x, dt, A, B, C, D, z, dt_bias, state=None):
    """h_t = exp(dt_t A) h_(t-1) + dt_t x_t B_t^T; y_t = h_t C_t + D x_t, gated by silu(z), one token after the other."""
    batch, tokens, heads, channels = x.shape
    h = torch.zeros(batch, heads, channels, B.shape[3], dtype=x.dtype) if state is None else state
    step = torch.log1p(torch.exp(dt + dt_bias))
    out = []
    for t in range(tokens):
        rows = []
        for head in range(heads):
            group = head // (heads // B.shape[2])
            a, d = torch.exp(step[:, t, head] * A[head]), step[:, t, head]
            h_head = a[:, None, None] * h[:, head] + d[:, None, None] * x[:, t, head, :, None] * B[:, t, group, None, :]
            rows.append((h_head, (h_head * C[:, t, group, None, :]).sum(-1) + D[head] * x[:, t, head]))
        h = torch.stack([one for one, _ in rows], 1)
        out.append(torch.stack([y for _, y in rows], 1))
    y = torch.stack(out, 1)
    return y * z * torch.sigmoid(z), y, h


def drawn(tokens=13, heads=4, channels=3, groups=2, states=5, kind=torch.float32, seed=0):
    draw = torch.Generator().manual_seed(seed)
    x, z = (torch.randn(2, tokens, heads, channels, generator=draw).to(kind) for _ in range(2))
    B, C = (torch.randn(2, tokens, groups, states, generator=draw).to(kind) for _ in range(2))
    dt = torch.randn(2, tokens, heads, generator=draw).to(kind)
    A = -torch.exp(torch.rand(heads, generator=draw))
    D, bias = torch.randn(heads, generator=draw), torch.randn(heads, generator=draw) - 2
    return x, dt, A, B, C, D, z, bias


def played(x, dt, A, B, C, D, z, bias, chunk=4):
    return mamba.scan(x, dt, A, B, C, chunk, D=D, z=z, dt_bias=bias, dt_softplus=True)


@pytest.mark.parametrize(
    ("tokens", "chunk", "heads", "groups"), [(13, 4, 4, 2), (16, 4, 4, 4), (5, 256, 2, 1), (1, 4, 2, 2), (12, 1, 3, 3)]
)
def test_the_scan_is_the_papers_recurrence(tokens, chunk, heads, groups):
    given = drawn(tokens, heads=heads, groups=groups)
    found, wanted = played(*given, chunk=chunk), recurrence(*[one.double() for one in given])
    for one, truth in zip(found, wanted, strict=True):
        # sums of some dozens of products in FP32
        torch.testing.assert_close(one.double(), truth, rtol=2e-5, atol=2e-5)


def test_its_gradients_are_the_recurrences():
    given = drawn()
    kinds = (torch.float32, torch.float64)
    ours, truth = ([one.to(kind, copy=True).requires_grad_() for one in given] for kind in kinds)
    weights = torch.linspace(-1, 1, given[0].numel(), dtype=torch.float64).view_as(given[0])
    (played(*ours)[0] * weights.float()).sum().backward()
    (recurrence(*truth)[0] * weights).sum().backward()
    for one, wanted in zip(ours, truth, strict=True):
        torch.testing.assert_close(one.grad.double(), wanted.grad, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
def test_in_16_bits_the_step_and_the_state_stay_fp32(kind):
    """The result differs from the recurrence on the same rounded inputs by roundings of factors and of the result, not of decays: those accumulate over tokens."""
    given = drawn(tokens=256, seed=3, kind=kind)
    # slow decay: 256 tokens are remembered, so a step or a state in 16 bits would be off by percents
    A = given[2] * 1e-3
    found = played(*given[:2], A, *given[3:], chunk=32)
    wanted = recurrence(*(one.double() for one in (*given[:2], A, *given[3:])))
    unit = torch.finfo(kind).eps
    assert found[0].dtype is kind
    assert found[2].dtype is torch.float32
    error = (found[1].double() - wanted[1]).norm() / wanted[1].norm()
    # three independent roundings (factor, state, result), each at most half a unit, of random sign
    assert error < 1.5 * unit
    assert (found[2].double() - wanted[2]).norm() / wanted[2].norm() < unit


def test_a_scan_continues_from_a_state():
    given = drawn(tokens=12)
    whole = played(*given)
    first, rest = ([one[:, :6] if one.dim() > 1 else one for one in given], [one[:, 6:] if one.dim() > 1 else one for one in given])  # fmt: skip
    state = played(*first)[2]
    x, dt, A, B, C, D, z, bias = rest
    how = {"initial_states": state, "dt_softplus": True, "return_final_states": True}
    out = mamba.mamba_chunk_scan_combined(x, dt, A, B, C, 4, D, z, bias, **how)
    torch.testing.assert_close(out[0], whole[0][:, 6:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out[1], whole[2], rtol=1e-5, atol=1e-5)


def test_the_convolution_is_causal_and_per_channel():
    x, weight, bias = torch.randn(2, 6, 9), torch.randn(6, 4), torch.randn(6)
    wanted = torch.zeros(2, 6, 9, dtype=torch.float64)
    for t in range(9):
        for k in range(4):
            if t - 3 + k >= 0:
                wanted[:, :, t] += weight[:, k].double() * x[:, :, t - 3 + k].double()
    wanted += bias.double()[:, None]
    torch.testing.assert_close(mamba.causal_conv1d_fn(x, weight, bias).double(), wanted, rtol=1e-5, atol=1e-5)
    gated = mamba.causal_conv1d_fn(x, weight, bias, activation="silu").double()
    torch.testing.assert_close(gated, wanted * torch.sigmoid(wanted), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("before", [False, True])
def test_the_norm_is_by_groups_and_gated(before):
    norm = mamba.RMSNorm(8, eps=1e-5, group_size=4, norm_before_gate=before)
    norm.weight.data = torch.randn(8)
    x, z = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8)
    gate = (z * torch.sigmoid(z)).double()
    wide = x.detach().double() * (1.0 if before else gate)
    wanted = torch.cat([part / (part.square().mean(-1, keepdim=True) + 1e-5).sqrt() for part in wide.split(4, -1)], -1)
    wanted = wanted * norm.weight.detach().double() * (gate if before else 1.0)
    out = norm(x, z)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
    out.sum().backward()
    assert x.grad is not None
    assert norm.weight.grad is not None


def test_the_training_kernel_is_convolution_scan_and_gate():
    heads, channels, groups, states, tokens = 4, 3, 2, 5, 11
    x, dt, A, B, C, D, z, bias = drawn(tokens, heads, channels, groups, states)
    weight, offset = torch.randn(heads * channels + 2 * groups * states, 4) * 0.3, torch.randn(heads * channels + 2 * groups * states)  # fmt: skip
    mixed = torch.cat([x.flatten(2), B.flatten(2), C.flatten(2)], -1)
    projection = torch.cat([z.flatten(2), mixed, dt], -1).requires_grad_()
    how = {"headdim": channels, "ngroups": groups, "norm_before_gate": False}
    out = mamba.mamba_split_conv1d_scan_combined(projection, weight, offset, bias, A, D, 4, **how)
    convolved = mamba.causal_conv1d_fn(mixed.transpose(1, 2), weight, offset, activation="silu").transpose(1, 2)
    cx, cB, cC = convolved.double().split([heads * channels, groups * states, groups * states], -1)
    given = cx.unflatten(2, (heads, channels)), dt.double(), A.double(), cB.unflatten(2, (groups, states)), cC.unflatten(2, (groups, states))  # fmt: skip
    wanted = recurrence(*given, D.double(), z.double(), bias.double())[0].flatten(2)
    torch.testing.assert_close(out.double(), wanted, rtol=2e-5, atol=2e-5)
    out.square().sum().backward()
    assert math.isfinite(float(projection.grad.abs().sum()))


def test_what_is_not_followed_is_refused():
    x, dt, A, B, C, *_ = drawn()
    with pytest.raises(Refused, match="cu_seqlens=Tensor"):
        mamba.mamba_chunk_scan_combined(x, dt, A, B, C, 4, cu_seqlens=torch.tensor([0, 13]))
