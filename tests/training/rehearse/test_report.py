"""Verdicts of a rehearsal, with figures made by hand: gradients and products before operands, and what is said about them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from mpbridge.training.rehearse.page import page
from mpbridge.training.rehearse.report import (
    NO_RANKING,
    ProductErrors,
    RecipeMeasurement,
    Rehearsal,
    Rehearsed,
    by_layer,
    tables,
)
from mpbridge.training.tune.proof import GradientError


def row(**changes: Any) -> dict[str, Any]:
    """A tensor with nothing wrong."""
    slot = "decoder.layers.1.mlp.linear_fc1"
    harmless: dict[str, Any] = {
        "tensor": f"{slot}.x", "slot": slot, "side": "x", "copy": "row", "gemms": ["fprop"], "format": "e4m3", "scaling": "mxfp8", "samples": 1, "relative_error": 0.026,
        "row_error": 0.026, "flushed": 0.0, "saturated": 0.0, "sqnr": 31.0, "nonfinite": 0, "staleness": None, "amax": [[1, 3.0]], "ranges": [0] * 49,
    }  # fmt: skip
    return harmless | changes


def test_a_loss_that_is_not_finite_and_a_refusal_fail() -> None:
    assert Rehearsed(recipe="r", losses=[2.0, math.nan], tensors=[row()]).verdict() == (
        "failed",
        ["the loss of step 2 is not finite"],
    )
    assert Rehearsed(recipe="r", failure="no").verdict() == ("failed", ["no"])
    assert Rehearsed(recipe="r", losses=[2.0]).verdict()[0] == "high precision"


def test_the_worst_tensors_come_first() -> None:
    tensors = [
        row(),
        row(tensor="a.x", slot="a", row_error=0.3),
        row(tensor="b.dy", slot="b", side="dy", format="e5m2", row_error=0.4),
    ]
    # relative to what the format costs, E4M3 at 0.3 suffers more than E5M2 at 0.4
    assert [r["tensor"] for r in Rehearsed(recipe="r", tensors=tensors).worst[:2]] == ["a.x", "b.dy"]
    assert Rehearsed(recipe="r", tensors=[*tensors, row(tensor="nan.x", nonfinite=3)]).worst[0]["tensor"] == "nan.x"


def test_layers_are_counted_as_the_model_counts_them() -> None:
    found = by_layer([row(), row(slot="head", tensor="head.x")])
    assert found["1"] == {"mlp.linear_fc1.x row": 0.026}
    assert "head.x row" in found[""]


def test_the_report_is_json_whatever_the_numbers(tmp_path: Path) -> None:
    rehearsal = Rehearsal(
        title="t",
        made={},
        recipes=[Rehearsed(recipe="r", losses=[math.inf], tensors=[row(sqnr=math.inf, amax=[[1, math.inf]])])],
    )
    rehearsal.write(tmp_path / "report.json")
    data = json.loads(
        (tmp_path / "report.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON")
    )
    assert data["recipes"][0]["losses"] == [None]
    assert data["remark"] == NO_RANKING


def test_tables_and_page_take_every_kind_of_recipe_and_escape_names() -> None:
    recipes = [
        Rehearsed(recipe="<b>", losses=[1.0], tensors=[row(staleness=0.5)]),
        Rehearsed(recipe="x", failure="because <i>"),
    ]
    rehearsal = Rehearsal(title="A & B", made={"steps": 1}, recipes=recipes)
    assert len(tables(rehearsal)) == 2
    html = page(rehearsal)
    # names are data of the page: no markup, and nothing that ends the element they stand in
    data = html.partition('<script id="data" type="application/json">')[2].partition("</script>")[0]
    found = json.loads(data)
    assert found["title"] == "A & B"
    assert [block["title"] for block in found["blocks"] if block["kind"] == "heading"] == ["<b>", "x"]
    assert "because <i>" in json.dumps(found)
    assert "<" not in data
    assert "<title>A &amp; B</title>" in html


# --- gradients and products -------------------------------------------------------------------------------------------------------------
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


def test_operands_are_detail_unless_they_are_not_finite() -> None:
    bad = row(row_error=0.9, flushed=0.9)
    assert Rehearsed(recipe="r", quantized=4, tensors=[bad], measured=measured(0.2, 0.1)).verdict()[0] == "sound"
    broken = Rehearsed(recipe="r", quantized=4, tensors=[bad, bad | {"nonfinite": 3}], measured=measured(0.2, 0.1))
    word, reasons = broken.verdict()
    assert word == "damage"
    assert reasons[0] == "1 of 2 operands have infinities or NaN"
    assert reasons[1].endswith("linear_fc1.x (row): 3 infinities or NaN")
    assert reasons[2].startswith("gradient error")


def test_what_is_quantized_without_statistics_of_its_operands_is_judged() -> None:
    """torchao's linears: nothing tells of their operands."""
    assert Rehearsed(recipe="r", quantized=4, measured=measured(0.58, 0.1)).verdict()[0] == "damage"
    assert Rehearsed(recipe="r", quantized=0, measured=measured(0.0, 0.0)).verdict()[0] == "high precision"
