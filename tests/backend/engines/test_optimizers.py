"""CpuFusedAdam: Transformer Engine's arithmetic, torch's results, and a state that survives every storage format and every round trip."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpbridge.backend.engines import base
from mpbridge.backend.engines.optimizers import LARGEST, CpuFusedAdam
from mpbridge.common.errors import BadValue
from mpbridge.numerics.optimizers import join, split

ROLES = ("exp_avg", "exp_avg_sq", "master_param")
BF16, FP16, FP32, U8 = torch.bfloat16, torch.float16, torch.float32, torch.uint8
SHAPES = [(33, 7), (5,), (300, 500), (1,)]


def parameters(dtype: torch.dtype = FP32, shapes: Any = SHAPES) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter((torch.randn(shape, generator=generator) * 0.05).to(dtype)) for shape in shapes]


def gradient(shape: Any, generator: torch.Generator) -> torch.Tensor:
    """Of either sign, between 0.5 and 1.5: where a gradient is near eps, or cancels against weight decay, one rounding decides the update."""
    return (torch.rand(shape, generator=generator) + 0.5) * (torch.randint(0, 2, shape, generator=generator) * 2 - 1)


def train(
    optimizer: Any, params: list[torch.nn.Parameter], steps: int, *, decoupled: bool = False, seed: int = 1
) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for param in params:
            grad = gradient(param.shape, generator)
            if decoupled:
                param.decoupled_grad = grad  # type: ignore[attr-defined]
            else:
                param.grad = grad.to(param.dtype)
        optimizer.step()


def as_in_adam_cu(params: list[torch.Tensor], steps: int, *, decoupled: bool) -> None:
    """adam.cu's update under OPTIONS, written out in FP32, one operation after the other."""
    lr, betas, eps, decay = OPTIONS.values()
    one = torch.ones((), dtype=FP32)
    b1, b2 = (torch.tensor(b, dtype=FP32) for b in betas)
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in params]
    generator = torch.Generator().manual_seed(1)
    for step in range(1, steps + 1):
        c1, c2 = (torch.tensor(1.0 - float(b) ** step, dtype=FP32) for b in (b1, b2))
        for p, (m, v) in zip(params, moments, strict=True):
            g = gradient(p.shape, generator)
            g = g if decoupled else g + decay * p
            m.copy_(b1 * m + (one - b1) * g)
            v.copy_(b2 * v + (one - b2) * g * g)
            update = (m / c1) / ((v / c2).sqrt() + eps)
            p.sub_(lr * (update + decay * p if decoupled else update))


OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "l2"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fused kernel", "step by step"])
def test_the_update_is_transformer_engines(decoupled: bool, dtype: torch.dtype) -> None:
    ours, theirs = parameters(), [p.detach().clone() for p in parameters()]
    optimizer = CpuFusedAdam(ours, **OPTIONS, adam_w_mode=decoupled, exp_avg_dtype=dtype)
    # with BF16 moments the arithmetic is adam.cu's own order; only the first step's result is free of the storage's rounding
    steps = 50 if dtype is FP32 else 1
    train(optimizer, ours, steps)
    as_in_adam_cu(theirs, steps, decoupled=decoupled)
    for mine, other in zip(ours, theirs, strict=True):
        # weights stay below 1 and every step rounds them, 2**-24 at most, in another order
        assert other.abs().max() < 1.0
        torch.testing.assert_close(mine.detach(), other, rtol=0.0, atol=steps * 2.0**-24)


def test_agrees_with_torch_adamw_after_a_hundred_steps() -> None:
    ours, theirs = parameters(), parameters()
    train(CpuFusedAdam(ours, **OPTIONS), ours, 100)
    train(torch.optim.AdamW(theirs, **OPTIONS), theirs, 100)
    for mine, other in zip(ours, theirs, strict=True):
        # betas are rounded to FP32 here: (1 - beta2) differs by 2e-7 relative, which moves an update of lr by about that
        torch.testing.assert_close(mine.detach(), other.detach(), rtol=1e-5, atol=100 * 1e-2 * 1e-6)


@settings(max_examples=60, deadline=None)
@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40))
def test_a_parameter_and_its_remainder_are_every_bit_of_the_main_weight(bits: list[int]) -> None:
    weights = torch.tensor([b - 2**32 if b >= 2**31 else b for b in bits], dtype=torch.int32).view(FP32)
    high, low = torch.empty(len(bits), dtype=BF16), torch.empty(len(bits), dtype=torch.int16)
    split(weights, high, low)
    assert torch.equal(join(high, low).view(torch.int32), weights.view(torch.int32))
    finite = weights.isfinite() & (weights.abs() < 3.38e38)
    assert torch.all((high.float() - weights)[finite].abs() <= (weights[finite].abs() * 2.0**-8).clamp(min=2.0**-133))


