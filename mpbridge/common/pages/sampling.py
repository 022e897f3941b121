"""Reduces content that does not fit into one page: curves lose points first, tables and charts their less important rows and curves after that; each block says so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

POINTS = 600
"""Maximum points of a curve: more than a wide screen has columns."""
FEWEST = 60
"""Points that a curve keeps as long as something else can be dropped."""


def plain(value: Any) -> Any:
    """Rounds to five digits; values that are not finite become text."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else str(value)
    return value


def thin(block: dict[str, Any], most: int = POINTS) -> None:
    """At most `most` points per curve: the smallest and largest of each stretch, so that no spike is lost."""
    for line in block.get("series", ()):
        points = line["points"]
        whole = line.setdefault("whole", len(points))
        if len(points) <= most:
            continue
        stride = math.ceil(2 * len(points) / most)
        kept: list[Any] = []
        for start in range(0, len(points), stride):
            part = points[start : start + stride]
            ends = {id(point): point for point in (min(part, key=_height), max(part, key=_height))}
            kept += sorted(ends.values(), key=lambda point: point[0])
        block["sampled"] = (
            f"each curve drawn with the extremes of its stretches, at most {len(kept)} of {whole:,} points"
        )
        line["points"] = kept


def spare(blocks: Sequence[dict[str, Any]]) -> bool:
    """Makes a page about half as large; False if there is nothing left to drop."""
    longest = [max((len(line["points"]) for line in block.get("series", ())), default=0) for block in blocks]
    if max(longest, default=0) > FEWEST:
        for block in blocks:
            thin(block, max(FEWEST, max(longest) // 2))
        return True
    spared = [_halve(block) for block in blocks]
    return any(spared)


def packed(block: dict[str, Any]) -> dict[str, Any]:
    """A chart with each list of x stored once: curves that were measured together share it."""
    if block["kind"] != "chart":
        return block
    grids: dict[tuple[Any, ...], int] = {}
    series = [
        {
            "name": line["name"],
            "layer": line["layer"],
            "x": grids.setdefault(tuple(point[0] for point in line["points"]), len(grids)),
            "y": [point[1] for point in line["points"]],
        }
        for line in block["series"]
    ]
    return {**block, "series": series, "xs": list(grids)}


def _height(point: Sequence[Any]) -> float:
    return float(point[1]) if isinstance(point[1], (int, float)) else math.inf


def _halve(block: dict[str, Any]) -> bool:
    """Drops half of a block's rows, curves or layers, the less important ones; False if there is nothing to drop."""
    if block["kind"] == "table" and len(block["rows"]) > 20:
        whole = block.setdefault("whole", len(block["rows"]))
        stay = sorted(block["order"][: len(block["order"]) // 2])
        number = {old: new for new, old in enumerate(stay)}
        block["order"] = [number[old] for old in block["order"] if old in number]
        block["rows"] = [block["rows"][old] for old in stay]
        block["sampled"] = f"{len(stay):,} of {whole:,} rows, the most important ones"
        return True
    if block["kind"] == "chart" and len(block["series"]) > 12:
        whole = block.setdefault("whole", len(block["series"]))
        block["series"] = block["series"][: len(block["series"]) // 2]
        block["kept"] = f"{len(block['series'])} of {whole} curves are on this page, {block['order']}."
        return True
    if block["kind"] == "heat" and len(block["layers"]) > 24:
        whole = block.setdefault("whole", len(block["layers"]))
        block["layers"] = block["layers"][::2]
        block["grid"] = [row[::2] for row in block["grid"]]
        block["sampled"] = f"{len(block['layers'])} of {whole} layers, evenly spread"
        return True
    return False
