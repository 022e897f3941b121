"""Options of the scalings: NVFP4's variants against Transformer Engine's reference, switches from the environment, and what they refuse."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mpbridge.common.errors import BadValue, Refused
from mpbridge.common.formats import DType
from mpbridge.numerics import emulate_linears
from mpbridge.numerics.quantizer import Quantizer
from mpbridge.numerics.scales import options_of, release_of
from mpbridge.precision.policy import PrecisionPolicy, Quant, Region
from tests.numerics import golden
from tests.numerics.conftest import operand, policy_of, quant_of, quantizer_of

HERE = Path(__file__).resolve().parent
VALUES = json.loads((HERE / "golden_te_main.json").read_text())["values"]


def quantizer(scaling: str = "nvfp4", release: Any = (2, 20), **options: Any) -> Quantizer:
    return quantizer_of(quant_of(scaling, options=tuple(sorted(options.items()))), release=release)


def variant(name: str) -> dict[str, Any]:
    """Our options for a variant's name in the golden file."""
    scope, *words = name.split("_")[:-1]
    if words == ["plain"]:
        return {}
    if words == ["lines"]:
        return {"square_weights": False}
    options: dict[str, Any] = {"hadamard": False}
    if words[0] == "rows":
        options |= {"row_scaled_activations": True, "backward": "high_precision"}
        words = words[1:]
    if words:
        options |= {
            "four_over_six": f"{scope}s", "four_over_six_256": "all" if words[0] == "256" else "none", "four_over_six_error": words[1],
        }  # fmt: skip
    return options


@pytest.mark.parametrize("name", sorted(VALUES))
def test_operands_equal_transformer_engines_reference(name: str) -> None:
    side, copy = {"activation": "x", "weight": "w"}[name.split("_")[0]], name.split("_")[-1]
    q = quantizer(**variant(name))
    for kind, x in golden.inputs().items():
        made, wanted = operand(q, x, side, copy), VALUES[name][kind]
        found = golden.entry(made.values)
        assert found["sha"] == wanted["values"]["sha"], f"{kind}: {found} but the reference gave {wanted['values']}"
        bound = 256.0 if "_256_" in name else 448.0
        assert float(made.alpha.double().sum()) * 6 * bound == pytest.approx(wanted["amax"]["sum"], rel=1e-6)


def test_four_over_six_takes_the_smaller_error_by_hand() -> None:
    # block amax 4 under a tensor amax of 6: mapped to 6, a 4 becomes code 6 with scale 448 * 4/6 = 298.7 -> 288, and 3 falls between codes; mapped
    # to 4, the scale is 448 and every integer to 4 is a code
    x = torch.zeros(16, 32, dtype=torch.bfloat16)
    x[0, 0] = 6.0
    x[1, :16] = torch.tensor([4.0, 3.0, 2.0, 1.0] * 4)
    both = {}, {"four_over_six": "all", "four_over_six_256": "none"}
    plain, four = (operand(quantizer(hadamard=False, **more), x) for more in both)
    # up to the second-level factor's own rounding
    assert torch.allclose(four.dequantized()[:2, :16], x[:2, :16].float(), rtol=1e-6)
    assert not torch.allclose(plain.dequantized()[1, :16], x[1, :16].float(), rtol=1e-2)


