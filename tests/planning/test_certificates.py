"""Closed forms against casts by torch: fixed numbers are those of the formula's terms, never of the code under test."""

from __future__ import annotations

import json
import math

import pytest
import torch

from mpbridge.backend.engines.optimizers import CpuFusedAdam
from mpbridge.common.formats import E4M3, E5M2, DType
from mpbridge.planning import closed_forms
from mpbridge.planning.certificates import Training, lost_line, optimizer_rows, sentence
from mpbridge.planning.closed_forms import clipping, second_pass
from mpbridge.precision.registry import get_mixed_precision_config
from mpbridge.precision.resolve import resolve

N = 400_000
TORCH = {DType.BF16: torch.bfloat16, DType.FP16: torch.float16}


def stored(x: torch.Tensor, kind: DType) -> torch.Tensor:
    """Rounded as the optimizer stores it; FP8: E4M3 with a scale that puts these values into its normal numbers."""
    if kind is DType.UINT8:
        return (x * 64).to(torch.float8_e4m3fn).float() / 64
    return x.to(TORCH[kind]).float()


def close(share: float, predicted: float, count: int = N) -> bool:
    """Within five standard errors of a share, and 0.3 % for what the formula leaves out (an update toward zero from a power of two)."""
    return abs(share - predicted) < 5 * math.sqrt(predicted * (1 - predicted) / count + 1e-9) + 3e-3


@pytest.mark.parametrize(("lr", "sigma"), [(1e-5, 0.027), (1e-4, 0.027), (3e-4, 0.02), (1e-3, 0.02), (1e-4, 0.005)])
@pytest.mark.parametrize("kind", [DType.BF16, DType.FP16])
def test_lost_updates_are_those_that_a_cast_loses(lr: float, sigma: float, kind: DType) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = stored(torch.randn(N, generator=generator) * sigma, kind)
    update = torch.randn(N, generator=generator) * lr * closed_forms.ratio_of(0.9)
    moved = stored(weights - update, kind)
    assert close(float((moved == weights).double().mean()), closed_forms.lost_updates(lr, sigma, kind))
    kept = float(((weights - moved).double() * update).sum() / update.double().square().sum())
    assert kept == pytest.approx(closed_forms.movement_kept(lr, sigma, kind), abs=0.02)


@pytest.mark.parametrize("step", [1, 12, 300])
def test_an_update_is_as_large_as_adams_under_noise(step: int) -> None:
    generator, m = torch.Generator().manual_seed(0), torch.zeros(20_000)
    for _ in range(step):
        m = 0.9 * m + 0.1 * torch.randn(20_000, generator=generator)
    assert float((m / (1 - 0.9**step)).std()) == pytest.approx(closed_forms.ratio_of(0.9, step), rel=0.02)
    assert closed_forms.ratio_of(0.9) == pytest.approx(closed_forms.ratio_of(0.9, 10_000))


def test_the_rate_at_which_half_is_lost_loses_half() -> None:
    rate = closed_forms.rate_for(0.5, 0.02, DType.BF16)
    assert closed_forms.lost_updates(rate, 0.02, DType.BF16) == pytest.approx(0.5, abs=1e-9)
    assert closed_forms.lost_updates(0.0, 0.02, DType.BF16) == 1.0


@pytest.mark.parametrize(
    ("kind", "beta2"),
    [(DType.BF16, 0.95), (DType.BF16, 0.99), (DType.BF16, 0.999), (DType.FP16, 0.999), (DType.UINT8, 0.95)],
)
def test_second_moments_stand_still_as_often_as_casts_say(kind: DType, beta2: float) -> None:
    generator = torch.Generator().manual_seed(0)
    v = stored(torch.exp2(torch.rand(N, generator=generator)), kind)
    gradient = torch.randn(N, generator=generator) * v.sqrt()
    after = stored(beta2 * v + (1 - beta2) * gradient.square(), kind)
    still, law = float((after == v).double().mean()), closed_forms.second_moment_stalls(kind, beta2)
    # E4M3's mantissas of a rounded uniform logarithm are few, so the mean over a continuous one is coarser
    assert abs(still - law) < 0.04 if kind is DType.UINT8 else close(still, law)


@pytest.mark.parametrize("kind", [DType.BF16, DType.FP16])
def test_first_moments_stand_still_as_often_as_casts_say(kind: DType) -> None:
    generator = torch.Generator().manual_seed(0)
    root = torch.exp2(torch.rand(N, generator=generator))
    m = stored(torch.randn(N, generator=generator) * closed_forms.ratio_of(0.9) * root, kind)
    after = stored(0.9 * m + 0.1 * torch.randn(N, generator=generator) * root, kind)
    still = float((after - m == 0).double().mean())
    assert still == pytest.approx(closed_forms.first_moment_stalls(kind, 0.9), rel=0.3, abs=3e-4)


@pytest.mark.parametrize("beta2", [0.95, 0.99, 0.998, 0.9981, 0.999])
def test_a_second_moment_falls_without_gradients_or_never(beta2: float) -> None:
    v = (1 + torch.arange(128) / 128).bfloat16().float()
    falls = bool(((beta2 * v).bfloat16().float() < v)[1:].any())  # below a power of two the spacing is halved
    assert closed_forms.second_moment_can_fall(DType.BF16, beta2) == falls


