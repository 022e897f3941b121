"""Expectations against every outcome, a second implementation in numpy, and Transformer Engine's definitions."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from mpbridge.cli.certify import table_of
from mpbridge.common.formats import E2M1, E4M3, E5M2, NumberFormat
from mpbridge.numerics.certificates import figures
from mpbridge.numerics.certificates.certificate import certificate
from mpbridge.numerics.certificates.expected import Operands, ms_eden, stochastic_e2m1
from mpbridge.numerics.certificates.figures import KINDS, Linear, bits, bounds, operand_figures, product
from mpbridge.numerics.codes import round_stochastic
from mpbridge.numerics.optimizers import newton_schulz
from mpbridge.planning.certificates import VARIANTS, Training
from mpbridge.planning.closed_forms import clipping, nvfp4_second_pass, relative_error, second_pass
from mpbridge.precision.policy import Quant
from mpbridge.precision.registry import get_mixed_precision_config
from mpbridge.precision.resolve import resolve
from mpbridge.training.certified import tensors_of

NVFP4 = Quant(format="e2m1", scaling="nvfp4")
TRAINING = Training(sigma=0.02, points=((0.0, 1e-3),))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_stochastic_rounding_has_the_moments_of_its_256_outcomes() -> None:
    scaled = torch.cat([torch.linspace(-6.5, 6.5, 2081), torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])])
    bytes_ = (torch.full(scaled.shape, k, dtype=torch.uint8) for k in range(256))
    outcomes = torch.stack([round_stochastic(scaled, random) for random in bytes_]).double()
    mean, variance, zero = stochastic_e2m1(scaled.double())
    torch.testing.assert_close(mean, outcomes.mean(0), atol=1e-12, rtol=0)
    torch.testing.assert_close(variance, outcomes.var(0, unbiased=False), atol=1e-12, rtol=0)
    torch.testing.assert_close(zero, (outcomes == 0).double().mean(0), atol=1e-12, rtol=0)


def in_numpy(x: Any, byte: Any, np: Any, types: Any) -> Any:
    """NVFP4 of [blocks, 16] in FP64 from the format's definition: S = 448 * 6 / amax, scales to nearest, codes up with floor((part of a step) + byte/256)."""
    whole = 448 * 6 / np.abs(x).max()
    scale = (np.abs(x).max(1, keepdims=True) / 6 * whole).astype(types.float8_e4m3fn).astype(np.float64)
    y = np.minimum(np.abs(x) * whole / scale, 6.0)
    step = np.where(y >= 4, 2.0, np.where(y >= 2, 1.0, 0.5))
    return np.sign(x) * np.minimum(np.floor(y / step + byte / 256) * step, 6.0) * scale / whole


def test_an_expected_gradient_is_the_mean_of_a_second_implementation() -> None:
    np, types = pytest.importorskip("numpy"), pytest.importorskip("ml_dtypes")
    x = normal(64, 128)
    found = Operands(NVFP4).expected(x, gemm="dgrad", side="dy")
    blocks = x.double().numpy().reshape(-1, 16)
    outcomes = np.stack([in_numpy(blocks, byte, np, types) for byte in range(256)])
    wanted = torch.from_numpy(outcomes.mean(0)).reshape(x.shape)
    # FP32 multipliers and FP64 differ in the last bits, which moves a probability by 1/256 where 256 f is a whole number
    off = (found.mean - wanted).abs() > 1e-5 * wanted.abs() + 1e-6
    assert float(off.double().mean()) < 0.01
    drawn = np.random.default_rng(0).integers(0, 256, (400, *blocks.shape))
    mean = torch.from_numpy(np.mean([in_numpy(blocks, byte, np, types) for byte in drawn], 0)).reshape(x.shape)
    z = ((mean - found.mean) / (found.variance / 400).sqrt())[found.variance > 1e-9]
    assert abs(float(z.mean())) < 5 / math.sqrt(z.numel())
    assert float(z.std()) == pytest.approx(1.0, abs=0.05)


