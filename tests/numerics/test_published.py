"""The pages of certificates: published figures beside ours, and a row for every built-in recipe and variant."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mpbridge.numerics.certificates.expected import Operands, varied, vary
from mpbridge.numerics.certificates.figures import bits, concentration, drawn, gemm_figures, product
from mpbridge.numerics.modules import emulate_linears
from mpbridge.planning.certificates import VARIANTS
from mpbridge.precision.policy import Quant
from mpbridge.precision.recipes import BUILT_IN
from mpbridge.precision.registry import get_mixed_precision_config
from mpbridge.precision.resolve import resolve

SCRIPT = Path(__file__).parents[2] / "scripts" / "evidence" / "certificates.py"
_spec = importlib.util.spec_from_file_location("evidence_certificates", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
evidence: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(evidence)
DATA = json.loads(evidence.DATA.read_text(encoding="utf-8"))


@pytest.mark.parametrize("number", range(len(evidence.CLAIMS)))
def test_ours_is_the_published_figure_or_it_is_said_why_not(number: int) -> None:
    source, what, published, ours, tolerance, why = evidence.CLAIMS[number]
    found = ours()
    assert (abs(found - published) <= tolerance * published) is (not why), found
    row = DATA["published"][number]
    assert (row["source"], row["what"], row["published"]) == (source, what, published)
    # a ratio of two means over 128 tokens of differences that lie about as a normal distribution: another order of sums draws other roundings, one standard
    # error of the ratio apart
    spread = math.sqrt(math.pi / 2 - 1) * math.sqrt(2 / 128) if "mismatch" in what else 2e-3
    assert row["ours"] == pytest.approx(found, rel=spread)


def test_enough_is_held_against_print() -> None:
    assert len(evidence.CLAIMS) >= 20
    assert len({source for source, *_ in evidence.CLAIMS}) >= 8


def test_every_recipe_and_variant_has_a_row_within_the_limit() -> None:
    assert [row["recipe"] for row in DATA["recipes"]] == [entry.name for entry in BUILT_IN]
    assert [row["variant"] for row in DATA["variants"]] == [None, *VARIANTS]
    assert all(row["seconds"] < 60 for row in DATA["recipes"])


@pytest.mark.parametrize("name", [None, *VARIANTS])
def test_an_emulated_linears_weight_gradient_errs_as_certified(name: str | None) -> None:
    variant, linear = None if name is None else VARIANTS[name], drawn("normal", 0)
    x, dy = linear.x.bfloat16(), linear.dy.bfloat16()
    made = Operands(Quant(format="e2m1", scaling="nvfp4"), release=(2, 17), variant=variant)
    pair = made.expected(dy, gemm="wgrad", side="dy"), made.expected(x, gemm="wgrad", side="x")
    certified = gemm_figures("wgrad", *pair, (dy.double(), x.double()))
    config = get_mixed_precision_config("bf16_with_nvfp4_mixed")
    config.first_last_layers_bf16 = False
    policy = resolve(config).settled()
    model = torch.nn.Sequential(torch.nn.Linear(x.shape[1], dy.shape[1], bias=False, dtype=torch.bfloat16))
    emulation = emulate_linears(model, policy if variant is None else varied(policy, variant), compiled=False, release="2.17")  # fmt: skip
    for quantizer in emulation.quantizers.values():
        if variant is not None:
            vary(quantizer, variant)
    wanted = product("wgrad", dy.double(), x.double())
    found = []
    for _ in range(8):
        emulation.step_begin()
        model.zero_grad()
        model(x).backward(dy)
        found.append(model[0].weight.grad.double())  # type: ignore[union-attr, operator]
    for count, bit in concentration(certified["one step bits"], certified["plateau bits"], (1, 8)):
        error = torch.stack([torch.stack(found[i : i + count]).mean(0) - wanted for i in range(0, 8, count)])
        assert bits(float(error.square().sum() / len(error) / wanted.square().sum())) == pytest.approx(bit, abs=0.06)