@pytest.mark.parametrize("count", [8, 64, 512])
def test_sums_of_micro_batches_lose_the_predicted_bits(count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros(20_000)
    exact = torch.zeros(20_000, dtype=torch.float64)
    for _ in range(count):
        gradient = torch.randn(20_000, generator=generator).bfloat16().float()
        total = (total + gradient).bfloat16().float()
        exact += gradient
    found = -0.5 * math.log2(float((total - exact).square().sum() / exact.square().sum()))
    assert found == pytest.approx(closed_forms.accumulation_bits(DType.BF16, count), abs=0.1)


def test_equal_gradients_stop_adding_up_at_the_predicted_number() -> None:
    total, one = torch.zeros((), dtype=torch.bfloat16), torch.ones((), dtype=torch.bfloat16)
    for _ in range(400):
        total = total + one
    assert float(total) == closed_forms.accumulation_stops_at(DType.BF16) == 256


@pytest.mark.parametrize("kind", [DType.UINT8, DType.FP16])
def test_a_second_moment_below_the_ratio_is_flushed_and_above_it_is_not(kind: DType) -> None:
    ratio = closed_forms.flush_ratio(kind)
    assert ratio is not None
    param = torch.nn.Parameter(torch.zeros(3))
    optimizer = CpuFusedAdam([param], exp_avg_sq_dtype=kind.torch())
    optimizer.set_scaled_state(param, "exp_avg_sq", torch.tensor([1.0, 1.001 * ratio, 0.999 * ratio]).pow(-2))
    kept = optimizer.get_unscaled_state(param, "exp_avg_sq")
    assert [bool(value) for value in kept] == [True, False, True]


def test_clipping_is_the_integral_over_scales_rounded_by_ml_dtypes() -> None:
    np = pytest.importorskip("numpy")
    types = pytest.importorskip("ml_dtypes")
    v = np.exp2((np.arange(1 << 18) + 0.5) / (1 << 18))
    ratio = v.astype(np.float32).astype(types.float8_e4m3fn).astype(np.float64) / v
    for position in (1.0, 0.98, 0.95):
        lost = np.maximum(0.0, 1 - ratio / position)
        law = clipping(E4M3, position)
        for found, wanted in (((lost > 0).mean(), law.share), (lost.mean(), law.mean), ((lost**2).mean(), law.square)):
            assert found == pytest.approx(wanted, rel=1e-3)
    assert lost.max() <= clipping(E4M3).worst == 1 / 17
    assert clipping(E4M3).share == pytest.approx(0.5113, abs=5e-5)  # sum of log2((m + 1/2)/m), m from 8 to 15


@pytest.mark.parametrize(("number", "kind"), [(E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)])
def test_the_second_pass_interval_is_where_the_maximum_is_rounded_to_half_of_the_largest(
    number: object, kind: torch.dtype
) -> None:
    law = second_pass(number)  # type: ignore[arg-type]
    peaks = torch.linspace(law.low, 2 * law.low, 4097)[1:]
    halves = peaks.to(kind).float() <= law.low
    inside = (peaks <= law.high) if law.closed else (peaks < law.high)
    assert torch.equal(halves, inside)


def trained(**more: float) -> Training:
    return Training(sigma=0.02, points=((0.0, 1e-4), (1.0, 1e-5)), beta2=0.999, **more)  # type: ignore[arg-type]


def test_only_a_run_that_loses_updates_is_told_so() -> None:
    full, mixed = (resolve(get_mixed_precision_config(name)).settled() for name in ("full_bf16", "bf16_mixed"))
    line = lost_line(full, trained())
    assert line is not None
    assert line.startswith("at lr 0.0001 75% of updates of BF16 weights")
    assert "97% at the schedule's lowest" in line
    assert lost_line(mixed, trained()) is None
    assert "second moment" in sentence(full, trained())
    assert sentence(mixed, trained()) == ""
    found = {(row.where, row.quantity) for row in optimizer_rows(full, trained(micro_batches=8, weight_decay=0.1))}
    wanted = {"weights": "weight decay lost", "gradient buffer": "sum bits", "second moment": "stands still"}
    assert found >= {(f"bf16 {where}", quantity) for where, quantity in wanted.items()}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--recipe", "full_bf16", "optimizer.lr=1e-4", "optimizer.min_lr=0"], "at lr 0.0001 75% of updates of BF16 weights"),
        (["mixed_precision.use_precision_aware_optimizer=true", "mixed_precision.exp_avg_sq_dtype=fp8"], "1/677 of its tensor's largest loses its FP8 second moment"),
        ([], ""),
    ],
)  # fmt: skip
def test_check_quotes_what_a_run_is_about_to_lose(arguments: list[str], said: str, cli) -> None:
    printed = cli("check --config gpt_tiny", *arguments, "--json")
    notes = [note for note in json.loads(printed)["notes"] if "mpbridge certify" in note]
    assert len(notes) == bool(said)
    assert all(said in note for note in notes)
