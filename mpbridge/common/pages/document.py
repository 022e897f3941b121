"""A page as data, and the HTML that shows it. Content too large for one file is sampled, and the page says so."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpbridge.common import files
from mpbridge.common.errors import BadValue
from mpbridge.common.tables import Column, table

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
        most_said = f"at most {len(kept)} of {whole:,} points"
        block["sampled"] = f"each curve drawn with the extremes of its stretches, {most_said}"
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
    series = []
    for line in block["series"]:
        grid = grids.setdefault(tuple(point[0] for point in line["points"]), len(grids))
        heights = [point[1] for point in line["points"]]
        series.append({"name": line["name"], "layer": line["layer"], "x": grid, "y": heights})
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


LARGEST = 2_000_000
"""Maximum bytes of a page."""
CURVES = 12
"""Number of curves drawn at once in a chart: as many as there are distinguishable colours."""
_HERE = Path(__file__).parent


@dataclass(slots=True)
class Page:
    """Blocks in order, under a title. made: model, data, command, date ..., shown on top; glossary: term -> sentence, at the end."""

    title: str
    made: Mapping[str, str]
    glossary: Mapping[str, str] = field(default_factory=dict)
    blocks: list[dict[str, Any]] = field(default_factory=list)
    _number: int = 0

    def add(self, kind: str, title: str = "", **values: Any) -> str:
        """Adds a block and returns its id, for links."""
        self._number += 1
        made = f"b{self._number}"
        self.blocks.append({"kind": kind, "id": made, "title": title, **values})
        return made

    def heading(self, title: str, word: str = "", tone: str = "") -> str:
        """Begins a section. tone: 'good', 'warn', 'bad' or '' colours the word after the title."""
        return self.add("heading", title, word=word, tone=tone)

    def text(self, text: str, *, dim: bool = False) -> str:
        """A paragraph."""
        return self.add("text", text=text, dim=dim)

    def verdicts(self, title: str, items: Iterable[Mapping[str, Any]]) -> str:
        """A list: text, and optionally word, tone, href (an id of a block) and more (lines below it)."""
        return self.add("verdicts", title, items=[dict(item) for item in items])

    def chart(
        self,
        title: str,
        series: Iterable[tuple[str, Sequence[tuple[float, float]], str]],
        *,
        x: str = "step",
        y: str,
        log: bool = False,
        bars: bool = False,
        marks: Iterable[tuple[float, str]] = (),
        note: str = "",
        order: str = "most important first",
        reach: tuple[float, float] | None = None,
    ) -> str:
        """Curves: (name, points, layer or '') each. y: label with the unit. marks: vertical lines at x with a label each. Of more than CURVES curves, the first are
        drawn, and the others by a layer, a part of their names or page by page; order: the page's description of their order. reach: x range that the
        axis shows at least, so that charts can be compared."""
        lines = [(name, layer, [[x_, plain(y_)] for x_, y_ in points]) for name, points, layer in series]
        curves = [{"name": name, "layer": layer, "points": points} for name, layer, points in lines]
        return self.add(
            "chart", title, series=curves, x=x, y=y, log=log, bars=bars, marks=[list(mark) for mark in marks],
            note=note, order=order, reach=list(reach or ()), shown=CURVES,
        )  # fmt: skip

    def table(
        self,
        title: str,
        columns: Sequence[Column],
        rows: Sequence[Sequence[Any]],
        *,
        order: Sequence[int] | None = None,
        folded: bool = False,
    ) -> str:
        """A table that sorts and filters. order: rows by importance, used if not all fit; a cell may be {"text":, "href":, "tone":}. A column in which
        no row has a value is omitted."""
        filled = table(title, columns, rows).filled()
        shown = ("name", "help", "unit", "number", "layer")
        heads = [{name: getattr(column, name) for name in shown} for column in filled.columns]
        cells, ranked = [list(map(plain, row)) for row in filled.rows], list(order or range(len(rows)))
        return self.add("table", title, columns=heads, rows=cells, order=ranked, folded=folded)

    def heat(
        self,
        title: str,
        layers: Sequence[str],
        kinds: Sequence[str],
        values: Mapping[tuple[str, str], float],
        *,
        low: float,
        high: float,
        unit: str = "percent",
        note: str = "",
    ) -> str:
        """Numbers by layer (columns) and kind (rows) on one logarithmic colour scale from `low` to `high`; a click selects a layer. unit: 'percent' shows
        shares as percent, 'times' factors."""
        grid = [[plain(values.get((layer, kind))) for layer in layers] for kind in kinds]
        return self.add(
            "heat", title, layers=list(layers), kinds=list(kinds), grid=grid, low=low, high=high, unit=unit, note=note
        )

    def html(self, *, largest: int = LARGEST) -> str:
        """The file's text, at most `largest` bytes. Raises BadValue if even the smallest sample is larger."""
        from jinja2 import Environment, PackageLoader, StrictUndefined

        loader = PackageLoader("mpbridge.common.pages", ".")
        environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
        template = environment.get_template("page.html.j2")
        assets = {name: (_HERE / path).read_text(encoding="utf-8") for name, path in _ASSETS.items()}
        for block in self.blocks:
            thin(block)
        while True:
            blocks = [packed(block) for block in self.blocks]
            data = {"title": self.title, "made": self.made, "glossary": self.glossary, "blocks": blocks}
            text = template.render(title=self.title, data=_json(data), policy=_policy(assets), **assets)
            # a file's text may have half of a surrogate pair, which no encoding writes
            text = text.encode(errors="backslashreplace").decode()
            if len(text.encode()) <= largest:
                return text
            if not spare(self.blocks):
                raise BadValue(f"the page cannot be made smaller than {len(text.encode()):,} bytes")


