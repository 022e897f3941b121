"""Pictures of a rehearsal: the loss curves together, errors by layer as heat maps, row amaxes in each format's range."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from mpbridge.common.formats import FORMATS
from mpbridge.common.report.pictures import pyplot
from mpbridge.training.rehearse.report import Rehearsal, Rehearsed, place

LOW = -32
"""The power of two of the first histogram bin, as in mpbridge.numerics.statistics.BINS."""
SIDES = {"x": "activations", "w": "weights", "dy": "gradients"}


def draw(rehearsal: Rehearsal, folder: Path) -> list[Path]:
    """Writes the PNG files and returns their paths, the losses first. Raises MpbridgeError if matplotlib is missing."""
    plt = pyplot()
    found = []
    if any(recipe.losses for recipe in rehearsal.recipes):
        found.append(_save(plt, _losses(plt, rehearsal), folder / "losses.png"))
    for recipe in rehearsal.recipes:
        if recipe.tensors:
            found.append(_save(plt, _heat(plt, recipe), folder / f"errors_{recipe.recipe}.png"))
            found.append(_save(plt, _ranges(plt, recipe), folder / f"ranges_{recipe.recipe}.png"))
            if any(len(row["amax"]) > 1 for row in recipe.tensors):
                found.append(_save(plt, _amaxes(plt, recipe), folder / f"amax_{recipe.recipe}.png"))
    return found


def _save(plt: Any, figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)
    return path


def _losses(plt: Any, rehearsal: Rehearsal) -> Any:
    figure, axes = plt.subplots(figsize=(8, 4))
    for recipe in rehearsal.recipes:
        if recipe.losses:
            axes.plot(range(1, len(recipe.losses) + 1), recipe.losses, label=recipe.recipe, linewidth=1.2)
    axes.set(xlabel="step", ylabel="loss, nats per token", title="loss (differences of this size do not rank recipes)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def _heat(plt: Any, recipe: Rehearsed) -> Any:
    values: dict[tuple[str, str], float] = {}
    for row in recipe.tensors:
        layer, kind = place(row)
        values[kind, layer] = row["row_error"] or 0.0
    kinds, layers = (
        list(dict.fromkeys(k for k, _ in values)),
        sorted({layer for _, layer in values}, key=lambda x: int(x or -1)),
    )
    grid = [[values.get((kind, layer), math.nan) for layer in layers] for kind in kinds]
    figure, axes = plt.subplots(figsize=(3.5 + 0.6 * len(layers), 1.2 + 0.3 * len(kinds)))
    from matplotlib.colors import LogNorm

    # one colour scale for all recipes: so that the pictures can be compared
    image = axes.imshow(grid, aspect="auto", cmap="inferno", norm=LogNorm(vmin=0.01, vmax=1.0))
    axes.set_xticks(range(len(layers)), layers)
    axes.set_yticks(range(len(kinds)), kinds, fontsize=8)
    axes.set(xlabel="layer", title=f"{recipe.recipe}\nmedian relative error of a row")
    if len(layers) * len(kinds) <= 400:
        for i, line in enumerate(grid):
            for j, value in enumerate(line):
                if not math.isnan(value):
                    axes.text(
                        j,
                        i,
                        f"{100 * value:.0f}",
                        ha="center",
                        va="center",
                        fontsize=7,
                        color="white" if value < 0.2 else "black",
                    )
    bar = figure.colorbar(image, ax=axes, ticks=[0.01, 0.03, 0.1, 0.3, 1.0], format=lambda value, _: f"{100 * value:g}")
    bar.set_label("percent")
    bar.ax.minorticks_off()
    return figure


def _ranges(plt: Any, recipe: Rehearsed) -> Any:
    sides = [side for side in SIDES if any(row["side"] == side for row in recipe.tensors)]
    figure, all_axes = plt.subplots(len(sides), 1, figsize=(8, 2.1 * len(sides)), sharex=True, squeeze=False)
    for side, axes in zip(sides, all_axes[:, 0], strict=True):
        rows = [row for row in recipe.tensors if row["side"] == side]
        counts = [sum(column) for column in zip(*(row["ranges"] for row in rows), strict=True)]
        number = FORMATS[rows[0]["format"]]
        axes.bar([LOW + i + 0.5 for i in range(len(counts))], counts, width=0.95, color="#4878a8")
        axes.axvspan(math.log2(number.smallest), math.log2(number.largest), color="#58a858", alpha=0.18)
        axes.axvline(math.log2(number.largest), color="#b04040", linewidth=1)
        axes.axvline(math.log2(number.smallest), color="#b04040", linewidth=1)
        axes.set(ylabel="rows", yscale="log" if any(counts) else "linear")
        axes.set_title(
            f"{SIDES[side]} in {number.name}: green is the format's range, {number.smallest:g} to {number.largest:g}",
            fontsize=9,
        )
    all_axes[-1, 0].set_xlabel("log2 of a row's amax after scaling")
    figure.suptitle(f"{recipe.recipe}: where the rows lie in the format's range", fontsize=10)
    figure.tight_layout()
    return figure


def _amaxes(plt: Any, recipe: Rehearsed) -> Any:
    figure, axes = plt.subplots(figsize=(8, 3.2))
    colors = {"x": "#4878a8", "w": "#58a858", "dy": "#b04040"}
    named: set[str] = set()
    for row in recipe.tensors:
        points = [(step, amax) for step, amax in row["amax"] if amax and math.isfinite(amax)]
        if points:
            label = SIDES[row["side"]] if row["side"] not in named else None
            named.add(row["side"])
            axes.plot(
                *zip(*points, strict=True),
                color=colors[row["side"]],
                alpha=0.35,
                linewidth=0.9,
                marker=".",
                markersize=3,
                label=label,
            )
    axes.set(xlabel="step", ylabel="amax", title=f"{recipe.recipe}: amax of every operand over time")
    if named:
        axes.set_yscale("log")
        axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    return figure