def shortfall(source: torch.Tensor, bins: int = 64) -> tuple[float, float]:
    """(alignment, floor in bits) of unbiased rounding that clips, from the energy of the elements near the maximum of their block alone; source: [blocks, 16]."""
    position = (source.abs() / source.abs().amax(1, keepdim=True)).flatten()
    energy = source.square().flatten() / source.square().sum()
    low = 1 - clipping(E4M3).worst
    which = ((position - low) / (1 - low) * bins).floor()
    mean = square = 0.0
    for k in range(bins + 1):  # the last bin holds the maxima themselves
        law = clipping(E4M3, 1.0 if k == bins else low + (k + 0.5) / bins * (1 - low))
        share = float(energy[which == k].sum())
        mean, square = mean + law.mean * share, square + law.square * share
    return -mean, bits(square)


# a few blocks hold most of a lognormal tensor's energy, so its scales are few
@pytest.mark.parametrize(
    ("kind", "chance"), [("normal", 0.0002), ("student-3", 0.001), ("lognormal", 0.004), ("sparse", 0.0005)]
)
def test_nvfp4_gradients_are_short_by_what_the_closed_form_says(kind: str, chance: float) -> None:
    made, x = Operands(NVFP4), KINDS[kind]((768, 256), torch.Generator().manual_seed(0)).bfloat16()
    for gemm in ("dgrad", "wgrad"):
        found = made.expected(x, gemm=gemm, side="dy")  # type: ignore[arg-type]
        seen = operand_figures(found)
        alignment, floor = shortfall((found.source if gemm == "dgrad" else found.source.T).reshape(-1, 16))
        # eight random bits add at most 1/256 of a step, on average 1/512, to the loss by clipping
        assert -0.001 - chance < seen["alignment"] - alignment < chance
        assert seen["floor bits"] == pytest.approx(floor, abs=0.1 + 100 * chance)
        assert seen["largest loss"] <= bounds(made, "dy", torch.bfloat16)["largest loss"][0]


@pytest.mark.parametrize(
    ("variant", "alignment", "floor", "error"),
    [(None, -0.00398, 6.62, 18.83), ("scale-up", -0.00072, 10.19, 22.20), ("headroom", -0.00072, 10.18, 23.53)],
)
def test_rounding_the_scale_up_removes_the_clipping(
    variant: str | None, alignment: float, floor: float, error: float
) -> None:
    made = Operands(NVFP4, variant=None if variant is None else VARIANTS[variant])
    found = operand_figures(made.expected(normal(1024, 1024), gemm="dgrad", side="dy"))
    assert found["alignment"] == pytest.approx(alignment, abs=4e-5)
    assert found["floor bits"] == pytest.approx(floor, abs=0.05)
    assert found["MSE"] == pytest.approx(error * 1e-3, rel=3e-3)
    assert (found["clipped"] == 0) is (variant is not None)
    # only gradients are changed
    x = normal(128, 128)
    changed, plain = (one.expected(x, gemm="fprop", side="x").mean for one in (made, Operands(NVFP4)))
    assert torch.equal(changed, plain)


def test_outliers_pass_less_of_a_small_signal_unless_the_scale_is_rounded_up() -> None:
    x = KINDS["sparse"]((1024, 512), torch.Generator().manual_seed(0)).bfloat16()
    plain, up = (figures.gain(Operands(NVFP4, variant=v), x, "wgrad", 1) for v in (None, VARIANTS["scale-up"]))
    assert plain < -0.01 < up


def both(generator: torch.Generator, blocks: int) -> torch.Tensor:
    """Blocks of 128, [blocks, 128], whose sizes are spread over an octave."""
    x = torch.randn(blocks, 128, generator=generator) * torch.exp2(torch.rand(blocks, 1, generator=generator))
    return x.bfloat16()