def aware(params: list[torch.nn.Parameter], **states: Any) -> CpuFusedAdam:
    return CpuFusedAdam(params, **OPTIONS, master_weights=True, use_decoupled_grad=True, **states)


def test_remainders_are_the_same_training_as_fp32_main_weights() -> None:
    kept, remaindered = parameters(BF16), parameters(BF16)
    full, short = aware(kept), aware(remaindered, store_param_remainders=True)
    train(full, kept, 20, decoupled=True)
    train(short, remaindered, 20, decoupled=True)
    for one, other in zip(kept, remaindered, strict=True):
        state = short.state[other]
        assert state["master_param"].dtype is torch.int16
        # Two kernels (fused, and step by step): equal but for rounding. In 20 steps each rounds a weight 20 times, and each moment at most 3 * 20
        # times: an update (first moment over the root of the second, at most 1.14 by the Cauchy-Schwarz inequality, were nothing to cancel) is off
        # by 1.14 * (3 * 20 + 1.5 * 20 + 6) units, times the learning rate.
        unit = 2.0**-24
        torch.testing.assert_close(
            join(other.detach(), state["master_param"]),
            full.state[one]["master_param"],
            rtol=2 * 20 * unit,
            atol=2 * 20 * 1e-2 * 1.14 * (4.5 * 20 + 6) * unit,
        )


