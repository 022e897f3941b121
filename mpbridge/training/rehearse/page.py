"""The page of a rehearsal: verdicts with links to their plots, losses, errors by layer, ranges, amaxes and all operands."""

from __future__ import annotations

import math

from mpbridge.common.formats import FORMATS
from mpbridge.common.pages.about import glossary, made_now
from mpbridge.common.pages.document import Page
from mpbridge.common.tables import Column
from mpbridge.training.rehearse.report import (
    NO_RANKING,
    OPERANDS,
    OVERVIEW,
    TONES,
    Rehearsal,
    Rehearsed,
    TensorSummary,
    operand,
    overview,
    place,
    place_of,
)

LOW = -32
"""The power of two of the first histogram bin, as in mpbridge.numerics.statistics.BINS."""
MARKS = {"sound": "good", **TONES}
SIDES = {"x": "activations", "w": "weights", "dy": "gradients"}
PRODUCTS = [
    Column(name="layer", number=False, layer=True, help="layer of the model"),
    Column(name="linear", number=False),
    *(
        Column(name=f"{gemm} error", unit="percent", help=f"||e|| / ||output|| of {words}")
        for gemm, words in (("fprop", "Y = X Wt"), ("dgrad", "dX = dY W"), ("wgrad", "dW = dYt X"))
    ),
    Column(
        name="beyond its format", help="the largest of the three relative to the format's error for a Gaussian tensor"
    ),
]
TERMS = ("amax", "copy", "dgrad, fprop, wgrad", "flushed", "operand", "row error", "saturated", "scale", "SQNR", "staleness")  # fmt: skip


def page(rehearsal: Rehearsal) -> str:
    """The HTML: a single file that loads nothing else."""
    made = Page(rehearsal.title, made_now(**rehearsal.made), glossary(*TERMS))
    place_ = len(made.blocks)
    losses = ""
    if any(recipe.losses for recipe in rehearsal.recipes):
        series = [(recipe.recipe, list(enumerate(recipe.losses, start=1)), "") for recipe in rehearsal.recipes]
        losses = made.chart("Loss of every recipe", series, y="loss, nats per token", note=NO_RANKING)
    links = {recipe.recipe: _recipe(made, recipe, losses) for recipe in rehearsal.recipes}
    body, made.blocks[place_:] = made.blocks[place_:], []
    rows = []
    for recipe in rehearsal.recipes:
        name, word, *figures = overview(recipe)
        rows.append([{"text": name, "href": links[name]}, {"text": word, "tone": MARKS.get(word, "")}, *figures])
    made.table("", OVERVIEW, rows)
    if not losses:
        made.text(NO_RANKING, dim=True)
    if rehearsal.suggestion:
        made.verdicts("What tuning suggests", [{"text": line} for line in rehearsal.suggestion])
    made.blocks += body
    return made.html()


def _recipe(made: Page, recipe: Rehearsed, losses: str) -> str:
    """A recipe's section; returns the id of its heading."""
    word, reasons = recipe.verdict()
    heading = made.heading(recipe.recipe, word, MARKS.get(word, ""))
    at = len(made.blocks)
    picture = _operands(made, recipe) if recipe.tensors else losses
    body, made.blocks[at:] = made.blocks[at:], []
    made.verdicts("", [{"text": reason, "href": picture or None} for reason in reasons])
    if recipe.quantized:
        made.text(f"{recipe.quantized} linears quantized, {recipe.high} kept in high precision", dim=True)
    made.blocks += body
    if recipe.notes:
        made.verdicts("What differs from the GPU", [{"text": note} for note in recipe.notes])
    return heading


def _operands(made: Page, recipe: Rehearsed) -> str:
    """Charts and tables of operands and products; returns the id of the chart that reasons refer to."""
    heat = _heat(made, recipe)
    _ranges(made, recipe)
    _amaxes(made, recipe)
    rows = [operand(row) for row in recipe.tensors]
    order = sorted(range(len(rows)), key=lambda i: _error(recipe.tensors[i]))
    made.table("The worst operands, relative to their format's own error", OPERANDS, [*map(operand, recipe.worst)])
    if recipe.measured is not None and recipe.measured.products:
        found = recipe.measured.products
        products = [[*place_of(one.linear), *one.errors.values(), round(one.excess, 2)] for one in found]
        made.table("Products of every linear, against high precision's", PRODUCTS, products)
    made.table("all operands", OPERANDS, rows, order=order, folded=True)
    return heat


def _error(row: TensorSummary) -> float:
    return -(row["row_error"] or 0.0)


def _heat(made: Page, recipe: Rehearsed) -> str:
    values = {place(row): row["row_error"] or 0.0 for row in recipe.tensors}
    layers = sorted({layer for layer, _ in values}, key=lambda text: int(text or -1))
    # one colour scale for all recipes: so that they can be compared
    return made.heat("Median row error by layer", layers, list(dict.fromkeys(kind for _, kind in values)), values, low=0.01, high=1.0)  # fmt: skip


def _ranges(made: Page, recipe: Rehearsed) -> None:
    """One chart for each side: where the rows' amaxes lie in the format's range."""
    for side, word in SIDES.items():
        rows = [row for row in recipe.tensors if row["side"] == side]
        if not rows:
            continue
        counts = [sum(column) for column in zip(*(row["ranges"] for row in rows), strict=True)]
        number = FORMATS[rows[0]["format"]]
        made.chart(
            f"{word} in the range of {number.name}",
            [("rows", [(LOW + i, float(count)) for i, count in enumerate(counts)], "")],
            x="log2 of a row's amax after scaling",
            y="rows",
            bars=True,
            marks=[(math.log2(number.smallest), f"smallest {number.smallest:g}"), (math.log2(number.largest), f"largest {number.largest:g}")],
        )  # fmt: skip


def _amaxes(made: Page, recipe: Rehearsed) -> None:
    rows = (one for one in sorted(recipe.tensors, key=_error) if len(one["amax"]) > 1 and one["copy"] == "row")
    series = [(row["tensor"], [(step, amax) for step, amax in row["amax"]], place(row)[0]) for row in rows]
    if series:
        made.chart("amax of every operand", series, y="amax", log=True, order="largest errors first")