@pytest.mark.parametrize(
    ("scaling", "format_", "side", "element"),
    [("mxfp8", "e4m3", "x", E4M3), ("mxfp8", "hybrid", "x", E4M3), ("mxfp8", "hybrid", "dy", E5M2), ("blockwise", "e4m3", "x", E4M3)],
)  # fmt: skip
def test_powers_of_two_move_exactly_where_the_condition_holds(
    scaling: str, format_: str, side: Any, element: NumberFormat
) -> None:
    options = (("power_of_two", True),) if scaling == "blockwise" else ()
    made, gemm = Operands(Quant(format=format_, scaling=scaling, options=options)), "dgrad" if side == "dy" else "fprop"
    x = both(torch.Generator().manual_seed(0), 4096)
    first = made.expected(x, gemm=gemm, side=side)  # type: ignore[arg-type]
    second = made.expected(first.mean.bfloat16(), gemm=gemm, side=side)  # type: ignore[arg-type]
    peak = (x.double() * first.scale).abs().view(-1, made.quantizer.block(side).along).amax(1)  # type: ignore[union-attr]
    law = second_pass(element)
    moves = (peak > law.low) & (peak <= law.high if law.closed else peak < law.high)
    assert torch.equal((second.scale != first.scale).view(len(peak), -1).any(1), moves)
    assert torch.equal(second.mean, first.mean)
    assert float(moves.double().mean()) == pytest.approx(law.share, abs=0.02)


def test_fp32_scales_return_the_largest_code_as_itself() -> None:
    made = Operands(Quant(format="e4m3", scaling="tensorwise"))
    for seed in range(16):
        x = both(torch.Generator().manual_seed(seed), 8).float()
        first, second = (one := made.expected(x, gemm="fprop", side="x")), made.expected(one.mean.float(), gemm="fprop", side="x")  # fmt: skip
        torch.testing.assert_close(second.mean, first.mean, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("side", "element"), [("x", E4M3), ("dy", E5M2)])
def test_a_normal_number_errs_by_at_most_the_bound_and_reaches_it(side: Any, element: NumberFormat) -> None:
    made = Operands(Quant(format="hybrid", scaling="tensorwise"))
    scaled = torch.linspace(2.0 ** (2 - element.bias), 4.0, 1 << 18).float()
    x = torch.cat([scaled, torch.tensor([element.largest])])[None]  # the largest makes the scale 1
    found = made.expected(x, gemm="dgrad" if side == "dy" else "fprop", side=side)
    worst = float((found.mean / x.double() - 1).abs().amax())
    bound = relative_error(element.mantissa)
    assert 0.999 * bound < worst <= bound * (1 + 1e-6)
    assert bounds(made, side, torch.bfloat16)["MSE"][0] == pytest.approx(bound**2, rel=0.02)


def test_a_gemms_errors_are_those_of_draws() -> None:
    dy, x, w = normal(128, 128), normal(128, 128, seed=1), normal(128, 128, seed=2)
    made = Operands(NVFP4)
    for gemm, other, side in (("dgrad", w, "w"), ("wgrad", x, "x")):
        pair = made.expected(dy, gemm=gemm, side="dy"), made.expected(other, gemm=gemm, side=side)  # type: ignore[arg-type]
        wanted = product(gemm, dy.double(), other.double())  # type: ignore[arg-type]
        # the transform is orthogonal: up to its rounding to BF16 the product stays
        rotated = product(gemm, pair[0].source, pair[1].source)  # type: ignore[arg-type]
        assert float((rotated - wanted).norm() / wanted.norm()) < 2**-7
        found = figures.gemm_figures(gemm, *pair, (dy.double(), other.double()))  # type: ignore[arg-type]
        draws = (made.quantizer.operand(dy, slot="linear", gemm=gemm, side="dy") for _ in range(64))  # type: ignore[union-attr, arg-type]
        drawn = torch.stack([product(gemm, one.dequantized().double(), pair[1].mean) for one in draws])  # type: ignore[arg-type]
        law = dict(figures.concentration(found["one step bits"], found["plateau bits"], (1, 16)))
        for count, predicted in law.items():
            error = (drawn.view(-1, count, *wanted.shape).mean(1) - wanted).square().sum((1, 2)).mean()
            assert bits(float(error / wanted.square().sum())) == pytest.approx(predicted, abs=0.02)