def test_fast_errors_decide_otherwise_only_where_both_choices_err_alike() -> None:
    x = torch.randn(1024, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact, fast = (
        operand(quantizer(hadamard=False, four_over_six="all", four_over_six_fast_error=chosen), x).dequantized()
        for chosen in (False, True)
    )
    errors = [(made.double() - x.double()).abs().view(-1, 16).sum(1) for made in (exact, fast)]
    other = (exact != fast).view(-1, 16).any(1)
    assert 0 < int(other.sum()) < 100  # of 16,384 blocks
    torch.testing.assert_close(errors[0][other], errors[1][other], rtol=1e-5, atol=0)


def test_a_row_has_a_second_level_scale_of_its_own() -> None:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[0] *= 2.0**40
    plain, rows = (operand(quantizer(hadamard=False, **more), x) for more in ({}, {"row_scaled_activations": True}))
    assert (plain.dequantized()[1:] == 0).all()
    assert rows.alpha.shape == (32, 1)
    assert (rows.dequantized()[1:] - x[1:].float()).abs().max() < 0.5


# --- linears ------------------------------------------------------------------------------------------------------------------------------
def policy(quant: Quant, compute: DType = DType.BF16) -> PrecisionPolicy:
    return policy_of(Region(quant=quant), compute=compute)


def given() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x, weight, dy) of `run`."""
    torch.manual_seed(0)
    weight = torch.nn.Linear(128, 128, bias=False).bfloat16().weight.detach()
    x, dy = (torch.randn(64, 128, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in (1, 2))
    return x, weight, dy


def run(
    quant: Quant, environment: dict[str, str] | None = None, release: str = "2.20"
) -> tuple[list[torch.Tensor], Any]:
    """[y, dx, dw] of one linear for a given gradient, and the emulation."""
    x, _, dy = given()
    torch.manual_seed(0)
    net = torch.nn.ModuleList([torch.nn.Linear(128, 128, bias=False)]).bfloat16()
    emulation = emulate_linears(net, policy(quant), compiled=False, environment=environment or {}, release=release)
    y = net[0](x.requires_grad_())
    y.backward(dy)
    emulation.detach()
    return [y.detach(), x.grad, net[0].weight.grad], emulation  # type: ignore[list-item]


NVFP4 = Quant(format="e2m1", scaling="nvfp4")


@pytest.mark.parametrize(
    ("quant", "variable", "text", "option", "moves"),
    [
        pytest.param(NVFP4, "NVTE_NVFP4_DISABLE_RHT", "1", ("hadamard", False), "w", id="no-hadamard"),
        pytest.param(NVFP4, "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING", "1", ("stochastic_rounding", False), "xw", id="no-stochastic-rounding"),
        pytest.param(NVFP4, "NVTE_NVFP4_DISABLE_2D_QUANTIZATION", "1", ("square_weights", False), "yx", id="no-square-weights"),
        pytest.param(NVFP4, "NVTE_NVFP4_4OVER6", "weights", ("four_over_six", "weights"), "yx", id="four-over-six"),
        pytest.param(NVFP4, "NVTE_BACKWARD_OVERRIDE", "high_precision", ("backward", "high_precision"), "xw", id="high-precision-backward"),
        pytest.param(NVFP4, "NVTE_BACKWARD_OVERRIDE", "dequantized", ("backward", "dequantized"), "xw", id="dequantized-backward"),
        pytest.param(NVFP4, "NVTE_USE_FAST_MATH", "1", ("fast_math", True), "w", id="fast-math"),
        pytest.param(Quant(format="e4m3", scaling="tensorwise"), "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", "1", ("power_of_two", True), "yxw", id="power-of-two"),
        pytest.param(Quant(format="e4m3", scaling="blockwise"), "NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1", ("power_of_two", False), "yxw", id="fp32-scales"),
        pytest.param(Quant(format="e4m3", scaling="mxfp8"), "NVTE_BACKWARD_OVERRIDE", "dequantized", ("backward", "dequantized"), "xw", id="mxfp8-backward"),
    ],
)  # fmt: skip
def test_a_switch_of_the_environment_has_the_recipes_effect_and_is_reported(
    quant: Quant, variable: str, text: str, option: tuple[str, Any], moves: str
) -> None:
    plain, _ = run(quant)
    outside, emulation = run(quant, {variable: text})
    inside, _ = run(Quant(format=quant.format, scaling=quant.scaling, options=(option,)))
    changed = "".join(name for name, a, b in zip("yxw", plain, outside, strict=True) if not torch.equal(a, b))
    assert changed == moves
    assert all(torch.equal(a, b) for a, b in zip(outside, inside, strict=True))
    assert any(f"{option[0]}=" in note and variable in note for note in emulation.notes())
    # what Transformer Engine does not read as yes changes nothing
    if option[0] not in ("four_over_six", "backward"):
        assert all(torch.equal(a, b) for a, b in zip(plain, run(quant, {variable: "true"})[0], strict=True))


def test_high_precision_backward_is_the_plain_one_and_dequantized_sees_the_forwards_operands() -> None:
    quant = Quant(format="e4m3", scaling="blockwise")
    (_, dx, dw), _ = run(quant, {"NVTE_BACKWARD_OVERRIDE": "high_precision"})
    x, weight, dy = given()
    assert torch.equal(dx, dy @ weight)
    assert torch.equal(dw, dy.t() @ x)
    (_, dx, dw), _ = run(quant, {"NVTE_BACKWARD_OVERRIDE": "dequantized"})
    q = quantizer("blockwise")
    assert torch.equal(dx, dy @ operand(q, weight, "w").dequantized().bfloat16())
    assert torch.equal(dw, dy.t() @ operand(q, x).dequantized().bfloat16())


def test_every_gemm_of_row_scaled_activations_is_near_the_exact_one() -> None:
    quant = Quant(format="e2m1", scaling="nvfp4", options=(("hadamard", False), ("row_scaled_activations", True)))
    found, _ = run(quant)
    x, weight, dy = (one.float() for one in given())
    for made, exact in zip(found, (x @ weight.t(), dy @ weight, dy.t() @ x), strict=True):
        # four bits: about a tenth of each operand's size
        assert float((made.float() - exact).norm() / exact.norm()) < 0.25


# --- releases -----------------------------------------------------------------------------------------------------------------------------
def test_an_option_that_the_release_does_not_know_is_refused_by_recipe_and_inert_by_variable() -> None:
    quant = Quant(format="e2m1", scaling="nvfp4", options=(("four_over_six", "weights"),))
    what = r"four_over_six=weights needs Transformer Engine 2\.17 or later, but the rules of 2\.11 are emulated"
    with pytest.raises(Refused, match=what):
        run(quant, release="2.11")
    plain, _ = run(NVFP4, release="2.11")
    outside, emulation = run(NVFP4, {"NVTE_NVFP4_4OVER6": "weights"}, release="2.11")
    assert all(torch.equal(a, b) for a, b in zip(plain, outside, strict=True))
    assert "NVTE_NVFP4_4OVER6 is set but has no effect before Transformer Engine 2.17" in emulation.notes()


@pytest.mark.parametrize(
    ("options", "release", "fault"),
    [
        pytest.param({"four_over_six": "all"}, (2, 20), "four_over_six=all with hadamard=true", id="hadamard"),
        pytest.param({"row_scaled_activations": True}, (2, 20), "row_scaled_activations=true with hadamard=true", id="rows-hadamard"),
        pytest.param({"row_scaled_activations": True, "hadamard": False}, (2, 18), "before Transformer Engine 2.19 .expected backward=high_precision", id="rows-backward"),
        pytest.param({"row_scaled_activations": True, "hadamard": False, "four_over_six": "all"}, (2, 20), "four_over_six=all with backward=quantized", id="both"),
    ],
)  # fmt: skip
def test_options_that_transformer_engine_refuses_together_are_refused(
    options: dict[str, Any], release: Any, fault: str
) -> None:
    quant = Quant(format="e2m1", scaling="nvfp4", options=tuple(sorted(options.items())))
    with pytest.raises(Refused, match=fault):
        options_of(quant, release, {})


def test_the_release_decides_rules_and_is_named() -> None:
    x = torch.full((32, 32), 1e-37, dtype=torch.bfloat16)
    old, new = (operand(quantizer("mxfp8", release), x).values for release in ((2, 12), (2, 13)))
    assert (old == 0).all()
    assert (new != 0).all()
    assert run(NVFP4, release="2.14")[1].notes()[0].startswith("emulated with the rules of Transformer Engine 2.14")
    assert release_of("2.14.1+cu") == release_of((2, 14)) == (2, 14)
    with pytest.raises(BadValue, match="'latest' is not a Transformer Engine release"):
        release_of("latest")


# --- NaN ----------------------------------------------------------------------------------------------------------------------------------
def nan_in(tensor: str, release: str, rows: int = 64, columns: int = 128) -> str:
    """Which of y, dx, dw hold a NaN after one was put into `tensor`."""
    torch.manual_seed(0)
    net = torch.nn.ModuleList([torch.nn.Linear(columns, 128, bias=False)]).bfloat16()
    emulation = emulate_linears(net, policy(NVFP4), compiled=False, environment={}, release=release)
    x, dy = torch.randn(rows, columns).bfloat16(), torch.randn(rows, 128).bfloat16()
    with torch.no_grad():
        {"x": x, "dy": dy, "w": net[0].weight}[tensor][3, 5] = torch.nan
    x.requires_grad_()
    y = net[0](x)
    y.backward(dy)
    emulation.detach()
    made = {"y": y, "x": x.grad, "w": net[0].weight.grad}
    return "".join(name for name, value in made.items() if bool(value.isnan().any()))


@pytest.mark.parametrize(
    ("tensor", "release", "sizes", "seen"),
    [
        # up to 2.13 the column copies come out of the fused kernel, the row copies from one that ignores NaN
        pytest.param("x", "2.11", (64, 128), "w", id="x-2.11"),
        pytest.param("dy", "2.11", (64, 128), "w", id="dy-2.11"),
        pytest.param("w", "2.11", (64, 128), "", id="w-2.11"),
        pytest.param("x", "2.14", (64, 128), "yw", id="x-2.14"),
        pytest.param("dy", "2.14", (64, 128), "xw", id="dy-2.14"),
        pytest.param("w", "2.14", (64, 128), "", id="w-2.14"),
        # sizes that the fused kernel does not take
        pytest.param("x", "2.14", (48, 128), "", id="rows"),
        pytest.param("x", "2.14", (64, 96), "", id="columns"),
    ],
)
def test_a_nan_shows_where_the_gpus_kernels_hand_it_on(
    tensor: str, release: str, sizes: tuple[int, int], seen: str
) -> None:
    assert nan_in(tensor, release, *sizes) == seen


# --- FP32 input and FP16 around -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("scaling", ["blockwise", "mxfp8"])
def test_operands_of_tiny_fp32_input_are_exact(scaling: str) -> None:
    # the smallest block scales times a code: below bf16's smallest number from 1e-36 on
    x = torch.randn(128, 128, generator=torch.Generator().manual_seed(0)) * 1e-37
    q = quantizer(scaling)
    made = operand(q, x)
    assert made.values.dtype is torch.float32
    q_view = x.view(-1, q.block("x").along)
    amax = q_view.abs().amax(1, keepdim=True).double()
    # powers of two, as the rules make them: fp32 input's own largest number bounds blockwise's, the exponent byte MXFP8's
    exponent = torch.floor(torch.log2(448 / amax)) if scaling == "blockwise" else -torch.ceil(torch.log2(amax / 448))
    scale = torch.exp2(exponent.clamp(max=127))
    codes = (q_view.double() * scale).float().to(torch.float8_e4m3fn).double()
    assert torch.equal(made.values.view(q_view.shape).double(), codes / scale)


def test_fp16_around_nvfp4_is_refused_as_transformer_engine_does() -> None:
    net = torch.nn.ModuleList([torch.nn.Linear(128, 128)]).half()
    with pytest.raises(Refused, match="NVFP4 with fp16 compute: Transformer Engine supports bf16 only"):
        emulate_linears(net, policy(NVFP4, DType.FP16))
    emulate_linears(net, policy(Quant(format="e4m3", scaling="mxfp8"), DType.FP16)).detach()


# --- another policy on the same model -----------------------------------------------------------------------------------------------------
def step(net: torch.nn.Module, emulation: Any) -> list[torch.Tensor]:
    """Two micro-batches of a step: output, and gradients summed."""
    emulation.step_begin()
    net.zero_grad()
    for seed in (1, 2):
        x = torch.randn(64, 128, generator=torch.Generator().manual_seed(seed)).bfloat16()
        y = net[1](net[0](x))
        y.float().square().mean().backward()
    return [y.detach(), *(p.grad.clone() for p in net.parameters())]


def test_a_switch_ends_where_building_anew_ends() -> None:
    def layers() -> torch.nn.ModuleList:
        torch.manual_seed(0)
        return torch.nn.ModuleList([torch.nn.Linear(128, 128), torch.nn.Linear(128, 128)]).bfloat16()

    delayed = policy(Quant(format="hybrid", scaling="delayed", amax_history=2))
    only_first = policy_of(Region(layers=((0, 0),), quant=NVFP4), Region())
    only_last = policy_of(Region(layers=((0, 0),)), Region(quant=Quant(format="e4m3", scaling="mxfp8")))
    net = layers()
    emulation = emulate_linears(net, delayed, compiled=False, environment={}, release="2.11")
    for wanted, release in ((only_first, None), (only_last, "2.14"), (delayed, "2.11"), (only_first, None)):
        step(net, emulation)
        emulation.switch(wanted, release=release)
        fresh = layers()
        anew = emulate_linears(fresh, wanted, compiled=False, environment={}, release=release or "2.11")
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(step(net, emulation), step(fresh, anew), strict=True))
        assert emulation.notes() == anew.notes()
        assert [type(linear).__name__ for linear in net] == [type(linear).__name__ for linear in fresh]
    emulation.detach()
    assert {type(linear) for linear in net} == {torch.nn.Linear}


def test_a_refused_switch_changes_nothing() -> None:
    net = torch.nn.ModuleList([torch.nn.Linear(128, 128)]).bfloat16()
    emulation = emulate_linears(net, policy(NVFP4), compiled=False, environment={})
    mine, plug = emulation.policy, net[0].plug
    dead = dataclasses.replace(mine, regions=(Region(modules="nothing", quant=NVFP4), Region()))
    for wanted, error in ((dead, BadValue), (dataclasses.replace(mine, compute=DType.FP16), Refused)):
        with pytest.raises(error):
            emulation.switch(wanted)
        assert emulation.policy is mine
        assert net[0].plug is plug