_ASSETS = {
    "uplot": "vendor/uPlot.iife.min.js", "uplot_style": "vendor/uPlot.min.css", "style": "page.css", "script": "page.js",
}  # fmt: skip


def _json(data: Any) -> str:
    """JSON for a script element: without `<` no value can end the element or open a comment in it."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def _policy(assets: Mapping[str, str]) -> str:
    """A content security policy: the page's own scripts and styles by hash, and nothing from anywhere."""

    def hashes(*names: str) -> str:
        digests = (hashlib.sha256(assets[name].encode()).digest() for name in names)
        return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)

    own = f"script-src {hashes('uplot', 'script')}; style-src {hashes('uplot_style', 'style')}"
    return f"default-src 'none'; {own}; base-uri 'none'; form-action 'none'"


def writable(path: Path, *, folder: bool = False, option: str = "--out") -> None:
    """Raises BadValue if a file (or folder) cannot be written at `path`, the value of `option`; call it before the work, not after it."""
    if path.is_symlink() and not folder:
        why = "which outputs are not written through: remove it, or name its target"
        raise BadValue(f"{option} {path} is a symbolic link, {why}")
    if folder:
        place = next(one for one in (path, *path.parents) if one.exists())
        if not place.is_dir():
            raise BadValue(f"{option} {path}: {place} is a file, expected a folder, or a path where one can be created")
    else:
        place = path.parent
        if path.is_dir():
            raise BadValue(f"{option} {path} is a folder, expected a file")
        if not place.is_dir():
            raise BadValue(f"{option} {path}: folder {place} does not exist")
    if not os.access(place, os.W_OK) or (path.is_file() and not os.access(path, os.W_OK)):
        raise BadValue(f"{option} {path}: {place} cannot be written")


def write(path: Path, text: str) -> None:
    """Writes a page. Raises BadValue with the file's name if it cannot be written after all."""
    try:
        files.write(path, text)
    except OSError as error:
        raise BadValue(f"--out {path} cannot be written: {error.strerror or error}") from None