def test_nvfp4_blocks_vanish_on_the_second_pass_exactly_where_the_condition_holds() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1 << 14, 16, generator=generator) * torch.exp2(-20 * torch.rand(1 << 14, 1, generator=generator))
    x[0] = 4.0
    x = x.bfloat16()
    made = Operands(NVFP4)
    first = made.expected(x, gemm="fprop", side="x").mean
    second = made.expected(first.bfloat16(), gemm="fprop", side="x").mean
    vanished = (first != 0).any(1) & (second == 0).all(1)
    low, high = nvfp4_second_pass(E2M1, E4M3)
    v = x.double().abs().amax(1) / 6 * (448 * 6 / 4.0)
    assert int(vanished.sum()) > 50
    # a block amax in BF16 that gives v at an end of the interval exactly is not among these
    assert torch.equal(vanished, (v > low) & (v <= high))


def test_ms_eden_needs_redrawn_signs_to_average_out() -> None:
    x, generator = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)), torch.Generator().manual_seed(1)
    errors = {}
    for name, signs in (("redrawn", None), ("fixed", torch.ones(128))):
        mean = torch.stack([ms_eden(x, generator, signs=signs) for _ in range(64)]).mean(0)
        errors[name] = bits(float((mean - x).square().sum() / x.square().sum()))
    assert errors["redrawn"] > 6 > 4 > errors["fixed"]


@pytest.mark.usefixtures("torchaos_own")
def test_rowwise_is_torchaos_own() -> None:
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig

    x = normal(64, 128)
    made = Operands(Quant(format="e4m3", scaling="rowwise")).expected(x, gemm="fprop", side="x")
    theirs = hp_tensor_to_float8_dynamic(
        x, torch.float8_e4m3fn, LinearMMConfig(), scaling_granularity=ScalingGranularity.AXISWISE, axiswise_dim=-1, round_scales_to_power_of_2=True,
    )  # fmt: skip
    assert torch.equal(made.mean, theirs._data.double() / theirs._scale.double())


def test_attention_errs_to_one_side_only_if_rounded_before_the_division() -> None:
    before = [figures.attention_bias(torch.bfloat16, sign=sign, rows=512)[0] for sign in (-1.0, 1.0)]
    after = figures.attention_bias(torch.bfloat16, divided=True, rows=512)[0]
    assert all(0.15 < value < 0.25 for value in before)
    assert abs(after) < 0.05
    assert 6 < figures.mismatch(torch.bfloat16) / figures.mismatch(torch.float16) < 10


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")
def test_newton_schulz_moves_singular_values_by_its_polynomial_and_errs_by_its_products() -> None:
    np, types = pytest.importorskip("numpy"), pytest.importorskip("ml_dtypes")
    matrix = torch.randn(128, 256, generator=torch.Generator().manual_seed(0))
    m = matrix.double().numpy()
    # an odd polynomial of a matrix is that polynomial of its singular values
    u, s, v = np.linalg.svd(m, full_matrices=False)
    s = s / np.linalg.norm(m)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    exact = u @ np.diag(s) @ v
    found = newton_schulz(matrix, "fp64").numpy()
    assert np.abs(found - exact).max() < 1e-6

    def narrow(x: Any) -> Any:
        return x.astype(types.bfloat16).astype(np.float32)

    x = m.astype(np.float32) / np.float32(np.linalg.norm(m))
    for _ in range(5):
        square = narrow(x) @ narrow(x).T
        x = 3.4445 * x + narrow(-4.7750 * square + 2.0315 * (narrow(square) @ narrow(square))) @ narrow(x)
    wanted = bits(float(((x - exact) ** 2).sum() / (exact**2).sum()))
    rows = {row.where: row.value for row in figures.newton_schulz_rows()}
    assert rows["Newton-Schulz in FP32, products of BF16 (medium)"] == pytest.approx(wanted, abs=0.1)
    # three more mantissa bits
    high = rows["Newton-Schulz in FP32, products of TF32 (high)"]
    assert high == pytest.approx(wanted + 3, abs=0.3)
    assert wanted < high < rows["Newton-Schulz in FP32 (highest)"]
    weight = torch.nn.Parameter(torch.zeros_like(matrix))
    weight.grad = matrix.clone()
    # torch's own scale of an update is 1 for a matrix that is wider than high
    torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    torchs = -weight.detach().double().numpy()
    wanted = bits(float(((torchs - exact) ** 2).sum() / (exact**2).sum()))
    assert rows["Newton-Schulz in BF16 throughout"] == pytest.approx(wanted, abs=0.1)