# options -> (dtypes of exp_avg, exp_avg_sq and the main weight; how far an update may be off)
STATES: dict[str, tuple[dict[str, Any], tuple[torch.dtype, ...], float]] = {
    "all fp32": ({}, (FP32, FP32, FP32), 0.0),
    "remainders": ({"store_param_remainders": True}, (FP32, FP32, torch.int16), 1e-6),
    "bf16 moments": ({"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16}, (BF16, BF16, FP32), 0.05),
    "fp8 and fp16 moments": ({"exp_avg_dtype": U8, "exp_avg_sq_dtype": FP16}, (U8, FP16, FP32), 0.2),
    "fp8 moments": ({"exp_avg_dtype": U8, "exp_avg_sq_dtype": U8}, (U8, U8, FP32), 0.6),
    "fp16 main weights": ({"master_weight_dtype": FP16}, (FP32, FP32, FP16), 0.05),
}


@pytest.mark.parametrize("kind", STATES)
def test_states_are_stored_in_their_dtype_and_train_alike(kind: str) -> None:
    options, dtypes, tolerance = STATES[kind]
    params, exact = parameters(BF16), parameters(BF16)
    optimizer, reference = aware(params, **options), aware(exact)
    train(optimizer, params, 10, decoupled=True)
    train(reference, exact, 10, decoupled=True)
    for param, other, first in zip(params, exact, parameters(BF16), strict=True):
        assert {name: value.dtype for name, value in optimizer.state[param].items()} == dict(
            zip(ROLES, dtypes, strict=True)
        )
        start = first.detach().float()
        moved = (param.detach().float() - start).norm()
        assert moved > 0
        apart = (param.detach().float() - other.detach().float()).norm()
        assert apart <= tolerance * moved + 2.0**-8 * start.norm() * (tolerance > 0)


@pytest.mark.parametrize("kind", STATES)
def test_a_saved_state_goes_on_to_the_bit(kind: str) -> None:
    params, options = parameters(BF16), STATES[kind][0]
    optimizer = aware(params, **options)
    train(optimizer, params, 3, decoupled=True)
    saved = copy.deepcopy(optimizer.state_dict())
    assert {value.dtype for state in saved["state"].values() for value in state.values()} == {FP32}
    copies = [torch.nn.Parameter(param.detach().clone()) for param in params]
    resumed = aware(copies, **options)
    resumed.load_state_dict(saved)
    train(optimizer, params, 3, decoupled=True, seed=2)
    train(resumed, copies, 3, decoupled=True, seed=2)
    for param, other in zip(params, copies, strict=True):
        assert torch.equal(param, other)
        for name in ROLES:
            assert torch.equal(optimizer.state[param][name], resumed.state[other][name]), name


@pytest.mark.parametrize("dtype", [FP16, U8, BF16], ids=str)
def test_a_scaled_state_keeps_its_relative_precision_whatever_its_size(dtype: torch.dtype) -> None:
    (param,) = parameters(shapes=[(64,)])
    optimizer = CpuFusedAdam([param], exp_avg_dtype=dtype)
    optimizer.initialize_state(param)
    assert torch.count_nonzero(optimizer.get_unscaled_state(param, "exp_avg")) == 0
    bits = {FP16: 11, U8: 4, BF16: 8}[dtype]
    for size in (1e-12, 1.0, 1e12):
        value = torch.linspace(0.5, 1.0, 64) * size
        optimizer.set_scaled_state(param, "exp_avg", value.clone())
        back = optimizer.get_unscaled_state(param, "exp_avg")
        assert back.dtype is FP32
        torch.testing.assert_close(back, value, rtol=2.0**-bits + 1e-6, atol=0.0)
        if dtype in LARGEST:
            assert optimizer._scales[param]["exp_avg"].item() == pytest.approx(size / LARGEST[dtype])


def test_fp16_and_fp8_states_of_nothing_do_not_raise() -> None:
    (param,) = parameters(shapes=[(0,)])
    optimizer = CpuFusedAdam([param], exp_avg_dtype=U8, exp_avg_sq_dtype=FP16)
    param.grad = torch.zeros(0)
    optimizer.step()


def test_gradients_are_read_and_dropped_where_they_are_kept() -> None:
    (param,) = parameters(BF16, shapes=[(4,)])
    optimizer = aware([param])
    param.grad = torch.full((4,), float("nan"), dtype=BF16)
    param.decoupled_grad = torch.ones(4)  # type: ignore[attr-defined]
    before = param.detach().clone()
    optimizer.step()
    assert param.isfinite().all()
    assert not torch.equal(param, before)
    optimizer.zero_grad(set_to_none=False)
    assert torch.count_nonzero(param.decoupled_grad) == 0  # type: ignore[attr-defined]
    optimizer.zero_grad()
    assert param.decoupled_grad is None  # type: ignore[attr-defined]


def test_the_step_is_a_groups_and_an_empty_group_has_none() -> None:
    (param,) = parameters(shapes=[(4,)])
    optimizer = CpuFusedAdam([{"params": [param]}, {"params": []}])
    train(optimizer, [param], 3)
    assert [group.get("step") for group in optimizer.param_groups] == [3, None]


@pytest.mark.parametrize(
    "options",
    [{"amsgrad": True}, {"capturable": True}, {"exp_avg_dtype": torch.float64}, {"master_weights": True, "master_weight_dtype": BF16}],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_what_fused_adam_does_not_have_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BadValue, match="FusedAdam has no"):
        CpuFusedAdam(parameters(), **options)


def test_a_state_of_the_wrong_dtype_is_refused() -> None:
    (param,) = parameters(BF16, shapes=[(4,)])
    optimizer = aware([param], store_param_remainders=True)
    optimizer.initialize_state(param)
    with pytest.raises(BadValue, match=r"is torch\.float64, expected torch\.float32 or torch\.int16"):
        optimizer.set_scaled_state(param, "master_param", torch.zeros(4, dtype=torch.float64))


def test_remainders_are_saved_as_the_main_weights_that_they_are() -> None:
    (param,) = parameters(BF16, shapes=[(64,)])
    optimizer = aware([param], store_param_remainders=True)
    optimizer.initialize_state(param)
    weights = torch.linspace(0.1, 0.2, 64)
    optimizer.set_scaled_state(param, "master_param", weights)
    assert torch.equal(param.detach(), weights.bfloat16())
    assert optimizer.state[param]["master_param"].dtype is torch.int16
    assert torch.equal(optimizer.get_unscaled_state(param, "master_param"), weights)


@pytest.mark.parametrize("kind", [float, torch.Tensor])
def test_gradients_are_clipped_by_megatron_cores_own_factor(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core 0.20 divides an FP32 tensor, 0.16.1 a Python number; in some 40 % of the cases the factors differ."""
    norms = torch.rand(200, generator=torch.Generator().manual_seed(3)) * 5 + 1
    differ = 0
    for norm in norms:
        factors = {torch.Tensor: 1.0 / (norm + 1.0e-6), float: torch.tensor(1.0 / (float(norm) + 1.0e-6))}
        differ += int(factors[torch.Tensor] != factors[float])
        grad, single = torch.ones(3), torch.ones(())
        monkeypatch.setattr(base, "gradients", lambda part, grads=(grad, single): grads)
        part = SimpleNamespace(config=SimpleNamespace(clip_grad=1.0))
        base.clip(part, norm.view(1) if kind is torch.Tensor else float(norm))
        assert torch.equal(grad, factors[kind].expand(3))
        assert torch.equal(single, factors[kind])
    assert differ > 20
