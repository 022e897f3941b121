"""Verdicts follow from the gradient's error and from products, with figures made by hand."""

from __future__ import annotations

import pytest

from mpbridge.training.rehearse.measure import ProductErrors, RecipeMeasurement
from mpbridge.training.rehearse.report import Rehearsed
from mpbridge.training.tune.proof import GradientError


def product(excess: float) -> ProductErrors:
    return ProductErrors(
        linear="decoder.layers.3.mlp.linear_fc2", errors={"fprop": 0.4, "dgrad": 0.1, "wgrad": 0.1}, excess=excess
    )


def measured(noise: float, bias: float, *products: ProductErrors) -> RecipeMeasurement:
    error = (noise**2 + bias**2) ** 0.5
    return RecipeMeasurement(
        gradient=GradientError(errors=[error, error], gaps=[0.0, 0.0], bias=bias, noise=noise), products=list(products)
    )


@pytest.mark.parametrize(
    ("found", "word", "says"),
    [
        (measured(0.2, 0.1), "sound", "below 1/sqrt 3"),
        (measured(0.58, 0.1), "damage", "larger global batch averages noise out"),
        (measured(0.2, 0.58), "damage", "a larger batch does not average bias out"),
        (measured(0.2, 0.1, product(2.5)), "look closer", "1 of 1 linears"),
        (measured(0.2, 0.1, product(1.5)), "sound", "below"),
    ],
)
def test_the_verdict_is_about_gradients_then_products(found: RecipeMeasurement, word: str, says: str) -> None:
    assert found.verdict()[0] == word
    assert says in " ".join(found.verdict()[1])


def test_operands_are_detail_where_gradients_were_measured() -> None:
    row = {
        "tensor": "a.x", "slot": "a", "side": "x", "copy": "row", "gemms": ["fprop"], "format": "e4m3", "scaling": "tensorwise", "row_error": 0.9,
        "relative_error": 0.9, "flushed": 0.9, "saturated": 0.0, "sqnr": 1.0, "nonfinite": 0, "staleness": None, "amax": [], "ranges": [],
    }  # fmt: skip
    assert Rehearsed(recipe="r", tensors=[row]).verdict()[0] == "damage"
    assert Rehearsed(recipe="r", tensors=[row], measured=measured(0.2, 0.1)).verdict()[0] == "sound"
    broken = Rehearsed(recipe="r", tensors=[{**row, "nonfinite": 3}], measured=measured(0.2, 0.1))
    assert broken.verdict()[0] == "damage"
    assert "3 infinities or NaN" in " ".join(broken.verdict()[1])
