"""Operations in one pass: against FP64, against torch's and megatron-core's composites, and that a model uses them."""

import contextlib
import functools
import inspect
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)
from torch.utils.flop_counter import FlopCounterMode

from mpbridge.backend.devices.fused import (
    BlockedAttention,
    RootMeanSquare,
    Rotary,
    SwiGLU,
    with_rotary,
    with_swiglu,
)
from mpbridge.backend.models import local_spec
from mpbridge.backend.models.local_spec import RMSNorm

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


def both(ours: Any, theirs: Any, *inputs: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(Ours, theirs) of the output and of each input's gradient, for one random output gradient."""
    found = []
    for function in (ours, theirs):
        leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
        out = function(*leaves)
        torch.manual_seed(1)
        found.append([out.detach(), *torch.autograd.grad(out, leaves, torch.randn(out.shape).to(out.dtype))])
    return list(zip(*found, strict=True))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("shape", [(40, 3, 192), (5, 2, 4, 64), (3, 1, 70_001), (1, 1, 8), (8,)], ids=str)
def test_rms_norm_within_the_error_of_fp32_sums_and_one_rounding(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    width, rows = shape[-1], torch.Size(shape[:-1]).numel()
    x, weight, grad = (torch.randn(*size).to(dtype) for size in (shape, (width,), shape))
    one, two = x.clone().requires_grad_(), weight.clone().requires_grad_()
    out = RootMeanSquare.apply(one, two, 1e-5)  # type: ignore[no-untyped-call]
    out.backward(grad)
    assert one.grad is not None
    assert two.grad is not None
    a, w, g = (tensor.double() for tensor in (x, weight, grad))
    r = (a.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    first, second = g * w * r, a * r**3 * (g * w * a).mean(-1, keepdim=True)
    # each FP32 sum of n numbers errs by at most n units of the sum of their absolute values, and some ten more operations by one each
    unit = 2.0**-24
    amplified = first.abs() + a.abs() * r**3 * (g * w * a).abs().mean(-1, keepdim=True)
    over_rows = (g * a * r).abs().reshape(-1, width).sum(0)
    for mine, exact, sums in (
        (out, a * r * w, (width + 10) * unit * (a * r * w).abs()),
        (one.grad, first - second, (width + 10) * unit * amplified),
        (two.grad, (g * a * r).reshape(-1, width).sum(0), (rows + width + 10) * unit * over_rows),
    ):
        # FP16 has a smallest step
        least = 2.0**-25 if dtype is torch.float16 else 0.0
        assert bool(((mine.double() - exact).abs() <= 1.01 * ROUNDING[dtype] * exact.abs() + sums + least).all())


OLDER = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


@pytest.mark.skipif(OLDER, reason="the composites of older releases were not compared")
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("shape", [(40, 3, 192), (5, 2, 4, 64), (0, 2, 8), (3, 1, 70_001)], ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_rms_norm_beside_a_residual_is_torchs_to_the_bit(
    shape: tuple[int, ...], dtype: torch.dtype, threads: int, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(functools.partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)

    def ours(x: torch.Tensor, weight: torch.Tensor) -> Any:
        # the residual stream reads x too; a hook may write into what a module returned
        h = x * 1
        return h + RootMeanSquare.apply(h, weight, 1e-5).mul_(2)  # type: ignore[no-untyped-call]

    def torchs(x: torch.Tensor, weight: torch.Tensor) -> Any:
        h = x * 1
        return h + F.rms_norm(h, [shape[-1]], weight, 1e-5).mul_(2)

    for mine, theirs in both(ours, torchs, x, weight):
        assert torch.equal(mine, theirs)


def test_rms_norm_does_not_depend_on_the_process_defaults_and_leaves_frozen_weights_alone() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(4, 2, 8).bfloat16(), torch.ones(8).bfloat16()
    expected = RootMeanSquare.apply(x, weight, 1e-5)  # type: ignore[no-untyped-call]
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            for needs in ((True, False), (False, True)):
                one, two = x.clone().requires_grad_(needs[0]), weight.clone().requires_grad_(needs[1])
                out = RootMeanSquare.apply(one, two, 1e-5)  # type: ignore[no-untyped-call]
                assert torch.equal(out, expected)
                out.sum().backward()
                assert (one.grad is not None, two.grad is not None) == needs
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_torch_would_compute_otherwise_is_left_to_it() -> None:
    class Own(torch.Tensor):
        pass

    taken, weight = torch.zeros(2, 8, dtype=torch.bfloat16), torch.ones(8, dtype=torch.bfloat16)
    assert RootMeanSquare.takes(taken, weight, 1e-5)
    assert not RootMeanSquare.takes(taken, weight, None)
    for other in (taken.float(), taken.to("meta"), taken.as_subclass(Own), taken[:, :1]):
        assert not RootMeanSquare.takes(other, weight.to(other), 1e-5)
    assert not RootMeanSquare.takes(taken[:, :0], weight[:0], 1e-5)
    # torch.func looks into what it transforms
    norm = RMSNorm(8, eps=1e-5).bfloat16()
    assert torch.equal(torch.vmap(norm)(taken), norm(taken))


def test_angles_that_change_are_computed_again_and_sizes_that_do_not_fit_are_megatron_cores_error() -> None:
    from megatron.core.models.common.embeddings import rope_utils

    original = rope_utils._apply_rotary_pos_emb_bshd
    ours, t = with_rotary(original), torch.randn(4, 2, 3, 8)

    def change(angles: torch.Tensor) -> None:
        for step in (
            lambda: None,
            lambda: angles.mul_(2),
            lambda: angles.data.mul_(2),
            lambda: setattr(angles, "data", angles[:1] * 3),
            lambda: setattr(angles, "data", angles.double()),
        ):
            step()
            assert torch.equal(ours(t, angles), original(t, angles))

    change(angles := torch.randn(4, 1, 1, 4).repeat(1, 1, 1, 2))
    with torch.inference_mode():
        change(torch.randn(4, 1, 1, 4).repeat(1, 1, 1, 2))
    assert not vars(angles)
    with pytest.raises(RuntimeError, match="match"):
        ours(t[:1], torch.randn(4, 1, 1, 8))
    assert ours(torch.randn(4, 2, 3, 5), torch.randn(4, 1, 1, 4)).shape[-1] == 5
    angles = torch.randn(2, 1, 4).repeat(1, 1, 2)
    assert torch.equal(torch.vmap(lambda t: ours(t, angles))(t), original(t, angles[None]))


@pytest.mark.parametrize("linear", [False, True], ids=["squared", "linear"])
def test_a_second_derivative_is_refused_also_where_the_incoming_gradient_has_none(linear: bool) -> None:
    q, x, w = (torch.randn(size, requires_grad=True) for size in ((5, 1, 2, 4), (3, 8), (8,)))
    halves = x.bfloat16(), w.bfloat16()
    for out in (BlockedAttention.apply(q, q * 2, q, 0.5), RootMeanSquare.apply(*halves, 1e-5), SwiGLU.apply(x)):  # type: ignore[no-untyped-call]
        with pytest.raises(RuntimeError, match="create_graph=True"):
            torch.autograd.grad(
                (out if linear else out.square()).sum(), (q, x, w), create_graph=True, allow_unused=True
            )


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own decompositions
def test_forward_mode_differentiation_looks_into_a_norm() -> None:
    norm, x = RMSNorm(8, eps=1e-5).bfloat16(), torch.randn(2, 8).bfloat16()
    with torch.autograd.forward_ad.dual_level():
        out = torch.autograd.forward_ad.unpack_dual(norm(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))))
    assert out.tangent is not None


@pytest.mark.parametrize("inside", [(True, False), (False, True), (True, True)], ids=["first", "again", "both"])
def test_a_layer_recomputed_under_another_dispatch_mode_saves_what_it_saved(inside: tuple[bool, bool]) -> None:
    from megatron.core.models.common.embeddings import rope_utils

    original = rope_utils._apply_rotary_pos_emb_bshd
    apply, angles = with_rotary(original), torch.randn(4, 1, 1, 4).repeat(1, 1, 1, 2)

    def recomputed(function: Any, context: Any) -> Any:
        def layer(t: torch.Tensor) -> Any:
            with FlopCounterMode(display=False) if inside[0] else contextlib.nullcontext():
                return checkpoint(lambda t: function(t, angles).sin(), t, use_reentrant=False, context_fn=context)

        return layer

    everything = functools.partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE)
    t = torch.randn(4, 2, 3, 8)
    for context in (noop_context_fn, everything):
        results = []
        for function in (apply, original):
            leaf = t.clone().requires_grad_()
            out = recomputed(function, context)(leaf)
            with FlopCounterMode(display=False) if inside[1] else contextlib.nullcontext():
                (grad,) = torch.autograd.grad(out.sum(), leaf)
            results.append((out, grad))
        for mine, theirs in zip(*results, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated")
def test_a_trace_keeps_the_angles_as_an_input() -> None:
    from megatron.core.models.common.embeddings import rope_utils

    apply = with_rotary(rope_utils._apply_rotary_pos_emb_bshd)
    t, *angles = torch.randn(4, 2, 3, 8), *(torch.randn(4, 1, 1, 4).repeat(1, 1, 1, 2) for _ in range(2))
    apply(t, angles[0])
    for traced in (torch.jit.trace(apply, (t, angles[0])), make_fx(lambda t, angles: apply(t, angles))(t, angles[0])):
        assert torch.equal(traced(t, angles[1]), apply(t, angles[1]))


def test_a_compiler_sees_megatron_cores_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.models.common.embeddings import rope_utils

    apply = with_rotary(rope_utils._apply_rotary_pos_emb_bshd)
    t, angles = torch.randn(4, 2, 3, 8, requires_grad=True), torch.randn(4, 1, 1, 4).repeat(1, 1, 1, 2)
    seen = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(len(graph.graph.nodes))
        return graph

    # the suite leaves the compiler off (tests/conftest.py)
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    with torch._dynamo.config.patch(disable=False):
        compiled = torch.compile(lambda t, angles: apply(t, angles), backend=backend, fullgraph=True)
        assert torch.equal(compiled(t, angles), apply(t, angles))
    assert seen


def test_a_compiler_keeps_the_refusal_of_second_derivatives(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(5, 1, 2, 4, requires_grad=True)
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    with torch._dynamo.config.patch(disable=False):
        attention = torch.compile(
            lambda q: BlockedAttention.apply(q * 3, q * 2, q * 1.5, 0.5), backend="eager", fullgraph=True
        )  # type: ignore[no-untyped-call]
        assert torch.autograd.grad(attention(q).sum(), q)[0].any()
        with pytest.raises(RuntimeError, match="create_graph=True"):
            torch.autograd.grad(attention(q).sum(), q, create_graph=True)


def test_gradients_are_those_of_finite_differences() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(5, 1, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    for scale in (0.5, 0.3):
        assert torch.autograd.gradcheck(lambda *three, scale=scale: BlockedAttention.apply(*three, scale), (q, k, v))
    assert torch.autograd.gradcheck(SwiGLU.apply, (torch.randn(3, 2, 6, dtype=torch.float64, requires_grad=True),))
    angles = torch.randn(5, 1, 1, 2, dtype=torch.float64)
    turn = angles.cos().repeat(1, 1, 1, 2), -angles.sin(), angles.sin()
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda t: Rotary.apply(t, *turn), (q,))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_scale_that_is_a_power_of_two_changes_nothing(dtype: torch.dtype) -> None:
    """The queries are scaled before the product: the scores are the same numbers."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(150, 2, 3, 16).to(dtype) for _ in range(3))

    def apart(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return BlockedAttention.apply(q * 0.25, k, v, 1.0)  # type: ignore[no-untyped-call]

    for mine, theirs in both(lambda *three: BlockedAttention.apply(*three, 0.25), apart, q, k, v):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("longest", [local_spec.LONGEST, 0], ids=["blocked", "flash"])
@pytest.mark.parametrize("scale", [-0.25, -0.3, 0.0])
def test_attention_takes_a_scale_that_is_not_positive(
    longest: int, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_spec, "LONGEST", longest)
    torch.manual_seed(0)
    attention = local_spec.CausalAttention(SimpleNamespace(attention_dropout=0.0), softmax_scale=scale)

    def composite(*three: torch.Tensor) -> Any:
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in three)
        with sdpa_kernel(SDPBackend.MATH):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return out.permute(2, 0, 1, 3).reshape(150, 2, -1)

    q, k, v = (torch.randn(150, 2, 3, 16) for _ in range(3))
    for mine, theirs in both(lambda *three: attention(*three, None), composite, q, k, v):
        # as with a positive scale: FP32 sums in another order
        assert (mine - theirs).abs().max() <= 2e-6 * theirs.abs().max().clamp(min=1.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("options", "width"),
    [({}, 16), ({"rotary_interleaved": True}, 16), ({}, 24), ({"mscale": 0.5}, 16)],
    ids=["plain", "interleaved", "partial", "scaled"],
)
def test_rotary_embedding_is_megatron_cores(options: dict[str, Any], width: int, dtype: torch.dtype) -> None:
    from megatron.core.models.common.embeddings import rope_utils

    torch.manual_seed(0)
    angles = torch.randn(9, 1, 1, 8).repeat(1, 1, 1, 2)
    original = rope_utils._apply_rotary_pos_emb_bshd
    t = torch.randn(9, 2, 3, 2 * width).to(dtype)
    ours = with_rotary(original)
    # the second time from what the first one kept, in another dtype too
    ours(torch.randn(9, 2, 3, 16), angles)
    pairs = both(
        lambda t: ours(t[..., :width], angles, **options), lambda t: original(t[..., :width], angles, **options), t
    )
    for mine, theirs in pairs:
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "fields",
    [{}, {"add_bias_linear": True}, {"glu_linear_offset": 1.0}, {"activation_func_clamp_value": 0.5, "num_moe_experts": 2}, {"activation_func": F.gelu}],
    ids=str,
)  # fmt: skip
def test_an_mlp_is_megatron_cores(fields: dict[str, Any], dtype: torch.dtype) -> None:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.mlp import MLP

    given = {
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "bias_activation_fusion": False,
    } | fields
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, **given)

    class Linear(torch.nn.Module):
        def __init__(self, rows: int, columns: int) -> None:
            super().__init__()
            self.weight = torch.randn(rows, columns).to(dtype)

        def forward(self, x: torch.Tensor) -> Any:
            return F.linear(x, self.weight), torch.ones(len(self.weight)).to(dtype) if config.add_bias_linear else None

    mlp = MLP.__new__(MLP)
    torch.nn.Module.__init__(mlp)
    torch.manual_seed(0)
    mlp.config, mlp.activation_func = config, config.activation_func
    mlp.linear_fc1, mlp.linear_fc2 = Linear(64, 8), Linear(8, 32)
    original = MLP.forward
    ours = with_swiglu(original)
    x, scales = torch.randn(5, 2, 8).to(dtype), torch.rand(5, 2)
    for extra in ({}, {"per_token_scale": scales}):
        pairs = both(lambda x, e=extra: ours(mlp, x, **e)[0], lambda x, e=extra: original(mlp, x, **e)[0], x)
        for mine, theirs in pairs:
            assert torch.equal(mine, theirs)


def test_megatron_cores_mlp_reads_nothing_that_ours_does_not_know() -> None:
    from megatron.core.transformer.mlp import MLP

    fused_only = {"activation_func_fp8_input_store", "add_bias_linear", "cpu_offloading", "cpu_offloading_activations"}
    known = {"activation_func", "activation_func_clamp_value", "bias_activation_fusion", "gated_linear_unit", "glu_linear_offset", "linear_fc1", "linear_fc2", "use_te_activation_func"}  # fmt: skip
    assert set(re.findall(r"self\.(?:config\.)?(\w+)", inspect.getsource(MLP.forward))) <= known | fused_only