def test_a_run_with_muon_is_told_what_its_iteration_loses() -> None:
    policy = resolve(get_mixed_precision_config("bf16_mixed")).settled()
    made = certificate("bf16_mixed", policy, dataclasses.replace(TRAINING, name="muon"), kinds=("normal",), replicas=1)
    assert any(row.where == "Newton-Schulz in FP32 (highest)" for row in made.rows)


def test_recommend_orders_recipes_as_their_gradients_erred_in_training(cli) -> None:
    file = Path(__file__).parents[2] / "scripts/evidence/data/certificate_correlation.json"
    runs = json.loads(file.read_text())["trained"].values()
    arms = {"fp16_mixed": "fp16", "bf16_mixed": "bf16", "bf16_with_fp8_subchannel_scaling_mixed": "blockwise hybrid", "bf16_with_nvfp4_mixed": "nvfp4"}  # fmt: skip
    error = {name: sum(run[arm]["gradient"] for run in runs) / len(runs) for name, arm in arms.items()}
    printed = cli("recommend --by error --target b200 --config gpt_tiny model.num_layers=16 --json")
    found = [one for one in json.loads(printed)["recipes"] if one["legal"]]
    assert [one["error"] for one in found] == sorted(one["error"] for one in found)
    ordered = [one["recipe"] for one in found if one["recipe"] in arms]
    assert ordered == sorted(arms, key=error.__getitem__)
    predicted = {one["recipe"]: one["error"] for one in found}
    # in a model errors also pass from layer to layer
    assert all(0.2 < predicted[name] / error[name] < 1.5 for name in arms)


def test_a_certificate_of_ones_own_tensors_beside_a_variant(
    tmp_path: Path, cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, few in (("kinds", ("normal",)), ("replicas", 2)):
        monkeypatch.setitem(certificate.__kwdefaults__, name, few)  # type: ignore[arg-type]
    save = pytest.importorskip("safetensors.torch").save_file
    file, page = tmp_path / "mine.safetensors", tmp_path / "page.html"
    save({"fc.x": normal(256, 128), "fc.w": normal(128, 128), "fc.dy": normal(256, 128)}, file)
    command = ["certify", "bf16_with_nvfp4_mixed", "--tensors", str(file), "--against", "scale-up", "--out", str(page)]
    found = json.loads(cli(*command, "--json"))
    own = [row for row in found["rows"] if row.get("tensor") == "yours: fc"]
    assert {row["part"] for row in own} == {"operand", "gemm", "second pass"}
    assert found["against"]["variant"] == {"name": "scale-up", "offered": False}
    assert "no stack offers this yet" in found["against"]["sentences"]["recipe"]
    assert {row["derivation"] for row in found["rows"]} == {"exact", "closed form", "measured"}
    assert "Numeric certificate" in page.read_text(encoding="utf-8")


def test_each_number_says_how_it_is_known() -> None:
    policy = resolve(get_mixed_precision_config("bf16_with_nvfp4_mixed")).settled()
    own = {"fc": Linear(x=normal(128, 128).float(), w=normal(128, 128, seed=1).float(), dy=normal(128, 128, seed=2).float())}  # fmt: skip
    how: Any = {"kinds": ("normal",), "own": own, "replicas": 2}
    made = [certificate("nvfp4", policy, TRAINING, variant=one, **how) for one in (None, VARIANTS["ms-eden"])]
    rows = {(i, r.tensor, r.where, r.quantity): r for i, one in enumerate(made) for r in one.rows}
    without = [r for r in rows.values() if r.derivation == "measured" and r.ci95 is None and math.isfinite(r.value)]
    assert not without
    assert rows[0, "yours: fc", "dgrad dy row", "MSE"].derivation == "exact"
    # of one tensor what is drawn beside it still has an interval
    for index, quantity in ((0, "small-signal gain"), (1, "MSE")):
        drawn_ = rows[index, "yours: fc", "dgrad dy row", quantity]
        assert drawn_.derivation == "measured"
        assert drawn_.ci95
    # a rotated-back draw has no clipped elements to count, though its blocks do clip
    assert (1, "normal", "dgrad dy row", "clipped") not in rows
    columns, printed = table_of(made, "operand", measured=True)
    cells = {row[:2]: dict(zip(columns, row, strict=True)) for row in printed}
    assert re.fullmatch(r"0\.0\d+ \+- \S+ / 0\.0\d+ \+- \S+", cells["normal", "dgrad dy row"]["MSE"])
    assert re.fullmatch(r"0\.0\d+ / 0\.0\d+ \+- \S+", cells["yours: fc", "dgrad dy row"]["MSE"])
    assert cells["normal", "dgrad dy row"]["clipped"].endswith(" / -")
    assert "(<= 0.0588)" in cells["normal", "fprop x row"]["largest loss"]


@pytest.mark.parametrize(("recipe", "bound"), [("fp32", None), ("bf16_mixed", 2**-16), ("fp16_mixed", 2**-22)])
def test_casts_keep_their_bound_and_fp32_says_that_nothing_is_rounded(recipe: str, bound: float | None) -> None:
    policy = resolve(get_mixed_precision_config(recipe)).settled()
    made = certificate(recipe, policy, TRAINING, replicas=1)
    errors = [row for row in made.rows if row.quantity == "MSE"]
    assert {one.tensor for one in errors} == set(KINDS)
    if bound is None:
        assert all(one.value == 0 for one in errors)
        assert all("not rounded" in said for gemm, said in made.sentences.items() if gemm != "recipe")
        assert made.sentences["recipe"].startswith("no product is rounded")
    else:
        assert all(one.bound == pytest.approx(bound, rel=0.02) and one.value <= one.bound for one in errors)


def test_a_file_of_weights_is_certified_with_inputs_and_gradients_that_differ(tmp_path: Path) -> None:
    pytest.importorskip("safetensors.torch").save_file({"fc.weight": normal(128, 128)}, tmp_path / "weights")
    ((name, linear),) = tensors_of(tmp_path / "weights").items()
    assert name == "fc.weight, x and dy drawn"
    assert torch.equal(linear.w, normal(128, 128).float())
    correlation = float((linear.x * linear.dy).mean())
    assert abs(correlation) < 0.05  # the weight is square: drawn from one seed each, they would be equal


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bf16_mixed", "--variant", "scale-up"], "variants are of NVFP4"),
        (["bf16_mxpf8"], "nearest"),
        (["bf16_mixed", "--against", "bf16_mxpf8"], "nearest"),
        (["bf16_mixed", "--tensors", "{file}"], "not a safetensors file"),
        (["bf16_mixed", "--tensors", "{nan}"], "dy has 1 values that are not finite"),
        (["bf16_mixed", "--tensors", "{zero}"], "x has nothing but zeros"),
        (["bf16_mixed", "--te", "two"], "not a Transformer Engine release"),
        (["bf16_mixed", "--te", "9.9"], "has not been tried"),
        (["optimizer.rate=1"], "no setting in optimizer"),
    ],
)
def test_misuse_names_the_cure_before_anything_is_computed(
    arguments: list[str], said: str, tmp_path: Path, cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def computes(*_: object, **__: object) -> None:
        raise AssertionError("it computes first")

    monkeypatch.setattr("mpbridge.numerics.certificates.certificate.certificate", computes)
    file = tmp_path / "other"
    file.write_text("text")
    save = pytest.importorskip("safetensors.torch").save_file
    x, nan = normal(128, 128), normal(128, 128)
    nan[3, 4] = math.nan
    save({"x": x, "w": x.clone(), "dy": nan}, tmp_path / "nan")
    save({"x": x * 0, "w": x, "dy": x.clone()}, tmp_path / "zero")
    places = {"file": file, "nan": tmp_path / "nan", "zero": tmp_path / "zero"}
    assert said in cli("certify", *(a.format(**places) for a in arguments), code=2)


def test_every_variant_says_whether_transformer_engine_offers_it() -> None:
    own = {name for name, one in VARIANTS.items() if not one.offered}
    assert own == {"scale-up", "headroom", "ms-eden", "ms-eden-fixed"}
    assert all(dataclasses.is_dataclass(one) and one.words for one in VARIANTS.values())
